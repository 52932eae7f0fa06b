// SPDX-License-Identifier: Apache-2.0
// After an error of a cache on the device it is as it was: pages, device memory and, where kernels
// run on the host, host memory.
#include "compressed_kv_cache/undo.hpp"

#include "cuda/support/device_tools.cuh"
#include "cuda/support/random_layer.hpp"
#include "lowrankkv/cuda/presets.cuh"

namespace undo {

namespace gpu = support::gpu;

template <>
struct Memory<gpu::PagePool> {
  using Array = gpu::DeviceArray<float>;
  static std::vector<float> host(const Array& array) { return support::host(array); }
};

/// Device memory that an engine provides.
struct FailingMemory : gpu::DeviceMemory {
  void* allocate(std::size_t bytes) override {
    void* memory = nullptr;
    if (fails(Event::device_allocation)) return nullptr;
    return cudaMalloc(&memory, bytes) == cudaSuccess ? memory : nullptr;
  }
  void release(void* memory, std::size_t) noexcept override { cudaFree(memory); }
};

}  // namespace undo

namespace undo_on_device {

using namespace lowrankkv;
namespace gpu = support::gpu;

CacheConfig config() {
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.max_sequences = 5;
  config.max_tokens = 600;
  config.flush_interval = 8;
  config.publish_interval = 16;
  config.prefill_chunk = 64;
  return config;
}

/// Launches and host allocations fail too where kernels run on the host.
std::vector<undo::Event> events() {
  std::vector<undo::Event> all = {undo::Event::take, undo::Event::taken_page,
                                  undo::Event::device_allocation};
#if defined(LOWRANKKV_TESTS_EMULATED)
  undo::failure.ignored = [] { return emulated::at_work > 0; };
  emulated::launch_fails = [] { return undo::fails(undo::Event::launch); };
  all.push_back(undo::Event::launch);
  all.push_back(undo::Event::allocation);
#endif
  return all;
}

template <class Cache>
void check(const CacheConfig& config, const LayerBasis& basis) {
  static undo::FailingMemory memory;
  gpu::DeviceMemory* before = gpu::exchange_device_memory(&memory);
  undo::check_cache<Cache>(config, basis, events());
  gpu::exchange_device_memory(before);
}

}  // namespace undo_on_device

TEST_CASE("undone on the device: full rows, a stack") {
  using namespace undo_on_device;
  check<FullKV<Cuda>>(config(), {});
  undo::check_stack<FullKV<Cuda>>(config(), {}, {undo::Event::take, undo::Event::taken_page});
}
TEST_CASE("undone on the device: codes under one budget") {
  using namespace undo_on_device;
  if (support::effort() == 0) return;
  support::Random random(4);
  CacheConfig own = config();
  own.rope.keys = Rope::pre;
  own.keep_residuals = true;
  check<Budgeted<Cuda>>(own, support::random_layer(random, own.shape, {}, 24).basis);
}
TEST_CASE("undone on the device: bases that the host moves, and outliers") {
  using namespace undo_on_device;
  if (support::effort() == 0) return;
  support::Random random(5);
  check<OjaKVv2<Cuda>>(config(), support::random_layer(random, config().shape, {}, 24).basis);
}
TEST_CASE("undone on the device: bases that the device moves") {
  using namespace undo_on_device;
  if (support::effort() == 0) return;
  support::Random random(6);
  check<SubSpaceA<Cuda>>(config(), support::random_layer(random, config().shape, {}, 24).basis);
}
TEST_CASE("undone on the device: heavy hitters, joint values") {
  using namespace undo_on_device;
  if (support::effort() == 0) return;
  support::Random random(7);
  check<H2O<Cuda>>(config(), {});
  check<StarKVH2O<Cuda>>(config(),
                         support::joint_layer(random, config().shape, {}, 2, 24, 40).basis);
}
