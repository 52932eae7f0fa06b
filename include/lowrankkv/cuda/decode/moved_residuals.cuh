// SPDX-License-Identifier: Apache-2.0
/// @file cuda/decode/moved_residuals.cuh  What moving rows to another epoch adds to their
/// residuals: the distance that each row moves. A row may lose more by it, and losses add up. The
/// counterpart of MoveLosses in cpu/segments.hpp.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lowrankkv/cuda/decode/residuals.cuh"
#include "lowrankkv/cuda/store/merge_segments.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Gives the rows of a merge from plans.begin on, which have been rewritten, to the next
/// segment. One block.
template <class = void>
__global__ void narrow_merge_kernel(LayerEdit tables, MergePlans plans) {
  const MergePlan plan = plans.of(0);
  if (plan.segment < 0) return;
  for (int head = static_cast<int>(threadIdx.x); head < tables.num_heads;
       head += static_cast<int>(blockDim.x)) {
    DeviceSegment* own = tables.segments_of(plan.slot, head) + plan.segment;
    own[1].first_row = max(own[0].first_row, min(own[1].first_row, plan.begin + plans.begin));
  }
}

/// @brief Adds to the residuals of the rows of `plans` in the compressed lists the
/// distances of their keys and values [count, heads, head_dim] from the old ones. Residuals of rows
/// that did not move stay. Grid: pieces of eight rows x KV heads, a warp a row.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    add_moves_kernel(LayerEdit tables, MergePlans plans, const float* keys, const float* values,
                     const float* old_keys, const float* old_values) {
  const MergePlan plan = plans.of(0);
  const int head = static_cast<int>(blockIdx.y),
            index = static_cast<int>(blockIdx.x) * (kStoreThreads / 32) +
                    static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32, row = plan.begin + plans.begin + index;
  if (plan.segment < 0 || plans.begin + index >= plans.end ||
      row >= tables.num_rows(RowList::compressed, plan.slot, head))
    return;
  const std::size_t at =
      (static_cast<std::size_t>(index) * static_cast<std::size_t>(tables.num_heads) +
       static_cast<std::size_t>(head)) *
      static_cast<std::size_t>(tables.head_dim);
  std::uint32_t* const residual = tables.row_residuals(RowList::compressed, plan.slot, head) + row;
  const std::uint32_t before = *residual;
  std::uint32_t norms = 0;
  for (const Part part : {Part::key, Part::value}) {
    const float *own = (part == Part::key ? keys : values) + at,
                *old = (part == Part::key ? old_keys : old_values) + at;
    float moved = 0.0F;
    for (int channel = lane; channel < tables.head_dim; channel += 32) {
      const float difference = own[channel] - old[channel];
      moved = fmaf(difference, difference, moved);
    }
    const int shift = part == Part::key ? 0 : 16;
    const std::uint32_t own_before = before >> shift & 0xffffU;
    moved = detail::warp_sum(moved);
    norms |=
        (moved == 0.0F
             ? own_before
             : detail::residual_bits(from_bits(DType::f16, static_cast<std::uint16_t>(own_before)) +
                                     1.001F * sqrtf(moved)))
        << shift;
  }
  if (lane == 0) *residual = norms;
}

/// @brief Rewrites the rows of one merge, the last rows first, and adds the distances that they
/// move to their residuals. The device has both segments; the older one is empty afterwards. Cost:
/// two reconstructions of the rows; if the device decides on the merge and there is none, launches
/// alone. Allocates nothing, does not wait.
/// @tparam scale_groups  of tiles of codes; 0: plain tiles
/// @param first, end  rows among which the rows of the merge are, in every head: of the lists; if
/// the device decides, from the plan's first row on
/// @param decoded  scratch for kDecodedRows rows twice: keys and values before, then after
/// @param merge    merge(plans) enqueues the merge of rows [plans.begin, plans.end)
template <int scale_groups, class Merge>
void merge_noting_moves(const LayerState& layer, int slot, MergePlans plans, std::int32_t first,
                        std::int32_t end, float* decoded, cudaStream_t stream, Merge&& merge) {
  const LayerEdit& tables = layer.tables();
  const std::int64_t width = std::int64_t{tables.num_heads} * tables.head_dim;
  float* const part[4] = {decoded, decoded + kDecodedRows * width,
                          decoded + 2 * kDecodedRows * width, decoded + 3 * kDecodedRows * width};
  for (plans.end = end; plans.end > first; plans.end = plans.begin) {
    plans.begin = (std::max)(first, plans.end - static_cast<std::int32_t>(kDecodedRows));
    const std::int32_t count = plans.end - plans.begin;
    TokenRange range = row_range(RowList::compressed, plans.begin, count);
    range.merge = plans.decided;
    const auto decode = [&](float* keys, float* values) {
      decode_rows<scale_groups>(layer, slot, range, detail::decoded_target(tables, keys),
                                detail::decoded_target(tables, values), stream);
    };
    decode(part[0], part[1]);
    merge(plans);
    narrow_merge_kernel<><<<1, 128, 0, stream>>>(tables, plans);
    check(cudaGetLastError(), "narrow_merge_kernel");
    decode(part[2], part[3]);
    add_moves_kernel<><<<detail::warp_per_row(tables, count), kStoreThreads, 0, stream>>>(
        tables, plans, part[2], part[3], part[0], part[1]);
    check(cudaGetLastError(), "add_moves_kernel");
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
