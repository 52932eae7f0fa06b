// SPDX-License-Identifier: Apache-2.0
// Combinations and inputs at the edge of what policies mean.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "../support/random_layer.hpp"
#include "lowrankkv/presets.hpp"

using namespace lowrankkv;

namespace {

const CacheShape kShape{2, 1, 32};

std::vector<float> rows(std::mt19937_64& random, int tokens, int heads, float scale = 1.0F) {
  std::normal_distribution<float> normal(0.0F, scale);
  std::vector<float> all(static_cast<std::size_t>(tokens * heads * 32));
  for (float& value : all) value = normal(random);
  return all;
}
LayerBasis basis() {
  support::Random random(7);
  return support::random_basis(random, kShape, {}, 8, 8);
}
template <class Cache>
void ingest(Cache& cache, std::mt19937_64& random, int n, float scale = 1.0F) {
  const auto q = rows(random, n, 2), k = rows(random, n, 1, scale), v = rows(random, n, 1, scale);
  cache.ingest(0, {k.data(), n, 1, 32}, {v.data(), n, 1, 32}, {q.data(), n, 2, 32});
}

}  // namespace

TEST_CASE(
    "policies that never compress take members that ask for residuals, and updaters that have "
    "nothing to do") {
  std::mt19937_64 random(1);
  CompressedKVCache<Cpu, PerHead, Static, Compose<KeepFull, ResidualOutliers>> outliers(
      {.shape = kShape, .max_tokens = 300});
  outliers.create(0);
  ingest(outliers, random, 200);
  CHECK(outliers.num_tokens(0) == 200);
  CompressedKVCache<Cpu, PerHead, FrequentDirections, KeepFull> idle(
      {.shape = kShape, .max_sequences = 2, .max_tokens = 300});
  idle.create(0);
  ingest(idle, random, 200);
  std::vector<std::byte> bytes(idle.save_bytes(0));
  idle.save(0, bytes);
  idle.load(1, bytes);
  CHECK(idle.num_tokens(1) == 200);
}

TEST_CASE("rows that are not finite reach no basis, and a flush is never left half-way") {
  std::mt19937_64 random(2);
  CacheConfig config{.shape = kShape, .max_tokens = 600};
  config.check_finite = false;
  config.flush_interval = 8;
  config.publish_interval = 20;
  const auto run = [&]<class Cache>(Cache cache) {
    cache.create(0);
    const int n = 300;
    const auto q = rows(random, n, 2);
    auto k = rows(random, n, 1), v = rows(random, n, 1);
    k[100 * 32 + 3] = std::numeric_limits<float>::quiet_NaN();
    v[220 * 32] = std::numeric_limits<float>::infinity();
    cache.ingest(0, {k.data(), 200, 1, 32}, {v.data(), 200, 1, 32}, {q.data(), 200, 2, 32});
    for (int token = 200; token < n; ++token)
      cache.append_maintained(0, {k.data() + token * 32, 1, 1, 32},
                              {v.data() + token * 32, 1, 1, 32});
    CHECK(cache.statistics().rejected_updates > 0);
    CHECK(cache.statistics().flushes > 5);
    // Rows that were finite are still read as finite rows.
    std::vector<float> decoded_k(300 * 32), decoded_v(decoded_k.size());
    cache.reconstruct(0, 0, {decoded_k.data(), n, 1, 32}, {decoded_v.data(), n, 1, 32});
    for (int token = 0; token < n; ++token) {
      if (token == 100 || token == 220) continue;
      REQUIRE(std::isfinite(decoded_k[static_cast<std::size_t>(token * 32)]));
      REQUIRE(std::isfinite(decoded_v[static_cast<std::size_t>(token * 32)]));
    }
  };
  run(SubSpaceA<>(config, basis()));
  run(OjaKV<>(config, basis()));
}

