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

}  // namespace residual_outliers_tests
