// SPDX-License-Identifier: Apache-2.0
/// @file cuda/moved_residuals.cuh  What moving rows to another epoch adds to their residuals: a row may lose more, and what it loses adds up. The counterpart of MoveLosses in cpu/segments.hpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lowrankkv/cuda/residuals.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Adds to the residuals of rows [first, first + count) of the compressed lists how far their keys and values [count, heads, head_dim] are from those they had before. Grid: rows in eights x KV heads, a warp a row.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads) add_moves_kernel(Tables tables, int slot, int first, int count, const float* keys, const float* values, const float* old_keys, const float* old_values) {
  const int head = static_cast<int>(blockIdx.y), index = static_cast<int>(blockIdx.x) * (kStoreThreads / 32) + static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (index >= count) return;
  const std::size_t at = (static_cast<std::size_t>(index) * static_cast<std::size_t>(tables.num_heads) + static_cast<std::size_t>(head)) * static_cast<std::size_t>(tables.head_dim);
  std::uint32_t* const residual = tables.row_residuals(RowList::compressed, slot, head) + first + index;
  const std::uint32_t before = *residual;
  std::uint32_t norms = 0;
  for (const Part part : {Part::key, Part::value}) {
    const float *own = (part == Part::key ? keys : values) + at, *old = (part == Part::key ? old_keys : old_values) + at;
    float moved = 0.0F;
    for (int channel = lane; channel < tables.head_dim; channel += 32) {
      const float difference = own[channel] - old[channel];
      moved = fmaf(difference, difference, moved);
    }
    const int shift = part == Part::key ? 0 : 16;
    norms |= detail::residual_bits(from_bits(DType::f16, static_cast<std::uint16_t>(before >> shift)) + 1.001F * sqrtf(detail::warp_sum(moved))) << shift;
  }
  if (lane == 0) *residual = norms;
}

/// @brief Merges segment `merged` of a sequence into the next one, rows at its end first, and adds what that moves to their residuals. Segments are those that the device is to know from here on, but for the empty one that is left.
/// Cost: two reconstructions of the rows. Allocates nothing, waits for nothing.
/// @param decoded  scratch for kDecodedRows rows twice: keys and values before, keys and values after  @param merge  merge(first, end) enqueues the merge of rows [first, end)  @tparam scale_groups  of tiles of codes; 0: plain ones
template <int scale_groups, class Merge>
void merge_noting_moves(const LayerState& layer, int slot, std::vector<Segment>& segments, std::size_t merged, float* decoded, cudaStream_t stream, Merge&& merge) {
  const Tables& tables = layer.tables();
  const std::int64_t width = std::int64_t{tables.num_heads} * tables.head_dim;
  float* const part[4] = {decoded, decoded + kDecodedRows * width, decoded + 2 * kDecodedRows * width, decoded + 3 * kDecodedRows * width};
  const auto decode = [&](const TokenRange& range, float* keys, float* values) {
    decode_rows<scale_groups>(layer, slot, range, detail::decoded_target(tables, keys), detail::decoded_target(tables, values), stream);
  };
  const std::int32_t first = segments[merged].first_row;
  for (std::int32_t end = segments[merged + 1].first_row; end > first;) {
    const std::int32_t begin = (std::max)(first, end - static_cast<std::int32_t>(kDecodedRows)), count = end - begin;
    const TokenRange range = row_range(RowList::compressed, begin, count);
    decode(range, part[0], part[1]);
    merge(begin, end);
    segments[merged + 1].first_row = begin;
    layer.write_lengths(slot, segments, false, stream);
    decode(range, part[2], part[3]);
    add_moves_kernel<><<<detail::rows_in_eights(tables, count), kStoreThreads, 0, stream>>>(tables, slot, begin, count, part[2], part[3], part[0], part[1]);
    check(cudaGetLastError(), "add_moves_kernel");
    end = begin;
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
