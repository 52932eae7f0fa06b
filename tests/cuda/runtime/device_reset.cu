// SPDX-License-Identifier: Apache-2.0
// A program may reset its device and go on: what shared memory kernels are allowed is then
// forgotten, and asked for again.
#include <doctest/doctest.h>

#include <vector>

#include "cuda/support/device_cache.cuh"
#include "cuda/support/random_layer.hpp"

namespace device_reset_tests {

using namespace lowrankkv;
using support::Answer;
using support::DeviceCache;
using support::Random;

namespace {

/// Attention over some tokens whose tiles want more shared memory than a kernel has unasked (48
/// KB).
Answer attended() {
  CacheConfig config;
  config.shape = {.num_qo_heads = 4, .num_kv_heads = 2, .head_dim = 256};
  config.max_tokens = 600;
  Random random(7);
  const std::size_t numbers =
      static_cast<std::size_t>(config.shape.num_kv_heads * config.shape.head_dim);
  DeviceCache<FullKV<Cuda>> device(config, {}, {});
  device.cache.create(1);
  const auto rows = [&](std::size_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = static_cast<float>(random() % 2001) / 1000.0F - 1.0F;
    return values;
  };
  const std::vector<float> key = rows(500 * numbers), value = rows(500 * numbers),
                           query = rows(4 * 256);
  device.ingest(1, key, value);
  const SequenceId one = 1;
  return device.attend({&one, 1}, query);
}

}  // namespace

TEST_CASE("a device that was reset: kernels are allowed their shared memory again") {
  const Answer before = attended();
  REQUIRE(cudaDeviceReset() == cudaSuccess);
  CHECK(attended() == before);
}

}  // namespace device_reset_tests
