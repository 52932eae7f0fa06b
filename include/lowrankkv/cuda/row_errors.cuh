// SPDX-License-Identifier: Apache-2.0
/// @file cuda/row_errors.cuh  How badly leaving rows would be reconstructed, under the maps that are about to store them.
///
/// error = ||k - k^||^2 + ||v - v^||^2 in the metrics of the bases, each over ||x - mean||^2 if errors are relative (token_policy/residual_outliers.hpp).
/// Rows are encoded, quantised and decoded as they would be; products are sums of tf32 that come to f32.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lowrankkv/cuda/store_rows.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kErrorRows = 32;  ///< of a block

/// @brief Rows whose errors are wanted, by sequence of the batch: [first, first + count) of its source.
struct ErrorRows {
  std::int32_t slots[kMaxBatch];
  std::int32_t first[kMaxBatch];
  std::int32_t count[kMaxBatch];
};

namespace detail {

/// Shared memory of row_errors_kernel in bytes.
inline std::size_t error_bytes(int head_dim, int most_channels) {
  const int most = (std::max)(head_dim, most_channels);
  return sizeof(float) * static_cast<std::size_t>(kErrorRows * (2 * row_stride(head_dim) + 2 * (most + 1)));
}

/// What the channels of tiles hold of coefficients [kErrorRows, stride], as maps expect it: values [kErrorRows, stride].
template <StoreForm form>
__device__ void quantise_rows(const PartMaps& maps, Part part, DType type, const float* coefficients, int stride, float* values) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int row = warp; row < kErrorRows; row += kStoreThreads / 32) {
    const float* own = coefficients + row * stride;
    if constexpr (form == StoreForm::coefficients) {
      for (int channel = lane; channel < maps.width; channel += 32) values[row * stride + channel] = channel < maps.rank ? from_bits(type, to_bits(type, own[channel])) : 0.0F;
    } else {
      const float gain = gain_of_row(maps, own).value, inverse = gain > 0.0F ? 1.0F / gain : 0.0F;
      for (int channel = lane; channel < maps.width; channel += 32) {
        const TileChannel place = maps.channels[channel];
        float value = 0.0F;
        if (place.source >= 0) {
          const std::uint32_t mask = (1U << place.width) - 1U, plane = code_of(own[place.source] * inverse, place.bits) >> place.shift & mask;
          value = (static_cast<float>(plane) - 0.5F * static_cast<float>(mask)) * gain * (part == Part::key ? 1.0F : static_cast<float>(value_weight(place.width, channel)));
        }
        values[row * stride + channel] = value;
      }
    }
  }
}

/// rows [kErrorRows, row_stride(head_dim)] = values [kErrorRows, stride] reader: a warp makes eight channels of all rows at a time.
__device__ inline void decode_rows(const PartMaps& maps, const float* values, int stride, int head_dim, float* rows) {
  constexpr int kRowBlocks = kErrorRows / 16;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  for (int block = warp; block < head_dim / 8; block += kStoreThreads / 32) {
    float sums[kRowBlocks][4] = {};
    #pragma unroll 4
    for (int k = 0; k < maps.width / 8; ++k) {
      const float b0 = maps.element(maps.reader, 8 * k + t, 8 * block + g, head_dim), b1 = maps.element(maps.reader, 8 * k + t + 4, 8 * block + g, head_dim);
      #pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
        const float* own = values + (16 * m + g) * stride + 8 * k + t;
        const float4 a = {own[0], own[8 * stride], own[4], own[8 * stride + 4]};
        mma_tf32(sums[m], {beyond_tf32(a.x), beyond_tf32(a.y), beyond_tf32(a.z), beyond_tf32(a.w)}, b0, b1);
        mma_tf32(sums[m], a, beyond_tf32(b0), beyond_tf32(b1));
        mma_tf32(sums[m], a, b0, b1);
      }
    }
    #pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
      float* own = rows + (16 * m + g) * row_stride(head_dim) + 8 * block + 2 * t;
      own[0] = sums[m][0];
      own[1] = sums[m][1];
      own[8 * row_stride(head_dim)] = sums[m][2];
      own[8 * row_stride(head_dim) + 1] = sums[m][3];
    }
  }
}

