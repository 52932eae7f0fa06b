// SPDX-License-Identifier: Apache-2.0
// Caches that are compiled with a part of the kernels: what is outside the set is refused with both
// values, what is inside gives the same bits as with all kernels.
#include <doctest/doctest.h>

#include <random>
#include <string>
#include <vector>

#include "cuda/support/device_tools.cuh"
#include "lowrankkv/cuda/presets.cuh"

namespace kernel_set_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;

struct Kernels : KernelSet {
  static constexpr bool bf16 = false, rope_pre = false, full_rows_8 = false;
  static constexpr int head_dim = 64, max_rank = 32, max_code_units = 1;
};
using OneShape = CudaWith<Kernels>;

template <class Make>
std::string message_of(Make&& make) {
  try {
    make();
  } catch (const ValueError& error) {
    return error.what();
  }
  return "nothing was raised";
}

CacheConfig shaped(int head_dim) {
  CacheConfig config;
  config.shape = {4, 2, head_dim};
  config.max_sequences = 2;
  config.max_tokens = 256;
  config.full_type = DType::f16;
  return config;
}

TEST_CASE("a cache outside its kernel set is refused with both values") {
  using Cache = FullKV<OneShape>;
  CacheConfig config = shaped(128);
  CHECK(message_of([&] { Cache cache(config); }) == "head_dim: 128, kernel set 64");
  config = shaped(64);
  config.full_type = DType::bf16;
  CHECK(message_of([&] { Cache cache(config); }) == "full_type: bf16, the kernel set has only f16");
  config = shaped(64);
  config.full_row_bits = 8;
  CHECK(message_of([&] { Cache cache(config); }) == "full_row_bits: 8, the kernel set has only 16");
  config = shaped(64);
  config.rope.keys = Rope::pre;
  CHECK(message_of([&] { Cache cache(config); }) ==
        "rope: pre-RoPE keys, the kernel set has only post-RoPE keys");
}

/// Bases of two heads whose columns are the first channels.
LayerBasis first_channels(int key_rank, int value_rank) {
  const auto columns = [](int rank) {
    std::vector<float> map(static_cast<std::size_t>(64 * rank), 0.0F);
    for (int c = 0; c < rank; ++c) map[static_cast<std::size_t>(c * rank + c)] = 1.0F;
    return map;
  };
  HeadBasis head;
  head.key_rank = key_rank;
  head.value_rank = value_rank;
  head.key_down = columns(key_rank);
  head.value_down = columns(value_rank);
  return {{head, head}};
}

TEST_CASE("coefficients of a larger rank than the kernel set has are refused with both values") {
  using Cache = StaticPCA<OneShape>;
  const auto message = [](int key_rank, int value_rank, DType type = DType::f16) {
    return message_of([&] {
      Cache cache(shaped(64), first_channels(key_rank, value_rank), {.quantizer = {type}});
    });
  };
  CHECK(message(33, 32) == "rank: 33, kernel set at most 32");
  CHECK(message(32, 48) == "rank: 48, kernel set at most 32");
  CHECK(message(32, 32) == "nothing was raised");
  CHECK(message(16, 32, DType::bf16) == "coefficients: bf16, the kernel set has only f16");
}

TEST_CASE("codes of more units than the kernel set has are refused with both values") {
  using Cache = SubSpaceG<OneShape>;  // codes of 8 bits: 32 channels are a unit
  const auto message = [](int key_rank, int value_rank) {
    return message_of([&] { Cache cache(shaped(64), first_channels(key_rank, value_rank)); });
  };
  CHECK(message(64, 32) == "units of codes: 2, kernel set at most 1");
  CHECK(message(32, 64) == "units of codes: 2, kernel set at most 1");
  CHECK(message(32, 32) == "nothing was raised");
}

template <class Backend>
std::vector<float> outputs() {
  const CacheConfig config = shaped(64);
  FullKV<Backend> cache(config);
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  constexpr int kTokens = 70;
  const auto rows = [&](int heads, int tokens) {
    std::vector<float> values(static_cast<std::size_t>(tokens * heads * 64));
    for (float& value : values) value = normal(random);
    return gpu::DeviceArray<float>(values);
  };
  const gpu::DeviceArray<float> q = rows(4, kTokens), k = rows(2, kTokens), v = rows(2, kTokens),
                                q1 = rows(4, 1), k1 = rows(2, 1), v1 = rows(2, 1);
  gpu::DeviceArray<float> prompt(static_cast<std::size_t>(kTokens * 4 * 64)), out(4 * 64);
  cache.create(5);
  cache.prefill(5, {q.data(), kTokens, 4, 64}, {k.data(), kTokens, 2, 64},
                {v.data(), kTokens, 2, 64}, {prompt.data(), kTokens, 4, 64});
  cache.append(5, {k1.data(), 1, 2, 64}, {v1.data(), 1, 2, 64});
  cache.attend(5, {q1.data(), 1, 4, 64}, {out.data(), 1, 4, 64});
  std::vector<float> all(prompt.size() + out.size());
  gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  gpu::check(
      cudaMemcpy(all.data(), prompt.data(), prompt.size() * sizeof(float), cudaMemcpyDeviceToHost),
      "cudaMemcpy");
  gpu::check(cudaMemcpy(all.data() + prompt.size(), out.data(), out.size() * sizeof(float),
                        cudaMemcpyDeviceToHost),
             "cudaMemcpy");
  return all;
}

TEST_CASE("a cache with a part of the kernels gives the bits of one with all of them") {
  const std::vector<float> all = outputs<Cuda>();
  CHECK(outputs<OneShape>() == all);
  bool any = false;
  for (const float value : all) any = any || value != 0.0F;
  CHECK(any);
}

}  // namespace kernel_set_tests
