// SPDX-License-Identifier: Apache-2.0
// What the benchmarks of the Cuda backend share: medians of event times, bases that cost what
// calibrated ones do, random rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "lowrankkv/cuda/presets.cuh"

namespace bench {

inline constexpr int kDim = 128;  ///< head_dim of Llama-3.1-8B

/// Bytes a second that the memory of this device is made for: two a clock and line of its bus.
inline double peak_rate() {
  int device = 0, kilohertz = 0, bits = 0;
  lowrankkv::cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  lowrankkv::cuda::check(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, device),
                         "cudaDevAttrMemoryClockRate");
  lowrankkv::cuda::check(cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device),
                         "cudaDevAttrGlobalMemoryBusWidth");
  return 2.0 * 1e3 * kilohertz * bits / 8.0;
}
/// What reading reaches of it: 4.6 of an H200's 4.92 TB/s, in its best attention kernel; 3.13 of an
/// H100's 3.35.
inline double read_rate() { return 0.935 * peak_rate(); }
/// What copying reaches: 4.2 TB/s on an H200.
inline double copy_rate() { return 0.855 * peak_rate(); }

/// The median of so many rounds of a call on a stream; `before` is not timed.
inline float milliseconds(cudaStream_t stream, int rounds, const std::function<void()>& before,
                          const std::function<void()>& call) {
  using lowrankkv::cuda::check;
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  std::vector<float> times;
  for (int round = 0; round < rounds; ++round) {
    before();
    check(cudaEventRecord(begin, stream), "event");
    call();
    check(cudaEventRecord(end, stream), "event");
    check(cudaEventSynchronize(end), "call");
    float ms = 0.0F;
    check(cudaEventElapsedTime(&ms, begin, end), "event");
    times.push_back(ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

/// Coordinates themselves are the basis: numbers do not change how long a kernel takes. Bits of
/// every channel, for codes.
inline lowrankkv::LayerBasis basis(int heads, int key_rank, int value_rank,
                                   const std::vector<std::uint8_t>& key_bits = {},
                                   const std::vector<std::uint8_t>& value_bits = {}) {
  const auto coordinates = [](int rank) {
    std::vector<float> map(static_cast<std::size_t>(kDim * rank));
    for (int i = 0; i < rank; ++i) map[static_cast<std::size_t>(i * rank + i)] = 1.0F;
    return map;
  };
  lowrankkv::HeadBasis maps;
  maps.key_rank = key_rank;
  maps.value_rank = value_rank;
  maps.key_down = coordinates(key_rank);
  maps.value_down = coordinates(value_rank);
  maps.key_bits = key_bits;
  maps.value_bits = value_bits;
  maps.key_rms.assign(static_cast<std::size_t>(key_rank), 1.0F);
  maps.value_rms.assign(static_cast<std::size_t>(value_rank), 1.0F);
  maps.key_threshold = maps.value_threshold = std::numeric_limits<float>::infinity();
  lowrankkv::LayerBasis result;
  result.heads.assign(static_cast<std::size_t>(heads), maps);
  return result;
}

/// The same with values joint: value_rank of the coordinates of all heads' values, as many of each.
/// @param bits  of equal shares of the latent's channels, of keys the middle one; or empty
inline lowrankkv::LayerBasis joint_basis(int heads, int key_rank, int value_rank,
                                         const std::vector<std::uint8_t>& bits = {}) {
  lowrankkv::LayerBasis result = basis(heads, key_rank, 1);
  for (int head = 0; head < heads; ++head) {
    lowrankkv::HeadBasis& maps = result.heads[static_cast<std::size_t>(head)];
    maps.value_rank = value_rank;
    maps.value_down.assign(static_cast<std::size_t>(kDim * value_rank), 0.0F);
    maps.value_rms.assign(static_cast<std::size_t>(value_rank), 1.0F);
    for (int c = 0; c < value_rank && !bits.empty(); ++c)
      maps.value_bits.push_back(
          bits[static_cast<std::size_t>(c) * bits.size() / static_cast<std::size_t>(value_rank)]);
    if (!bits.empty())
      maps.key_bits.assign(static_cast<std::size_t>(key_rank), bits[bits.size() / 2]);
    for (int c = head; c < value_rank; c += heads)
      maps.value_down[static_cast<std::size_t>(c / heads * value_rank + c)] = 1.0F;
  }
  return result;
}

/// Bits of 32 channels each.
inline std::vector<std::uint8_t> bits_of(const std::vector<int>& blocks) {
  std::vector<std::uint8_t> bits;
  for (const int width : blocks) bits.insert(bits.end(), 32, static_cast<std::uint8_t>(width));
  return bits;
}

/// Normal numbers in f16, drawn from a list of 65536.
inline std::vector<__half> random_halves(std::size_t size) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  std::vector<__half> samples(65536), values(size);
  for (__half& x : samples) x = __float2half(normal(random));
  for (__half& x : values) x = samples[random() % samples.size()];
  return values;
}

}  // namespace bench
