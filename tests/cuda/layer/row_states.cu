// SPDX-License-Identifier: Apache-2.0
// States of rows, the pages that they take, and many tokens in one call.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "cuda/support/device_cache.cuh"
#include "cuda/support/random_layer.hpp"

namespace row_states_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too
using support::DeviceCache;
using support::message_of;
using support::Random;
using support::Settings;

namespace {

using Codes = CompressedKVCache<Cuda, PerHead, Static, SinkRecent, TransformCode>;

}  // namespace

TEST_CASE("what has become of rows, what they take of pages, and many tokens at once") {
  Random random(907);
  Settings settings;
  settings.sinks = 3;
  settings.recent = 20;
  const CacheShape shape{4, 2, 64};
  const support::RandomLayer layer = support::random_layer(random, shape, settings, 32);
  const CacheConfig config{
      .shape = shape, .max_sequences = 3, .max_tokens = 2000, .flush_interval = 16};
  const auto check = [&]<class Cache>(typename Cache::PolicySet policies) {
    policies = support::configured(policies, settings);
    DeviceCache<Cache> device(config, layer.basis, policies);
    device.cache.create(1);
    const std::int64_t free = device.cache.pool().allocator().num_free();
    device.ingest(1, layer.rows(random, 400, true), layer.rows(random, 400, false),
                  layer.queries(random, 400));
    std::vector<float> key, value;
    device.reconstruct(1, key, value);
    for (int head = 0; head < 2; ++head) {
      std::vector<RowState> states(390);
      device.cache.row_states(1, head, 10, states);
      for (std::int64_t i = 0; i < 390; ++i) {
        const std::size_t first = static_cast<std::size_t>(((i + 10) * 2 + head) * 64);
        const bool zeros = std::all_of(value.begin() + static_cast<std::ptrdiff_t>(first),
                                       value.begin() + static_cast<std::ptrdiff_t>(first + 64),
                                       [](float x) { return x == 0.0F; });
        CHECK((states[static_cast<std::size_t>(i)] == RowState::dropped) == zeros);
        if (i >= 370) CHECK(states[static_cast<std::size_t>(i)] == RowState::full);
      }
      device.cache.row_states(1, head, 0, std::span(states).first(3));
      CHECK(states[0] == RowState::full);
      CHECK(states[2] == RowState::full);
    }
    std::vector<RowState> states(3);
    CHECK(message_of([&] { device.cache.row_states(1, 2, 0, states); }) ==
          "row_states: kv_head 2, num_kv_heads 2");
    CHECK(message_of([&] { device.cache.row_states(1, 0, 398, states); }) ==
          "row_states: 3 positions from 398 on, sequence has 400 tokens");
    CHECK(device.cache.num_free_sequences() == 2);
    if (std::is_same_v<Cache, Codes>) {  // 3 tokens at full rank, 377 compressed
      CHECK(free - device.cache.pool().allocator().num_free() ==
            2 + static_cast<std::int64_t>(device.cache.bytes_for(377) /
                                          device.cache.pool().page_bytes()));
      CHECK(device.cache.bytes_for(device.cache.tokens_per_page(0)) ==
            2 * device.cache.pool().page_bytes());
    }
    // Many tokens in one call, and a few at a time.
    for (const SequenceId seq : {2, 3}) device.cache.create(seq);
    for (const std::int64_t m : {1, 7, 150, 33}) {
      const auto more_key = layer.rows(random, 2 * m, true),
                 more_value = layer.rows(random, 2 * m, false);
      const gpu::DeviceArray<float> k(more_key), v(more_value);
      const SequenceId two[] = {1, 2}, last = 3;
      device.cache.append_maintained(two, device.keys(k, 2 * m), device.values(v, 2 * m));
      for (std::int64_t i = m; i < 2 * m; ++i) {
        device.cache.append(3, device.keys(k, 2 * m).tokens(i, 1),
                            device.values(v, 2 * m).tokens(i, 1));
        const std::int64_t before = device.cache.pool().allocator().num_free(),
                           needed = device.cache.pages_to_maintain(std::span(&last, 1));
        device.cache.maintain(3);
        CHECK(before - device.cache.pool().allocator().num_free() <= needed);
      }
      gpu::check(cudaDeviceSynchronize(), "append");
    }
    CHECK(device.save(2) == device.save(3));
    const auto too_many = layer.rows(random, 2000, true);
    const gpu::DeviceArray<float> k(too_many);
    CHECK(message_of([&] {
            device.cache.append_maintained(3, device.keys(k, 2000), device.values(k, 2000));
          }) == "max_tokens: 2000, sequence 3 has 191, given 2000");
  };
  check.template operator()<Codes>({});
  check.template operator()<OjaKVSnapKV<Cuda>>({});
  check.template operator()<OjaKVv2<Cuda>>({});
}

}  // namespace row_states_tests
