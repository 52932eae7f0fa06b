// SPDX-License-Identifier: Apache-2.0
// Heavy hitters: accumulated attention scores, other policies beside them, epochs without a row.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "lowrankkv/presets.hpp"
#include "support/small_cache.hpp"

namespace heavy_hitters_tests {

using namespace lowrankkv;
using namespace support::small;

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
  ingest(both, random,
         210);  // 200 rows leave, SnapKV keeps 40, of which the 30 with the largest scores stay
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

}  // namespace heavy_hitters_tests