TEST_CASE(
    "truncating to where outliers are dense and going on raises an error before the page table is "
    "full, or works") {
  std::mt19937_64 random(3);
  CompressedKVCache<Cpu, PerHead, Static, Compose<SinkRecent, ResidualOutliers>>::PolicySet
      policies;
  policies.token_policy.get<ResidualOutliers>() = {OutlierError::absolute, 0.1F};
  CompressedKVCache<Cpu, PerHead, Static, Compose<SinkRecent, ResidualOutliers>> cache(
      {.shape = kShape, .max_tokens = 2000}, basis(), policies);
  cache.create(0);
  bool refused = false;
  std::int64_t length = 0;
  for (int round = 0; round < 40 && !refused; ++round) {
    // The first rows of every round are the large ones: all outliers are among them, and only they
    // survive.
    try {
      ingest(cache, random, 60, 100.0F);
      ingest(cache, random, 540, 0.1F);
      length = std::min<std::int64_t>(length + 60, 1300);
      cache.truncate(0, length);
    } catch (const CapacityError&) {
      refused = true;
    }
    // Whatever happened, the cache still answers for all of its tokens.
    std::vector<RowState> states(static_cast<std::size_t>(cache.num_tokens(0)));
    cache.row_states(0, 0, 0, states);
  }
  const std::int64_t tokens = cache.num_tokens(0);
  std::vector<float> k(static_cast<std::size_t>(tokens * 32)), v(k.size());
  cache.reconstruct(0, 0, {k.data(), tokens, 1, 32}, {v.data(), tokens, 1, 32});
  for (const float value : k) REQUIRE(std::isfinite(value));
}

TEST_CASE(
    "heavy hitters: accumulated scores are checked, and rows that another policy drops take no "
    "place") {
  std::mt19937_64 random(4);
  H2O<> cache({.shape = kShape, .max_tokens = 300});
  cache.create(0);
  ingest(cache, random, 100);
  std::vector<float> accumulated(100, 0.0F);
  accumulated[3] = std::numeric_limits<float>::quiet_NaN();
  CHECK_THROWS_AS(cache.accumulate(0, ScoreView(accumulated.data(), 1, 1, 100)), ValueError);
  accumulated[3] = -1.0F;
  CHECK_THROWS_AS(cache.accumulate(0, ScoreView(accumulated.data(), 1, 1, 100)), ValueError);
  CHECK_THROWS_AS(cache.accumulate(0, ScoreView(accumulated.data(), 1, 1, 99)), ShapeError);

  using Both = CompressedKVCache<Cpu, PerHead, Static, Compose<SnapKV, HeavyHitters>>;
  Both::PolicySet policies;
  policies.token_policy.get<SnapKV>() = {0.2F, 0, 10, 1, Pooling::average};
  policies.token_policy.get<HeavyHitters>() = {0.0F, 30, 10};
  Both both({.shape = kShape, .max_tokens = 300}, basis(), policies);
  both.create(0);
  ingest(both, random, 210);  // 200 rows leave, SnapKV keeps 40, of which the 30 heaviest stay
  std::vector<RowState> states(200);
  both.row_states(0, 0, 0, states);
  CHECK(std::count(states.begin(), states.end(), RowState::compressed) == 30);
}

TEST_CASE("epochs whose last heavy hitter was driven out are given back") {
  std::mt19937_64 random(9);
  using Cache = CompressedKVCache<Cpu, PerHead, Oja, HeavyHitters, NoQuantizer, KeepEpochs<4>>;
  Cache::PolicySet policies;
  policies.token_policy = {0.0F, 16, 0};
  CacheConfig config{.shape = kShape, .max_tokens = 300};
  config.flush_interval = 16;
  config.publish_interval = 16;
  Cache cache(config, basis(), policies);
  cache.create(0);
  std::size_t one = 0;
  for (int flush = 0; flush < 6; ++flush) {
    const auto k = rows(random, 17, 1), v = rows(random, 17, 1);
    cache.append(0, {k.data(), flush == 0 ? 17 : 16, 1, 32},
                 {v.data(), flush == 0 ? 17 : 16, 1, 32});
    const std::int64_t tokens = cache.num_tokens(0);
    std::vector<float> accumulated(static_cast<std::size_t>(tokens), 0.0F);
    std::fill(accumulated.end() - 17, accumulated.end(),
              std::pow(8.0F, static_cast<float>(flush)));  // more than all before them have
    cache.accumulate(0, ScoreView(accumulated.data(), 1, 1, tokens));
    cache.maintain(0);
    CHECK(cache.statistics().publications == flush + 1);
    CHECK(cache.statistics().merges == 0);
    if (flush == 0) one = cache.memory(0).epoch_bytes;
    CHECK(cache.memory(0).epoch_bytes == one);
  }
  CHECK(one > 0);
}
