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

TEST_CASE("first_tokens: a share of the first tokens, and none of the others") {
  std::mt19937_64 random(5);
  for (int trial = 0; trial < 200; ++trial) {
    const auto first_tokens = static_cast<int>(1 + random() % 300);
    const ResidualOutliers policy{.share = 0.01F * static_cast<float>(random() % 101),
                                  .first_tokens = first_tokens};
    std::int64_t first = 0, rows = 0;
    while (first < 400) {
      const auto count = static_cast<std::int64_t>(1 + random() % 90);
      const std::int64_t own = outlier_rows(policy, first, count);
      CHECK(own <= outlier_candidates(policy, first, count));
      rows += own;
      first += count;
    }
    CHECK(rows == share_of_rows(policy.share, 0, first_tokens));
    CHECK(outlier_rows(policy, first_tokens, 100) == 0);
  }
  using Cache = CompressedKVCache<Cpu, PerHead, Static, Compose<SinkRecent, ResidualOutliers>>;
  Cache::PolicySet policies;
  policies.token_policy.get<SinkRecent>() = {4, 0};
  policies.token_policy.get<ResidualOutliers>() = {
      .error = OutlierError::absolute, .share = 2.0F / 128, .first_tokens = 128};
  Cache cache({.shape = kShape, .max_tokens = 400}, basis(), policies);
  cache.create(0);
  const int n = 300, width = kShape.num_kv_heads * kShape.head_dim;
  std::normal_distribution<float> normal;
  std::vector<float> k(static_cast<std::size_t>(n * width)), v(k.size());
  for (int i = 0; i < n * width; ++i) {
    const int token = i / width;  // later ones are no candidates
    const float scale = token == 9 || token == 57 ? 50.0F : token >= 128 ? 90.0F : 1.0F;
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
