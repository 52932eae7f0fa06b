// SPDX-License-Identifier: Apache-2.0
// A cache is bound to the device on which it was made: calls work whatever device is current, and
// refuse streams of others.
#include <doctest/doctest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/support/device_cache.cuh"
#include "cuda/support/random_layer.hpp"
#include "lowrankkv/layer_stack.hpp"

namespace devices_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too
using support::message_of;

namespace {

/// Makes a device current, and in the end the first.
struct Current {
  explicit Current(int device) { gpu::check(cudaSetDevice(device), "cudaSetDevice"); }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  ~Current() { cudaSetDevice(0); }
};
/// A stream of the current device.
struct OwnStream {
  OwnStream() { gpu::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream"); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  ~OwnStream() { cudaStreamDestroy(stream); }
  cudaStream_t stream = nullptr;
};

constexpr std::int64_t kPrompt = 40;
constexpr CacheShape kShape{2, 1, 16};

CacheConfig small_config() {
  CacheConfig config;
  config.shape = kShape;
  config.max_sequences = 2;
  config.max_tokens = 128;
  config.flush_interval = 4;
  return config;
}

/// Rows on a device, and the outputs of a prompt and of some steps over them.
struct Rows {
  explicit Rows(unsigned seed) : key(kPrompt * 16), query(kPrompt * 32), out(kPrompt * 32) {
    std::vector<float> numbers(key.size());
    unsigned state = seed;
    for (float& number : numbers) {
      state = state * 1664525U + 1013904223U;
      number = static_cast<float>(state >> 16) / 32768.0F - 1.0F;
    }
    support::upload(numbers, key);
    numbers.insert(numbers.end(), numbers.begin(), numbers.end());
    support::upload(numbers, query);
  }
  KeyView keys(std::int64_t n) const { return {key.data(), n, 1, 16}; }
  ValueView values(std::int64_t n) const { return {key.data(), n, 1, 16}; }
  QueryView queries(std::int64_t n) const { return {query.data(), n, 2, 16}; }
  OutputView outputs(std::int64_t n) { return {out.data(), n, 2, 16}; }
  std::vector<float> read() const {
    std::vector<float> numbers(out.size());
    gpu::check(cudaMemcpy(numbers.data(), out.data(), out.bytes(), cudaMemcpyDeviceToHost), "read");
    return numbers;
  }
  gpu::DeviceArray<float> key, query, out;
};

int devices() {
  int count = 0;
  gpu::check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  return count;
}

/// A prompt and 12 steps with flushes, a copy, a saved copy. @return all that was computed
template <class Cache>
std::vector<float> life(Cache& cache, Rows& rows, cudaStream_t stream) {
  std::vector<float> all;
  const auto note = [&] {
    gpu::check(cudaStreamSynchronize(stream), "wait");
    const std::vector<float> now = rows.read();
    all.insert(all.end(), now.begin(), now.end());
  };
  cache.create(1, stream);
  cache.prefill(1, rows.queries(kPrompt), rows.keys(kPrompt), rows.values(kPrompt),
                rows.outputs(kPrompt), {}, stream);
  note();
  for (int step = 0; step < 12; ++step) {
    cache.append(1, rows.keys(1), rows.values(1), stream);
    cache.attend(1, rows.queries(1), rows.outputs(1), LseView{}, stream);
    cache.maintain(1, stream);
  }
  note();
  std::vector<std::byte> saved(cache.save_bytes(1));
  cache.save(1, saved, stream);
  cache.fork(1, 2, stream);
  cache.truncate(1, kPrompt + 11, stream);
  cache.erase(1, stream);
  cache.load(1, saved, stream);
  cache.erase(2, stream);
  cache.attend(1, rows.queries(1), rows.outputs(1), LseView{}, stream);
  note();
  all.push_back(static_cast<float>(cache.memory(1).total()));
  all.push_back(static_cast<float>(cache.faults()));
  cache.erase(1, stream);
  return all;
}

}  // namespace

TEST_CASE("a cache works on its device, whichever is current, and leaves that one current") {
  if (devices() < 2) return;
  FullKV<Cuda> here(small_config(), {}, {});
  Rows rows(7);
  const OwnStream own;
  const std::vector<float> expected = life(here, rows, own.stream);
  {
    const Current other(1);
    CHECK(life(here, rows, own.stream) == expected);  // its stream, another device
    CHECK(life(here, rows, nullptr) == expected);     // the default stream is that of its device
    CHECK(gpu::current_device() == 1);
    // One that is made here belongs here.
    Rows rows_there(7);
    const OwnStream there;
    auto cache = std::make_unique<FullKV<Cuda>>(small_config(), LayerBasis{});
    const Current back(0);
    CHECK(life(*cache, rows_there, there.stream) == expected);
    CHECK(gpu::current_device() == 0);
    cache.reset();
    CHECK(gpu::current_device() == 0);
  }
  CHECK(life(here, rows, own.stream) == expected);
}

TEST_CASE("streams of another device are refused before anything changes") {
  if (devices() < 2) return;
  FullKV<Cuda> cache(small_config(), {}, {});
  Rows rows(8);
  cache.create(1);
  cache.append(1, rows.keys(3), rows.values(3));
  const auto made_there = [] {
    const Current other(1);
    return std::make_unique<OwnStream>();
  }();
  const cudaStream_t there = made_there->stream;
  const auto refused = [&](const char* call, auto&& use) {
    CHECK(message_of(use) ==
          std::string(call) + ": the stream is of device 1, the cache of device 0");
    CHECK(gpu::current_device() == 0);
    CHECK(cache.num_tokens(1) == 3);
    CHECK(cache.num_free_sequences() == 1);
  };
  refused("create", [&] { cache.create(2, there); });
  refused("append", [&] { cache.append(1, rows.keys(1), rows.values(1), there); });
  refused("attend", [&] { cache.attend(1, rows.queries(1), rows.outputs(1), LseView{}, there); });
  refused("maintain", [&] { cache.maintain(1, there); });
  refused("append_maintained",
          [&] { cache.append_maintained(1, rows.keys(1), rows.values(1), there); });
  refused("ingest", [&] { cache.ingest(1, rows.keys(1), rows.values(1), {}, there); });
  refused("finish_prompt", [&] { cache.finish_prompt(1, there); });
  refused("fork", [&] { cache.fork(1, 2, there); });
  refused("truncate", [&] { cache.truncate(1, 2, there); });
  refused("remove", [&] { cache.remove(1, 0, 1, there); });
  refused("erase", [&] { cache.erase(1, there); });
  std::vector<std::byte> saved(cache.save_bytes(1));
  refused("save", [&] { cache.save(1, saved, there); });
  cache.save(1, saved);
  refused("load", [&] { cache.load(2, saved, there); });
  refused("prefill", [&] {
    cache.prefill(1, rows.queries(1), rows.keys(1), rows.values(1), rows.outputs(1), {}, there);
  });
  CHECK_THROWS_AS(cache.maintain(1, there), ValueError);
  // No layer of a stack has taken anything either.
  LayerStack<FullKV<Cuda>> stack(small_config(), std::vector<LayerBasis>(2));
  CHECK_THROWS_AS(stack.create(5, there), ValueError);
  CHECK(!stack.layer(0).contains(5));
}

TEST_CASE("a step is captured while another device is current") {
  if (devices() < 2) return;
  FullKV<Cuda> cache(small_config(), {}, {});
  Rows rows(9);
  cache.create(1);
  cache.create(2);
  const SequenceId seqs[] = {1};
  std::vector<float> expected, replayed;
  cache.append(2, rows.keys(1), rows.values(1));
  cache.attend(2, rows.queries(1), rows.outputs(1));
  gpu::check(cudaDeviceSynchronize(), "wait");
  expected = rows.read();
  support::upload(std::vector<float>(rows.out.size()), rows.out);
  std::unique_ptr<support::CapturedStep> step;
  step = std::make_unique<support::CapturedStep>([&](cudaStream_t stream) {
    const Current other(1);
    cache.append(seqs, rows.keys(1), rows.values(1), stream);
    cache.attend(seqs, rows.queries(1), rows.outputs(1), LseView{}, stream);
    CHECK(gpu::current_device() == 1);
  });
  step->replay(cache, seqs);
  replayed = rows.read();
  CHECK(replayed == expected);
}

TEST_CASE("pages and a workspace of another device are refused") {
  if (devices() < 2) return;
  const CacheConfig config = small_config();
  const auto pool = [&] {
    const Current other(1);
    return std::make_shared<gpu::PagePool>(FullKV<Cuda>::page_bytes(config, {}, {}),
                                           FullKV<Cuda>::num_pages(config, {}, {}));
  }();
  CHECK(message_of([&] { FullKV<Cuda>(config, {}, {}, pool); }) ==
        "page pool: memory of device 1, the cache is made on device 0");
  const auto memory = [&] {
    const Current other(1);
    return std::make_unique<gpu::DeviceArray<std::uint8_t>>(
        FullKV<Cuda>::workspace_bytes(config, {}, {}));
  }();
  CHECK(message_of([&] {
          FullKV<Cuda>(config, {}, {}, nullptr, {memory->data(), memory->bytes()});
        }) == "workspace: memory of device 1, the cache is made on device 0");
}

}  // namespace devices_tests
