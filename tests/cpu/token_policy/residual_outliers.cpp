// SPDX-License-Identifier: Apache-2.0
// Outliers of which only the dense part of a sequence stays.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "lowrankkv/presets.hpp"
#include "support/small_cache.hpp"

namespace residual_outliers_tests {

using namespace lowrankkv;
using namespace support::small;

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

TEST_CASE("early outliers: so many of the first 128 tokens, in proportion if there are fewer") {
  std::mt19937_64 random(5);
  for (int trial = 0; trial < 200; ++trial) {
    const ResidualOutliers policy{.share = 0.01F * static_cast<float>(random() % 4),
                                  .early = static_cast<int>(random() % 129)};
    std::int64_t first = 0, rows = 0;
    while (first < 400) {
      const auto count = static_cast<std::int64_t>(1 + random() % 90);
      rows += outlier_rows({.share = 0.0F, .early = policy.early}, first, count);
      first += count;
    }
    CHECK(rows == policy.early);
    CHECK(outlier_rows(policy, 0, 128) ==
          std::min<std::int64_t>(128, policy.early + share_of_rows(policy.share, 0, 128)));
    CHECK(outlier_rows(policy, 200, 100) == share_of_rows(policy.share, 200, 100));
  }
  using Cache = CompressedKVCache<Cpu, PerHead, Static, Compose<SinkRecent, ResidualOutliers>>;
  Cache::PolicySet policies;
  policies.token_policy.get<SinkRecent>() = {4, 0};
  policies.token_policy.get<ResidualOutliers>() = {
      .error = OutlierError::absolute, .share = 0.0F, .early = 2};
  Cache cache({.shape = kShape, .max_tokens = 400}, basis(), policies);
  cache.create(0);
  const int n = 300, width = kShape.num_kv_heads * kShape.head_dim;
  std::normal_distribution<float> normal;
  std::vector<float> k(static_cast<std::size_t>(n * width)), v(k.size());
  for (int i = 0; i < n * width; ++i) {
    const float scale = i / width == 9 || i / width == 57 ? 50.0F : 1.0F;
    k[static_cast<std::size_t>(i)] = scale * normal(random);
    v[static_cast<std::size_t>(i)] = scale * normal(random);
  }
  cache.ingest(0, {k.data(), n, kShape.num_kv_heads, kShape.head_dim},
               {v.data(), n, kShape.num_kv_heads, kShape.head_dim});
  std::vector<RowState> states(static_cast<std::size_t>(n));
  cache.row_states(0, 0, 0, states);
  for (int token = 0; token < n; ++token) {
    const bool full = token < 4 || token == 9 || token == 57;
    CHECK((states[static_cast<std::size_t>(token)] == RowState::full) == full);
  }
}

}  // namespace residual_outliers_tests
