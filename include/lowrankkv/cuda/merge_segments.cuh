// SPDX-License-Identifier: Apache-2.0
/// @file cuda/merge_segments.cuh  An older segment's coefficients re-projected onto its successor's basis: C' = C (decoder_old encoder_new).
///
/// Means do not move, so nothing else is added. What a row loses is its part outside the newer basis, plus one rounding to the stored type.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/store_rows.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

namespace detail {

/// Element (row, channel) of a plain tile.
__device__ inline float plain_element(const std::uint8_t* tile, const HeadTiles& layout, Part part, DType type, int row, int channel) {
  return from_bits(type, *reinterpret_cast<const std::uint16_t*>(tile + layout.plain_byte(part, row, channel)));
}

}  // namespace detail

inline constexpr int kTransitionColumns = 16;  ///< new coefficients of a block of transition_kernel

/// @brief transitions [head, part, most, most]: decoder_old encoder_new. Grid: pieces of kTransitionColumns new coefficients x heads x 2.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads) transition_kernel(Tables tables, int from_epoch, int to_epoch, int most, float* transitions) {
  __shared__ float encoder[kTransitionColumns][kMaxHeadDim];
  const int head = static_cast<int>(blockIdx.y), dim = tables.head_dim, first = static_cast<int>(blockIdx.x) * kTransitionColumns;
  const Part part = blockIdx.z == 0 ? Part::key : Part::value;
  const PartMaps& from = tables.maps[from_epoch * tables.num_heads + head].of(part);
  const PartMaps& to = tables.maps[to_epoch * tables.num_heads + head].of(part);
  for (int item = static_cast<int>(threadIdx.x); item < kTransitionColumns * dim; item += kStoreThreads) {
    const int channel = first + item / dim;
    encoder[item / dim][item % dim] = channel < to.rank ? to.encoder.element(channel, item % dim, dim) : 0.0F;
  }
  __syncthreads();
  float* target = transitions + static_cast<std::size_t>(head * 2 + static_cast<int>(part)) * static_cast<std::size_t>(most * most);
  for (int channel = static_cast<int>(threadIdx.x); channel < from.rank; channel += kStoreThreads) {
    float sums[kTransitionColumns] = {};
    for (int d = 0; d < dim; ++d) {
      const float value = from.reader.element(channel, d, dim);
      #pragma unroll
      for (int i = 0; i < kTransitionColumns; ++i) sums[i] = fmaf(value, encoder[i][d], sums[i]);
    }
    for (int i = 0; i < kTransitionColumns && first + i < most; ++i) target[channel * most + first + i] = sums[i];
  }
}

/// @brief Shared memory of merge_kernel in bytes.
inline std::size_t merge_bytes(int most) { return static_cast<std::size_t>(kStoreRows * (2 * plain_stride(most) + 4 * (most + 1))); }

/// @brief Rewrites rows [first, end) of the compressed lists of a sequence. Grid: 64-row pieces from first's on x heads.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads) merge_kernel(Tables tables, int slot, int first, int end, int most, const float* transitions, DType type) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  const int stride = plain_stride(most);
  std::uint16_t* new_rows = reinterpret_cast<std::uint16_t*>(shared_memory);
  float* old_rows = reinterpret_cast<float*>(new_rows + kStoreRows * stride);
  __shared__ std::uint8_t* tiles[kStoreRows / kPlainRows];
  const int head = static_cast<int>(blockIdx.y), tile_row = (first / kStoreRows + static_cast<int>(blockIdx.x)) * kStoreRows;
  const int from = max(first - tile_row, 0), until = min(end - tile_row, kStoreRows);
  if (from >= until) return;
  const HeadTiles& layout = tables.compressed[head];
  const std::int32_t* table = tables.page_table(RowList::compressed, slot, head);
  if (threadIdx.x < static_cast<unsigned>(kStoreRows / layout.rows) && static_cast<int>(threadIdx.x) * layout.rows < until) {
    tiles[threadIdx.x] = tables.tile(table, layout, tile_row / layout.rows + static_cast<int>(threadIdx.x));
  }
  __syncthreads();
  for (const Part part : {Part::key, Part::value}) {
    const int rank = tables.maps[head].of(part).rank;
    const float* transition = transitions + static_cast<std::size_t>(head * 2 + static_cast<int>(part)) * static_cast<std::size_t>(most * most);
    for (int item = static_cast<int>(threadIdx.x); item < (until - from) * rank; item += kStoreThreads) {
      const int row = from + item / rank, channel = item % rank;
      old_rows[row * (most + 1) + channel] = detail::plain_element(tiles[row / layout.rows], layout, part, type, row % layout.rows, channel);
    }
    __syncthreads();
    const int channels = layout.channels(part);
    for (int item = static_cast<int>(threadIdx.x); item < (until - from) * channels; item += kStoreThreads) {
      const int row = from + item / channels, channel = item % channels;
      float sum = 0.0F;
      #pragma unroll 8
      for (int k = 0; k < (channel < rank ? rank : 0); ++k) sum = fmaf(old_rows[row * (most + 1) + k], transition[k * most + channel], sum);
      new_rows[row * stride + channel] = to_bits(type, sum);
    }
    __syncthreads();
    detail::store_plain(layout, tiles, part, new_rows, stride, from, until, false);
    __syncthreads();
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
