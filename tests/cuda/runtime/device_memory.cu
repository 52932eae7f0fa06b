// SPDX-License-Identifier: Apache-2.0
// Device memory and pages from an engine's allocators, which may run out.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda/support/device_cache.cuh"
#include "cuda/support/random_layer.hpp"
#include "support/blocks.hpp"

namespace device_memory_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too
using support::DeviceCache;
using support::message_of;
using support::Method;
using support::Random;
using support::Settings;

namespace {

using Codes = CompressedKVCache<Cuda, PerHead, Static, SinkRecent, TransformCode>;
using HeavyCodes =
    CompressedKVCache<Cuda, PerHead, Static, Compose<SinkRecent, HeavyHitters>, TransformCode>;

/// An engine's allocator, which may run out.
struct Memory : gpu::DeviceMemory {
  void* allocate(std::size_t bytes) override {
    void* memory = nullptr;
    if (live + bytes > most || left == 0 || cudaMalloc(&memory, bytes) != cudaSuccess)
      return nullptr;
    --left;
    live += bytes;
    return memory;
  }
  void release(void* memory, std::size_t bytes) noexcept override {
    cudaFree(memory);
    live -= bytes;
  }
  std::size_t live = 0, most = std::size_t{1} << 30;
  int left = 1 << 30;  ///< allocations that are left
};
struct LentAllocator {
  explicit LentAllocator(Memory& memory) : before(gpu::exchange_device_memory(&memory)) {}
  LentAllocator(const LentAllocator&) = delete;
  LentAllocator& operator=(const LentAllocator&) = delete;
  ~LentAllocator() { gpu::exchange_device_memory(before); }
  gpu::DeviceMemory* before;
};

}  // namespace

TEST_CASE("device memory that runs out leaves a prompt, and appended tokens, as they were") {
  Random random(909);
  Settings settings;
  settings.share = 0.3F;
  const CacheShape shape{4, 2, 64};
  const support::RandomLayer layer = support::random_layer(random, shape, settings, 40);
  const CacheConfig config{
      .shape = shape, .max_sequences = 2, .max_tokens = 2000, .prefill_chunk = 150};
  const std::vector<std::int64_t> parts{60, 190, 70, 400};
  std::vector<std::vector<float>> keys, values, queries;
  for (const std::int64_t n : parts) {
    keys.push_back(layer.rows(random, n, true));
    values.push_back(layer.rows(random, n, false));
    queries.push_back(layer.queries(random, n));
  }
  const auto check = [&]<class Cache>(typename Cache::PolicySet policies) {
    policies = support::configured(policies, settings);
    Memory memory;
    const LentAllocator lends(memory);
    std::vector<std::byte> expected;
    int refused = 0;
    for (int allowed = -1;; ++allowed) {  // -1: all
      DeviceCache<Cache> device(config, layer.basis, policies);
      device.cache.create(1);
      bool any = false;
      memory.left = allowed < 0 ? 1 << 30 : allowed;
      for (std::size_t part = 0; part < parts.size(); ++part) {
        const std::int64_t before = device.cache.num_tokens(1), n = parts[part];
        memory.left += 3;  // the rows that are given
        const gpu::DeviceArray<float> k(keys[part]), v(values[part]), q(queries[part]);
        const auto call = [&] {
          if (part == 3)
            device.cache.append_maintained(1, device.keys(k, n), device.values(v, n));
          else
            device.cache.ingest(1, device.keys(k, n), device.values(v, n), device.queries(q, n),
                                part < 2 ? Prompt::continues : Prompt::complete);
        };
        const std::string message = message_of(call);
        if (message == "nothing was raised") continue;
        any = true;
        ++refused;
        CHECK(message.find("device memory: ") == 0);
        CHECK(device.cache.num_tokens(1) == before);
        memory.left = 1 << 30;
        call();
        CHECK(device.cache.num_tokens(1) == before + n);
      }
      memory.left = 1 << 30;
      if (allowed < 0) {
        expected = device.save(1);
      } else {
        CHECK(device.save(1) == expected);
        if (!any) break;
      }
    }
    CHECK(refused > 2);
  };
  check.template operator()<OjaKVSnapKV<Cuda>>({});
  check.template operator()<HeavyCodes>({});
}

TEST_CASE("pages from an engine's block manager, device memory from its allocator") {
  Random random(908);
  Settings settings;
  settings.method = Method::codes;
  const CacheShape shape{4, 2, 64};
  const support::RandomLayer layer = support::random_layer(random, shape, settings, 40);
  const CacheConfig config{.shape = shape, .max_sequences = 2, .max_tokens = 2000};
  const auto policies = support::configured(Codes::PolicySet{}, settings);
  const auto key = layer.rows(random, 1200, true), value = layer.rows(random, 1200, false),
             query = layer.queries(random, 1), more = layer.rows(random, 1, true);
  const SequenceId one = 1;
  const auto fill = [&](DeviceCache<Codes>& device) {
    device.cache.create(1);
    device.ingest(1, key, value);
    device.append(std::span(&one, 1), more, more);
    return std::pair(device.attend(std::span(&one, 1), query), device.save(1));
  };
  DeviceCache<Codes> own(config, layer.basis, policies);
  const auto expected = fill(own);
  const std::int32_t pages =
      2 * static_cast<std::int32_t>(own.cache.pool().allocator().num_pages());
  std::vector<std::int32_t> free_pages(static_cast<std::size_t>(pages));
  std::iota(free_pages.begin(), free_pages.end(), 0);
  std::shuffle(free_pages.begin(), free_pages.end(), random);
  free_pages.resize(free_pages.size() / 2);  // others have the rest
  const auto blocks = std::make_shared<support::Blocks>(free_pages);
  const std::int64_t free = blocks->num_free();
  Memory memory;
  {
    const LentAllocator lends(memory);
    const auto pool = std::make_shared<gpu::PagePool>(own.cache.pool().page_bytes(), pages, blocks);
    DeviceCache<Codes> lent(config, layer.basis, policies, pool);
    CHECK(memory.live >= lent.cache.pool().page_bytes() * static_cast<std::size_t>(pages));
    CHECK((fill(lent) == expected));
    CHECK(blocks->num_free() < free);
    lent.cache.erase(1);
    CHECK(blocks->num_free() == free);
    memory.most = memory.live + 1000;
    CHECK(message_of([&] {
            DeviceCache<Codes> another(config, layer.basis, policies);
          }).find("device memory: ") == 0);
    CHECK(memory.live == memory.most - 1000);
  }
  CHECK(memory.live == 0);
}

}  // namespace device_memory_tests
