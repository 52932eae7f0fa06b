// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache/reconstruct_waiting.cuh  Reconstructs K and V of the staged rows of an
/// unfinished prompt chunk (cuda/layer/open_prompt.cuh).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "lowrankkv/cuda/layer/open_prompt.cuh"
#include "lowrankkv/cuda/decode/reconstruct.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Copies staged rows [token, head, channel] to tokens [first, first + count) of the
/// targets. Grid: tokens x KV heads.
template <class = void>
__global__ void copy_waiting_kernel(DType type, const std::uint16_t* keys,
                                    const std::uint16_t* values, std::int64_t first,
                                    std::int64_t count, int dim, DeviceTarget key,
                                    DeviceTarget value) {
  for (std::int64_t token = blockIdx.x; token < count; token += gridDim.x) {
    const std::size_t row =
        (static_cast<std::size_t>(token) * gridDim.y + blockIdx.y) * static_cast<std::size_t>(dim);
    const auto copy = [&](const std::uint16_t* from, const DeviceTarget& target) {
      const std::int64_t to =
          target.place(first + token) + static_cast<std::int64_t>(blockIdx.y) * target.head_stride;
      for (int channel = static_cast<int>(threadIdx.x); channel < dim;
           channel += static_cast<int>(blockDim.x)) {
        const std::uint16_t bits = from[row + static_cast<std::size_t>(channel)];
        if (target.dtype == DType::f32)
          static_cast<float*>(target.data)[to + channel] = from_bits(type, bits);
        else
          static_cast<std::uint16_t*>(target.data)[to + channel] =
              target.dtype == type ? bits : to_bits(target.dtype, from_bits(type, bits));
      }
    };
    copy(keys, key);
    copy(values, value);
  }
}

/// @brief Enqueues the copy of staged rows [skipped, skipped + count) to tokens [first, first +
/// count) of the targets. Cost: reads and writes the rows once.
template <class = void>
void reconstruct_waiting(const CacheConfig& config, const OpenPrompt& prompt, std::int64_t skipped,
                         std::int64_t first, std::int64_t count, const DeviceTarget& key,
                         const DeviceTarget& value, cudaStream_t stream) {
  const KeyView keys = prompt.keys(config.shape, config.full_type);
  const ValueView values = prompt.values(config.shape, config.full_type);
  const auto from = [&](const auto& view) {
    return static_cast<const std::uint16_t*>(view.data) + skipped * view.token_stride;
  };
  const dim3 grid(static_cast<unsigned>((std::min)(count, std::int64_t{1} << 20)),
                  static_cast<unsigned>(config.shape.num_kv_heads));
  copy_waiting_kernel<><<<grid, 128, 0, stream>>>(config.full_type, from(keys), from(values), first,
                                                  count, config.shape.head_dim, key, value);
  check(cudaGetLastError(), "copy_waiting_kernel");
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
