// SPDX-License-Identifier: Apache-2.0
/// @file cuda/store/compaction/retain_rows.cuh  Removes rows from lists whose rows are kept by
/// accumulated attention score.
///
/// These lists have no order. Rows at the end of a list, or of each segment, take the places of
/// removed rows. One launch plans the moves: one block a head, or a group of heads that retain the
/// same rows, finds which rows move where, and moves their positions, scores and residuals. One
/// more launch a list moves the stored rows, a warp a row
/// (cuda/store/compaction/unordered_compact.cuh). Cost: the positions twice, each moved row once.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/layer/layer_state.cuh"
#include "lowrankkv/cuda/layer/read_rows.cuh"
#include "lowrankkv/cuda/state/row_order.cuh"
#include "lowrankkv/cuda/store/compaction/unordered_compact.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Which rows of a sequence's scored lists are removed.
struct RemovedPositions {
  std::int32_t first = 0, end = 0;  ///< rows of positions [first, end) are removed
  std::int32_t removed = 0;         ///< positions from `end` on decrease by it afterwards
  /// Of the remaining rows only so many stay, those with the largest scores; -1: all stay.
  std::int32_t limit = -1;
  /// Positions below it rank above any score. Where both lists are scored, their rows do not count
  /// towards `limit`.
  std::int32_t pinned = 0;
};

/// @brief Plans the moves of each head's scored lists. Applies them to positions, scores, residuals
/// and segments; where both lists are scored, to the lists' lengths too. Grid: heads, or groups of
/// heads that retain the same rows.
template <class = void>
__global__ void __launch_bounds__(kEvictThreads)
    plan_moves_kernel(LayerEdit tables, int slot, RemovedPositions removal, ListMoves moves) {
  __shared__ detail::PlaceScan::Storage storage;
  __shared__ ScoreSelection selection;
  const int heads = tables.num_heads / static_cast<int>(gridDim.x),
            leader = static_cast<int>(blockIdx.x) * heads, thread = static_cast<int>(threadIdx.x);
  const ScoredRows stored(tables, slot, leader);
  const auto key = [&](int row) {
    float accumulated = 0.0F;
    for (int head = leader; head < leader + heads; ++head)
      accumulated += ScoredRows(tables, slot, head).accumulated(row);
    return score_key(accumulated, stored.position(row), removal.pinned);
  };
  const int limit =
      removal.limit +
      (tables.scores_both() && removal.limit >= 0 ? stored.pinned_among(removal.pinned) : 0);
  const std::uint64_t smallest = limit < 0 || limit >= stored.count()
                                     ? 0
                                     : smallest_kept(key, stored.count(), limit, selection);
  const auto stays = [&](int row) {
    return (stored.position(row) < removal.first || stored.position(row) >= removal.end) &&
           (smallest == 0 || key(row) >= smallest);
  };
  int kept[2] = {};
  for (const RowList list : {RowList::full, RowList::compressed}) {
    if (!tables.has_scores(list)) continue;
    const int before = list == RowList::full ? 0 : stored.full(),
              rows = list == RowList::full ? stored.full() : stored.count() - stored.full();
    kept[static_cast<int>(list)] = detail::plan_moves(
        tables, list, slot, leader, rows, [&](int row) { return stays(before + row); },
        moves.lists[static_cast<int>(list)].of(leader), storage);
  }
  for (int head = leader; head < leader + heads; ++head) {
    for (const RowList list : {RowList::full, RowList::compressed}) {
      if (!tables.has_scores(list)) continue;
      const RowMoves &all = moves.lists[static_cast<int>(list)], planned = all.of(leader);
      if (head != leader) detail::copy_moves(planned, all.of(head));
      detail::move_numbers(tables, list, slot, head, planned);
      std::int32_t* own_positions = tables.row_positions(list, slot, head);
      for (int row = thread; row < kept[static_cast<int>(list)] && removal.removed > 0;
           row += kEvictThreads) {
        if (own_positions[row] >= removal.end) own_positions[row] -= removal.removed;
      }
    }
    if (tables.scores_both() && thread == 0)
      tables.rows[tables.index(slot, head)] = {kept[0], kept[1]};
  }
}

