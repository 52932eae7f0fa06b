// SPDX-License-Identifier: Apache-2.0
// maintain(): pages that it demands, sequences that are named twice.
#include <doctest/doctest.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "cuda/support/compositions.cuh"

namespace compress_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too
using support::host;
using support::Random;

TEST_CASE("maintain() demands the pages that it takes: with one less it changes nothing") {
  Random random(41);
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.max_tokens = 600;
  config.flush_interval = 16;
  config.tail_capacity = 256;
  const auto layer = support::random_layer(random, config.shape, {}, 16);
  using Cache =
      CompressedKVCache<Cuda, PerHead, Static, Compose<SinkRecent, ResidualOutliers>, NoQuantizer>;
  Cache::PolicySet policies;
  policies.token_policy.get<SinkRecent>() = {20, 32};
  policies.token_policy.get<ResidualOutliers>().share = 0.3F;
  const auto key = layer.rows(random, 250, true), value = layer.rows(random, 250, false);
  const gpu::DeviceArray<float> k(key), v(value);
  std::int64_t taken = 0;
  for (const std::int64_t missing :
       {std::int64_t{-1000}, std::int64_t{1},
        std::int64_t{0}}) {  // first with plenty, to learn how many it takes
    const auto pool = std::make_shared<gpu::PagePool>(
        Cache::page_bytes(config, layer.basis, policies), missing < 0 ? 1000 : taken - missing);
    Cache cache(config, layer.basis, policies, pool);
    cache.create(1);
    cache.append(1, {k.data(), 250, 2, 64}, {v.data(), 250, 2, 64});
    if (missing == 1) {
      CHECK_THROWS_AS(cache.maintain(1), CapacityError);
      CHECK(cache.tail_length(1) == 250);
      CHECK(pool->allocator().num_free() == taken - 1);
      continue;
    }
    cache.maintain(1);
    CHECK(cache.tail_length(1) <= 48);
    if (missing < 0)
      taken = 1000 - pool->allocator().num_free();
    else
      CHECK(pool->allocator().num_free() == 0);
  }
  CHECK(taken > 2);
}

TEST_CASE("a sequence named twice is maintained once; a layer that ends gives its pages back") {
  Random random(19);
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.max_tokens = 1000;
  const auto pool = std::make_shared<gpu::PagePool>(FullKV<Cuda>::page_bytes(config, {}, {}), 100);
  const support::RandomLayer layer = support::random_layer(random, config.shape, {}, 8);
  {
    FullKV<Cuda> twice(config, {}, {}, pool), once(config, {}, {}, pool);
    const auto key = layer.rows(random, 90, true), value = layer.rows(random, 90, false);
    const gpu::DeviceArray<float> k(key), v(value);
    std::vector<float> found, expected;
    for (auto [cache, rows] : {std::pair{&twice, &found}, std::pair{&once, &expected}}) {
      cache->create(7);
      cache->append(7, {k.data(), 90, 2, 64}, {v.data(), 90, 2, 64});
      const std::vector<SequenceId> seqs(cache == &twice ? 2 : 1, 7);
      cache->maintain(seqs);
      const gpu::DeviceArray<float> key_out(key.size()), value_out(value.size());
      cache->reconstruct(7, 0, {key_out.data(), 90, 2, 64}, {value_out.data(), 90, 2, 64});
      *rows = host(key_out);
    }
    CHECK(twice.tail_length(7) == once.tail_length(7));
    CHECK(found == expected);
    CHECK(pool->allocator().num_free() < 100);
  }
  CHECK(pool->allocator().num_free() == 100);
}

}  // namespace compress_tests
