// SPDX-License-Identifier: Apache-2.0
/// @file cuda/keep_rows.cuh  Rows go from among those that masses chose, whose order in their list is nobody's: those at its end, or at each segment's, take the places of those that go.
///
/// Two launches: one block a head, or a group of heads with one fate, finds which rows move where, and moves their numbers; a warp a row moves what is stored (cuda/close_rows.cuh). Cost: the
/// positions twice, each moved row once.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/close_rows.cuh"
#include "lowrankkv/cuda/layer.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Which rows of a sequence's weighed list go.
struct GoingRows {
  std::int32_t first = 0, end = 0;  ///< those of positions [first, end)
  std::int32_t removed = 0;         ///< positions from `end` on are so many less then
  std::int32_t limit = -1;          ///< of the others, all but so many with the largest masses; -1: none
  std::int32_t pinned = 0;          ///< positions below it count as larger than any mass
};

/// @brief Finds the moves of each head's list; its positions, masses and residuals are those after them, and so are its segments. Grid: heads, or groups of them.
template <class = void>
__global__ void __launch_bounds__(kEvictThreads) plan_moves_kernel(Tables tables, int slot, GoingRows going, RowMoves moves) {
  __shared__ typename detail::PlaceScan::TempStorage storage;
  __shared__ MassSelection selection;
  const int heads = tables.num_heads / static_cast<int>(gridDim.x), leader = static_cast<int>(blockIdx.x) * heads, thread = static_cast<int>(threadIdx.x), rows = tables.num_rows(tables.weighed, slot, leader);
  const std::int32_t* positions = tables.row_positions(tables.weighed, slot, leader);
  const auto key = [&](int row) {
    float mass = 0.0F;
    for (int head = leader; head < leader + heads; ++head) mass += tables.row_masses(slot, head)[row];
    return mass_key(mass, positions[row], going.pinned);
  };
  const std::uint64_t smallest = going.limit < 0 || going.limit >= rows ? 0 : smallest_kept(key, rows, going.limit, selection);
  const auto stays = [&](int row) { return (positions[row] < going.first || positions[row] >= going.end) && (smallest == 0 || key(row) >= smallest); };
  const RowMoves planned = moves.of(leader);
  const int kept = detail::plan_moves(tables, slot, leader, rows, stays, planned, storage);
  for (int head = leader + 1; head < leader + heads; ++head) {  // joint values, of one segment
    const RowMoves own = moves.of(head);
    for (int i = thread; i < planned.ends[0]; i += kEvictThreads) {
      own.from[i] = planned.from[i];
      own.to[i] = planned.to[i];
    }
    if (thread == 0) own.ends[0] = planned.ends[0];
  }
  for (int head = leader; head < leader + heads; ++head) {
    detail::move_numbers(tables, slot, head, planned);
    std::int32_t* own_positions = tables.row_positions(tables.weighed, slot, head);
    for (int row = thread; row < kept && going.removed > 0; row += kEvictThreads) {
      if (own_positions[row] >= going.end) own_positions[row] -= going.removed;
    }
  }
}

/// @brief Memory for the moves of a sequence's weighed list. Allocates it when that is asked for the first time.
inline RowMoves row_moves(LayerState& layer) {
  const std::size_t heads = static_cast<std::size_t>(layer.tables().num_heads), rows = static_cast<std::size_t>(layer.max_rows(layer.tables().weighed)), segments = static_cast<std::size_t>(layer.tables().max_segments);
  DeviceArray<std::int32_t>& memory = layer.moves();
  if (memory.size() == 0) memory = DeviceArray<std::int32_t>(heads * (2 * rows + segments));
  return {memory.data(), memory.data() + heads * rows, memory.data() + 2 * heads * rows, static_cast<std::int32_t>(rows), static_cast<std::int32_t>(segments)};
}

/// @brief Enqueues what makes rows of the weighed list go; the host's counts, and the device's, are those before. Pages are the sequence's own.
template <class = void>
void keep_rows(LayerState& layer, int slot, const GoingRows& going, cudaStream_t stream) {
  const Tables& tables = layer.tables();
  const std::int64_t rows = layer.sequence(slot).num_rows(tables.weighed);
  if (rows == 0) return;
  const RowMoves moves = row_moves(layer);
  const bool joint = tables.weighed == RowList::compressed && tables.joint_heads > 0;
  plan_moves_kernel<><<<static_cast<unsigned>(joint ? tables.num_heads / tables.joint_heads : tables.num_heads), kEvictThreads, 0, stream>>>(tables, slot, going, moves);
  check(cudaGetLastError(), "plan_moves_kernel");
  move_rows(tables, {1, {slot}}, moves, layer.num_lists(tables.weighed), rows, stream);
}

/// @brief Where a sequence's weighed list has more than `limit` rows, after tokens have gone: those with the largest masses stay. @param pinned  positions below it stay in any case
template <class = void>
void limit_rows(LayerState& layer, int slot, std::int64_t limit, std::int64_t pinned, cudaStream_t stream) {
  HostSequence& now = layer.sequence(slot);
  const RowList weighed = layer.tables().weighed;
  if (limit < 0 || now.num_rows(weighed) <= limit) return;
  keep_rows(layer, slot, {0, 0, 0, static_cast<std::int32_t>(limit), static_cast<std::int32_t>(pinned)}, stream);
  now.limit_rows(limit, weighed);
  layer.settle(slot, stream);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