/// The energy of one row, summed by a warp.
__device__ inline float energy_of(const float* row, int channels) {
  float energy = 0.0F;
  for (int channel = static_cast<int>(threadIdx.x) % 32; channel < channels; channel += 32) energy = fmaf(row[channel], row[channel], energy);
  for (int distance = 16; distance > 0; distance /= 2) energy += __shfl_xor_sync(~0U, energy, distance);
  return energy;
}

}  // namespace detail

/// @brief errors [sequence of the batch, head, stride], by row of the source. Grid: kErrorRows rows x heads x sequences.
template <StoreForm form>
__global__ void __launch_bounds__(kStoreThreads) row_errors_kernel(Tables tables, RowSource source, ErrorRows wanted, bool relative, DType type, float* errors, int stride) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  const int head = static_cast<int>(blockIdx.y), index = static_cast<int>(blockIdx.z), slot = wanted.slots[index], dim = tables.head_dim, row_width = detail::row_stride(dim);
  const int first = wanted.first[index] + static_cast<int>(blockIdx.x) * kErrorRows, count = min(kErrorRows, wanted.first[index] + wanted.count[index] - first);
  if (count <= 0) return;
  const HeadMaps& maps_now = tables.current_maps(slot, head);
  const int most = max(dim, max(max(maps_now.key.rank, maps_now.key.width), max(maps_now.value.rank, maps_now.value.width))) + 1;
  float* rows = reinterpret_cast<float*>(shared_memory);      // [kErrorRows, row_width]
  float* lost = rows + kErrorRows * row_width;                // the same
  float* coefficients = lost + kErrorRows * row_width;        // [kErrorRows, most]
  float* values = coefficients + kErrorRows * most;           // the same
  __shared__ float total[kErrorRows];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const SourceRows from(tables, source, slot, head);
  if (threadIdx.x < kErrorRows) total[threadIdx.x] = 0.0F;
  for (int item = static_cast<int>(threadIdx.x); item < (kErrorRows - count) * row_width; item += kStoreThreads) rows[count * row_width + item] = 0.0F;
  for (const Part part : {Part::key, Part::value}) {
    const PartMaps& maps = maps_now.of(part);
    from.load(part, nullptr, first, 0, count, dim, rows, row_width);
    __syncthreads();
    detail::project_rows<kErrorRows / 16, true>(rows, dim, maps, coefficients, most);
    __syncthreads();
    detail::quantise_rows<form>(maps, part, type, coefficients, most, values);
    __syncthreads();
    detail::decode_rows(maps, values, most, dim, lost);
    __syncthreads();
    for (int item = static_cast<int>(threadIdx.x); item < kErrorRows * dim; item += kStoreThreads) {
      const int at = item / dim * row_width + item % dim;
      const float x = rows[at] - (maps.mean == nullptr ? 0.0F : maps.mean[item % dim]);
      lost[at] = x - lost[at];
      rows[at] = x;
    }
    __syncthreads();
    const PartMaps* metric = tables.metrics == nullptr || tables.metrics[head].of(part).encoder == nullptr ? nullptr : &tables.metrics[head].of(part);
    if (metric != nullptr) {
      detail::project_rows<kErrorRows / 16, false>(lost, dim, *metric, coefficients, most);
      if (relative) detail::project_rows<kErrorRows / 16, false>(rows, dim, *metric, values, most);
      __syncthreads();
    }
    for (int row = warp; row < count; row += kStoreThreads / 32) {
      const float loss = metric != nullptr ? detail::energy_of(coefficients + row * most, dim) : detail::energy_of(lost + row * row_width, dim);
      float whole = 1.0F;
      if (relative) whole = metric != nullptr ? detail::energy_of(values + row * most, dim) : detail::energy_of(rows + row * row_width, dim);
      if (threadIdx.x % 32 == 0 && whole > 0.0F) total[row] += loss / whole;  // a row without energy has no relative error
    }
    __syncthreads();
    for (int item = static_cast<int>(threadIdx.x); item < (kErrorRows - count) * row_width; item += kStoreThreads) rows[count * row_width + item] = 0.0F;
  }
  if (static_cast<int>(threadIdx.x) < count) {
    errors[(static_cast<std::size_t>(index) * gridDim.y + static_cast<std::size_t>(head)) * static_cast<std::size_t>(stride) + static_cast<std::size_t>(first) + threadIdx.x] = total[threadIdx.x];
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
