// SPDX-License-Identifier: Apache-2.0
/// @file cuda/keep_rows.cuh  Rows go from among those that masses chose, whose order in their list is nobody's: those at the list's end take the places of those that go.
///
/// Two launches: one block a head, or a group of heads with one fate, finds which rows move where, and moves their numbers; a warp a row moves what is stored. Rows that stay within the list's
/// new length stay where they are. Cost: the positions twice, each moved row once.
#pragma once

#include <cub/block/block_scan.cuh>

#include <algorithm>
#include <cstdint>

#include "lowrankkv/cuda/layer.cuh"
#include "lowrankkv/cuda/place_rows.cuh"
#include "lowrankkv/cuda/select_masses.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Which rows of a sequence's weighed list go.
struct GoingRows {
  std::int32_t first = 0, end = 0;  ///< those of positions [first, end)
  std::int32_t removed = 0;         ///< positions from `end` on are so many less then
  std::int32_t limit = -1;          ///< of the others, all but so many with the largest masses; -1: none
  std::int32_t pinned = 0;          ///< positions below it count as larger than any mass
};

/// @brief Finds the moves of each head's list; its positions, masses and residuals are those after them. Grid: heads, or groups of them.
template <class = void>
__global__ void __launch_bounds__(kEvictThreads) plan_moves_kernel(Tables tables, int slot, GoingRows going, RowMoves moves) {
  using Scan = cub::BlockScan<int, kEvictThreads>;
  __shared__ typename Scan::TempStorage storage;
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
  int kept = 0;
  for (int base = 0; base < rows; base += kEvictThreads) {
    int before = 0, count = 0;
    Scan(storage).ExclusiveSum(base + thread < rows && stays(base + thread) ? 1 : 0, before, count);
    __syncthreads();
    kept += count;
  }
  std::int32_t *from = moves.from + leader * moves.stride, *to = moves.to + leader * moves.stride;
  int left = 0, came = 0;  // places that are free, rows that take them
  for (int base = 0; base < rows; base += kEvictThreads) {
    const int row = base + thread;
    const bool is_there = row < rows, own_stays = is_there && stays(row), free = is_there && !own_stays && row < kept, moving = own_stays && row >= kept;
    int place = 0, count = 0;
    Scan(storage).ExclusiveSum(free ? 1 : 0, place, count);
    __syncthreads();
    if (free) to[left + place] = row;
    left += count;
    Scan(storage).ExclusiveSum(moving ? 1 : 0, place, count);
    __syncthreads();
    if (moving) from[came + place] = row;
    came += count;
  }
  __syncthreads();  // the lists are written, and no key is read any more
  for (int head = leader; head < leader + heads; ++head) {
    std::int32_t* own_positions = tables.row_positions(tables.weighed, slot, head);
    float* masses = tables.row_masses(slot, head);
    std::uint32_t* residuals = tables.residuals[static_cast<int>(tables.weighed)] == nullptr ? nullptr : tables.row_residuals(tables.weighed, slot, head);
    for (int i = thread; i < came; i += kEvictThreads) {
      const int source = from[i], target = to[i];
      own_positions[target] = own_positions[source];
      masses[target] = masses[source];
      if (residuals != nullptr) residuals[target] = residuals[source];
      if (head == leader) continue;
      moves.from[head * moves.stride + i] = source;
      moves.to[head * moves.stride + i] = target;
    }
    if (thread == 0) moves.counts[head] = came;
    __syncthreads();
    for (int row = thread; row < kept && going.removed > 0; row += kEvictThreads) {
      if (own_positions[row] >= going.end) own_positions[row] -= going.removed;
    }
  }
}

/// @brief Moves what is stored of the rows. Grid: pieces of as many moves as a block has warps x lists, those of joint values too.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads) move_rows_kernel(Tables tables, int slot, RowMoves moves) {
  const int list = static_cast<int>(blockIdx.y), head = list < tables.num_heads ? list : (list - tables.num_heads) * tables.joint_heads;
  const HeadTiles& layout = tables.weighed == RowList::full ? tables.listed : tables.compressed[list];
  const std::int32_t* table = tables.page_table(tables.weighed, slot, list);
  for (int i = static_cast<int>(blockIdx.x * kStoreThreads + threadIdx.x) / 32; i < moves.counts[head]; i += static_cast<int>(gridDim.x) * (kStoreThreads / 32)) {
    const int from = moves.from[head * moves.stride + i], to = moves.to[head * moves.stride + i];
    detail::move_row(layout, tables.tile(table, layout, from / layout.rows), from % layout.rows, tables.tile(table, layout, to / layout.rows), to % layout.rows);
  }
}

/// @brief Memory for the moves of a layer's weighed list. Allocates it when that is asked for the first time.
inline RowMoves row_moves(LayerState& layer) {
  const std::size_t heads = static_cast<std::size_t>(layer.tables().num_heads), rows = static_cast<std::size_t>(layer.max_rows(layer.tables().weighed));
  DeviceArray<std::int32_t>& memory = layer.moves();
  if (memory.size() == 0) memory = DeviceArray<std::int32_t>(heads * (2 * rows + 1));
  return {memory.data(), memory.data() + heads * rows, memory.data() + 2 * heads * rows, static_cast<std::int32_t>(rows)};
}

/// @brief Enqueues what makes rows of the weighed list go; the host's counts, and the device's, are those before. Pages are the sequence's own.
template <class = void>
void keep_rows(LayerState& layer, int slot, const GoingRows& going, cudaStream_t stream) {
  const Tables& tables = layer.tables();
  if (layer.sequence(slot).num_rows(tables.weighed) == 0) return;
  const RowMoves moves = row_moves(layer);
  const bool joint = tables.weighed == RowList::compressed && tables.joint_heads > 0;
  const unsigned fates = static_cast<unsigned>(joint ? tables.num_heads / tables.joint_heads : tables.num_heads), lists = static_cast<unsigned>(layer.num_lists(tables.weighed));
  plan_moves_kernel<><<<fates, kEvictThreads, 0, stream>>>(tables, slot, going, moves);
  check(cudaGetLastError(), "plan_moves_kernel");
  constexpr std::int64_t warps = kStoreThreads / 32;
  const std::int64_t most = (std::min)(std::int64_t{1024}, (layer.sequence(slot).num_rows(tables.weighed) + warps - 1) / warps);
  move_rows_kernel<><<<dim3(static_cast<unsigned>(most), lists), kStoreThreads, 0, stream>>>(tables, slot, moves);
  check(cudaGetLastError(), "move_rows_kernel");
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