/// @brief Memory for the moves of a sequence's scored lists. The first call allocates it.
inline ListMoves row_moves(LayerState& layer) {
  const LayerEdit& tables = layer.tables();
  const std::size_t heads = static_cast<std::size_t>(tables.num_heads);
  const auto rows_of = [&](RowList list) {
    return layer.is_scored(list) ? static_cast<std::size_t>(layer.max_rows(list)) : 0;
  };
  const auto segments_of = [&](RowList list) {
    return static_cast<std::size_t>(list == RowList::full ? 1 : tables.max_segments);
  };
  const auto numbers = [&](RowList list) {
    return heads * (2 * rows_of(list) + segments_of(list));
  };
  DeviceArray<std::int32_t>& memory = layer.moves();
  if (memory.size() == 0)
    memory = DeviceArray<std::int32_t>(numbers(RowList::full) + numbers(RowList::compressed));
  ListMoves moves;
  std::int32_t* own = memory.data();
  for (const RowList list : {RowList::full, RowList::compressed}) {
    moves.lists[static_cast<int>(list)] = {
        own, own + heads * rows_of(list), own + 2 * heads * rows_of(list),
        static_cast<std::int32_t>(rows_of(list)), static_cast<std::int32_t>(segments_of(list))};
    own += numbers(list);
  }
  return moves;
}

/// @brief Allocates the memory of retain_rows() for a sequence with scored rows, so that it does
/// not.
inline void reserve_moves(LayerState& layer, int slot) {
  if (layer.tables().scored_rows(layer.sequence(slot).rows) > 0) row_moves(layer);
}

/// @brief Enqueues the removal of rows from a sequence's scored lists. The pages of the lists must
/// be the sequence's own (own_scored_pages()). The host's row counts stay as they were; the
/// device's change only where both lists are scored.
template <class = void>
void retain_rows(LayerState& layer, int slot, const RemovedPositions& removal,
                 cudaStream_t stream) {
  const LayerEdit& tables = layer.tables();
  const HostSequence& now = layer.sequence(slot);
  if (tables.scored_rows(now.rows) == 0) return;
  const ListMoves moves = row_moves(layer);
  const bool joint = tables.scored == RowList::compressed && tables.joint_heads > 0;
  plan_moves_kernel<>
      <<<static_cast<unsigned>(joint ? tables.num_heads / tables.joint_heads : tables.num_heads),
         kEvictThreads, 0, stream>>>(tables, slot, removal, moves);
  check(cudaGetLastError(), "plan_moves_kernel");
  for (const RowList list : {RowList::full, RowList::compressed}) {
    if (layer.is_scored(list))
      move_rows(tables, list, {1, {slot}}, moves.lists[static_cast<int>(list)],
                layer.num_lists(list), now.num_rows(list), stream);
  }
}

/// @brief Makes all pages of a sequence's scored lists its own, by copying shared ones. The caller
/// has checked that there are enough pages.
inline void own_scored_pages(LayerState& layer, int slot, cudaStream_t stream) {
  for (const RowList list : {RowList::full, RowList::compressed}) {
    if (layer.is_scored(list))
      layer.own_pages(slot, list, 0, layer.sequence(slot).num_rows(list), stream);
  }
}

/// @brief If a sequence has more than `limit` scored rows after tokens were removed, keeps those
/// with the largest scores; then releases unused pages and uploads lengths. Where both lists are
/// scored, waits for the stream if any row might go.
/// @param limit   negative: none
/// @param pinned  rows of positions below it always stay
template <class = void>
void limit_rows(LayerState& layer, int slot, std::int64_t limit, std::int64_t pinned,
                cudaStream_t stream) {
  HostSequence& now = layer.sequence(slot);
  const LayerEdit& tables = layer.tables();
  if (limit < 0 || tables.scored_rows(now.rows) <= limit + (tables.scores_both() ? pinned : 0))
    return;
  retain_rows(layer, slot,
              {0, 0, 0, static_cast<std::int32_t>(limit), static_cast<std::int32_t>(pinned)},
              stream);
  if (tables.scores_both()) {
    const std::int32_t one[] = {slot};
    read_rows(layer, one, stream);
  } else {
    now.limit_rows(limit, tables.scored);
  }
  layer.release_and_upload(slot, stream);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
