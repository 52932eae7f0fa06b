// SPDX-License-Identifier: Apache-2.0
/// @file cuda/store/compaction/unordered_compact.cuh  Unordered compaction: in every segment, rows
/// from its end take the places of removed rows.
///
/// It is for lists whose rows have no order. Segments keep their order, since each is read through
/// maps of its own; the rows of one segment may stand in any order. So a row moves only if it
/// stands behind its segment's new end. In a segment at most as many rows move as were removed from
/// it and from the segments before it, not all rows behind the first gap.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lowrankkv/cuda/runtime/block_scan.cuh"
#include "lowrankkv/cuda/scores/select_by_score.cuh"
#include "lowrankkv/cuda/state/layer_view.cuh"
#include "lowrankkv/cuda/state/row_order.cuh"
#include "lowrankkv/cuda/store/compaction/place_rows.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kMoveThreads = 1024;  ///< of a block of move_rows_kernel; a warp moves a row

namespace detail {

using PlaceScan = BlockScan<kEvictThreads>;

/// Number of segments of a list: 1 for full rows, and where bases do not move.
template <bool edits>
__device__ int list_segments(const LayerTables<edits>& tables, RowList list, int slot) {
  return list == RowList::full || tables.segments == nullptr ? 1
                                                             : tables.lengths[slot].num_segments;
}

/// Plans the moves of a head's list of `rows` rows, and writes where its segments will begin. All
/// threads of a block of kEvictThreads call it.
/// @param stays  stays(row of the list): whether the row is retained
/// @return how many rows are retained
template <class Stays>
__device__ int plan_moves(const LayerEdit& tables, RowList list, int slot, int head, int rows,
                          Stays&& stays, const RowMoves& moves, PlaceScan::Storage& storage) {
  const int thread = static_cast<int>(threadIdx.x), segments = list_segments(tables, list, slot);
  DeviceSegment* own = list == RowList::full || tables.segments == nullptr
                           ? nullptr
                           : tables.segments_of(slot, head);
  int target = 0, total = 0;  // where the segment will begin; moves of the segments before
  for (int segment = 0; segment < segments; ++segment) {
    const int begin = own == nullptr ? 0 : own[segment].first_row,
              end = segment + 1 < segments ? own[segment + 1].first_row : rows;
    int kept = 0;
    for (int base = begin; base < end; base += kEvictThreads) {
      int before = 0, count = 0;
      PlaceScan::exclusive_sum(base + thread < end && stays(base + thread) ? 1 : 0, before, count,
                               storage);
      __syncthreads();
      kept += count;
    }
    const int target_end = target + kept;
    int free_places = total, came = total;
    for (int base = target; base < end; base += kEvictThreads) {
      const int place = base + thread;
      const bool own_stays = place >= begin && place < end && stays(place),
                 is_free = place < target_end && !own_stays,
                 moving = own_stays && place >= target_end;
      int rank = 0, count = 0;
      PlaceScan::exclusive_sum(is_free ? 1 : 0, rank, count, storage);
      __syncthreads();
      if (is_free) moves.to[free_places + rank] = place;
      free_places += count;
      PlaceScan::exclusive_sum(moving ? 1 : 0, rank, count, storage);
      __syncthreads();
      if (moving) moves.from[came + rank] = place;
      came += count;
    }
    __syncthreads();  // all threads have read where the segment began
    if (thread == 0) {
      moves.ends[segment] = came;
      if (own != nullptr) own[segment].first_row = target;
    }
    total = came;
    target = target_end;
  }
  __syncthreads();
  return target;
}

/// Copies the moves of one head to another head of its group, whose values are joint: they retain
/// the same rows. All threads of a block call it.
__device__ inline void copy_moves(const RowMoves& planned, const RowMoves& own) {
  for (int i = static_cast<int>(threadIdx.x); i < planned.ends[0];
       i += static_cast<int>(blockDim.x)) {  // joint values have one segment
    own.from[i] = planned.from[i];
    own.to[i] = planned.to[i];
  }
  if (threadIdx.x == 0) own.ends[0] = planned.ends[0];
}

/// Moves positions, scores and residuals of the rows of a head's list. All threads of a block call
/// it; they are synchronised at the end.
__device__ inline void move_numbers(const LayerEdit& tables, RowList list, int slot, int head,
                                    const RowMoves& moves) {
  std::int32_t* positions = tables.row_positions(list, slot, head);
  float* accumulated_scores = tables.row_scores(list, slot, head);
  std::uint32_t* residuals = tables.residuals[static_cast<int>(list)] == nullptr
                                 ? nullptr
                                 : tables.row_residuals(list, slot, head);
  for (int segment = 0, begin = 0; segment < list_segments(tables, list, slot); ++segment) {
    for (int i = begin + static_cast<int>(threadIdx.x); i < moves.ends[segment];
         i += static_cast<int>(blockDim.x)) {
      const int from = moves.from[i], to = moves.to[i];
      positions[to] = positions[from];
      accumulated_scores[to] = accumulated_scores[from];
      if (residuals != nullptr) residuals[to] = residuals[from];
    }
    begin = moves.ends[segment];
    __syncthreads();
  }
}

}  // namespace detail

/// @brief Moves the stored rows, a warp a row. Grid: pieces x lists (those of joint values too) x
/// sequences. A piece is as many moves as a block has warps; where a list may have several
/// segments, there is one piece.
template <class = void>
__global__ void __launch_bounds__(kMoveThreads)
    move_rows_kernel(LayerEdit tables, RowList list, Batch batch, RowMoves moves) {
  const int index = static_cast<int>(blockIdx.y),
            head =
                index < tables.num_heads ? index : (index - tables.num_heads) * tables.joint_heads,
            slot = batch.slots[blockIdx.z];
  const HeadTiles& layout = list == RowList::full ? tables.listed : tables.compressed[index];
  const std::int32_t* table = tables.page_table(list, slot, index);
  const RowMoves own = moves.of(static_cast<int>(blockIdx.z) * tables.num_heads + head);
  for (int segment = 0, begin = 0; segment < detail::list_segments(tables, list, slot); ++segment) {
    for (int i = begin + static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 32;
         i < own.ends[segment]; i += static_cast<int>(gridDim.x * blockDim.x) / 32) {
      detail::move_row(
          layout, tables.tile(table, layout, own.from[i] / layout.rows), own.from[i] % layout.rows,
          tables.tile(table, layout, own.to[i] / layout.rows), own.to[i] % layout.rows);
    }
    begin = own.ends[segment];
    __syncthreads();
  }
}

/// @brief Enqueues move_rows_kernel.
/// @param lists  number of lists of the kind `list`
/// @param most   moves of a list, at most
template <class = void>
void move_rows(const LayerEdit& tables, RowList list, const Batch& batch, const RowMoves& moves,
               int lists, std::int64_t most, cudaStream_t stream) {
  const std::int64_t pieces =
      list == RowList::compressed && tables.segments != nullptr
          ? (std::min)(most, std::int64_t{1})
          : (std::min)(std::int64_t{1024}, (most + kMoveThreads / 32 - 1) / (kMoveThreads / 32));
  if (pieces == 0) return;
  move_rows_kernel<><<<dim3(static_cast<unsigned>(pieces), static_cast<unsigned>(lists),
                            static_cast<unsigned>(batch.count)),
                       kMoveThreads, 0, stream>>>(tables, list, batch, moves);
  check(cudaGetLastError(), "move_rows_kernel");
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
