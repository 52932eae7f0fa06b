// SPDX-License-Identifier: Apache-2.0
/// @file cuda/compress/evict.cuh  Eviction by accumulated attention score (H2O): of the stored and
/// the flushed rows, those with the largest scores stay (cpu/evict.hpp,
/// cpu/token_policy/heavy_hitters.hpp).
///
/// The host knows from counts how many rows stay; the device decides which. A flushed row that
/// stays takes the place of a stored row that is dropped, or goes to the list's end. No other row
/// moves.
///
/// If bases move, the place of a dropped row belongs to that row's epoch and cannot be reused. Then
/// the lists go through unordered compaction (cuda/store/compaction/unordered_compact.cuh), and all
/// flushed rows go to the end. The same is done if errors decide which of the kept rows are full:
/// rows of both lists are then kept by score, and only the device knows how many each list has.
///
/// In either case the positions of a list do not ascend, and pages that are shared with forks must
/// have been copied before. Heads with joint values share one decision, by the sum of their scores.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lowrankkv/cuda/store/compaction/retain_rows.cuh"
#include "lowrankkv/cuda/store/compaction/unordered_compact.cuh"
#include "lowrankkv/cuda/tiles/int8_tiles.cuh"
#include "lowrankkv/cuda/update/adapt.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kReplaceRows = 8;  ///< rows per block of replace_rows_kernel

/// @brief Inputs of an eviction besides FlushBatch, and its outputs.
struct Eviction {
  /// Scores of flushed rows [heads, stride], negative for rows that are dropped whatever their
  /// score; null: those of the tails.
  const float* accumulated_scores = nullptr;
  /// Output [sequence of the batch, head, stride]: flushed rows that stay, ascending.
  std::int32_t* chosen = nullptr;
  /// Output [sequence of the batch, head, stride]: places of stored rows that are dropped,
  /// ascending.
  std::int32_t* freed = nullptr;
  std::int32_t stride = 0;
  std::int32_t pinned = 0;  ///< rows at positions below it stay in any case, and replace no row
  /// Output [sequence of the batch, head]: number of freed places; with compaction, number of
  /// flushed rows that stay.
  std::int32_t* counts = nullptr;
  /// [sequence of the batch, group of heads, group_stride], from group_accumulated_scores_kernel;
  /// null: every head decides by itself.
  const float* group_scores = nullptr;
  std::int64_t group_stride = 0;
  ListMoves moves;  ///< output: moves of stored rows, with compaction
};

/// @brief The stored and flushed rows of a head among which scores decide.
struct ScoredList {
  /// stored: scored rows in the lists; rows: flushed rows that are scored; added: rows by which the
  /// list grows, if only one list is scored.
  int slot, stored, rows, added;
  int first;     ///< the first flushed row that is scored; those before it are pinned, and full
  int position;  ///< position of that row
  template <bool edits>
  __device__ ScoredList(const LayerTables<edits>& tables, const FlushBatch& flushed, int sequence,
                        int head)
      : slot(flushed.slots[sequence]),
        stored(tables.scored_rows(tables.rows[tables.index(slot, head)])),
        added(flushed.added(tables.scored, tables.scored, sequence, stored)),
        first(tables.scored == RowList::full ? 0 : flushed.pinned[sequence]),
        position(flushed.position[sequence] + first) {
    rows = flushed.rows[sequence] - first;
  }
};

/// @brief Accumulated score of a flushed row of a head: from `packed` [heads, stride] for a prompt,
/// or, if that is null, from the tail.
template <bool edits>
__device__ float flushed_score(const LayerTables<edits>& tables, const float* packed,
                               std::int64_t stride, int slot, int head, int row) {
  if (packed != nullptr) return packed[head * stride + row];
  const int place = tables.lengths[slot].tail_first + row, ring = tables.ring_rows();
  return tables.tail_row_scores(slot, head)[place < ring ? place : place - ring];
}

/// @brief Sums the accumulated scores over the heads of each group, for stored rows, then flushed
/// rows. Grid: rows x groups x sequences.
/// @param sums  output [sequence, group, stride]
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    group_accumulated_scores_kernel(LayerView tables, FlushBatch flushed, const float* packed,
                                    std::int64_t packed_stride, std::int64_t stride, float* sums) {
  const int leader = static_cast<int>(blockIdx.y) * tables.joint_heads,
            row = static_cast<int>(blockIdx.x) * kStoreThreads + static_cast<int>(threadIdx.x);
  const ScoredList scored(tables, flushed, static_cast<int>(blockIdx.z), leader);
  if (row >= scored.stored + scored.rows) return;
  float sum = 0.0F;
  for (int head = leader; head < leader + tables.joint_heads; ++head) {
    sum += row < scored.stored ? ScoredRows(tables, scored.slot, head).accumulated(row)
                               : flushed_score(tables, packed, packed_stride, scored.slot, head,
                                               scored.first + row - scored.stored);
  }
  sums[(static_cast<std::size_t>(blockIdx.z) * gridDim.y + blockIdx.y) *
           static_cast<std::size_t>(stride) +
       static_cast<std::size_t>(row)] = sum;
}

/// @brief Decides which stored and flushed rows stay: those with the largest scores, of equal
/// scores the earlier ones. As many stay as are stored, plus as many as the list grows by.
///
/// Writes chosen, freed and counts. Gives the flushed rows that stay their scores and positions:
/// the first of them at the list's end, the others in freed places. Lengths are those before. Finds
/// the smallest key that stays (cuda/scores/select_by_score.cuh), then writes in one pass. Grid:
/// heads, or groups of heads with joint values, x sequences.
/// @tparam compacts  unordered compaction; flushed rows that stay go behind the compacted rows.
/// Writes chosen, counts and moves. Sets the lists' lengths and segments to those before the
/// flushed rows are stored. If both lists are scored, note_scores_kernel writes the flushed rows'
/// scores, since their lists are not decided yet
template <bool compacts>
__global__ void __launch_bounds__(kEvictThreads)
    evict_rows_kernel(LayerEdit tables, FlushBatch flushed, Eviction eviction) {
  using Scan = detail::PlaceScan;
  __shared__ Scan::Storage storage;
  __shared__ ScoreSelection selection;
  const int heads = eviction.group_scores == nullptr ? 1 : tables.joint_heads,
            leader = static_cast<int>(blockIdx.x) * heads, sequence = static_cast<int>(blockIdx.y),
            thread = static_cast<int>(threadIdx.x);
  const ScoredList scored(tables, flushed, sequence, leader);
  const ScoredRows before(tables, scored.slot, leader);
  const int slot = scored.slot, stored = scored.stored, rows = scored.rows, all = stored + rows,
            added = scored.added;
  const bool both = compacts && tables.scores_both();
  const int wanted = both ? min(stored + flushed.candidates(sequence),
                                flushed.limit[sequence] + before.pinned_among(eviction.pinned))
                          : stored + added;
  const float* sums =
      eviction.group_scores == nullptr
          ? nullptr
          : eviction.group_scores + (static_cast<std::size_t>(sequence) * gridDim.x + blockIdx.x) *
                                        static_cast<std::size_t>(eviction.group_stride);
  const auto list_of = [&](std::int32_t* lists, int head) {
    return lists + static_cast<std::size_t>(sequence * tables.num_heads + head) *
                       static_cast<std::size_t>(eviction.stride);
  };
  std::int32_t *chosen = list_of(eviction.chosen, leader), *freed = list_of(eviction.freed, leader);
  const auto score_of = [&](int head, int row) {
    return flushed_score(tables, eviction.accumulated_scores, eviction.stride, slot, head,
                         scored.first + row);
  };
  const auto key = [&](int row) {
    const bool is_flushed = row >= stored;
    const float accumulated = sums != nullptr ? sums[row]
                              : is_flushed    ? score_of(leader, row - stored)
                                              : before.accumulated(row);
    return score_key(accumulated,
                     is_flushed ? scored.position + row - stored : before.position(row),
                     eviction.pinned);
  };
  const std::uint64_t smallest = smallest_kept(key, all, wanted, selection);
  [[maybe_unused]] int places = 0, kept[2] = {};
  int stay = 0;
  [[maybe_unused]] const auto moves_of = [&](RowList list, int head) {
    return eviction.moves.lists[static_cast<int>(list)].of(sequence * tables.num_heads + head);
  };
  if constexpr (compacts) {
    for (const RowList list : {RowList::full, RowList::compressed}) {
      if (!tables.has_scores(list)) continue;
      const int from = list == RowList::full ? 0 : before.full(),
                list_rows = list == RowList::full ? before.full() : stored - before.full();
      kept[static_cast<int>(list)] = detail::plan_moves(
          tables, list, slot, leader, list_rows,
          [&](int row) { return key(from + row) >= smallest; }, moves_of(list, leader), storage);
    }
  } else {
    for (int base = 0; base < stored; base += kEvictThreads) {
      const bool goes = base + thread < stored && key(base + thread) < smallest;
      int place = 0, count = 0;
      Scan::exclusive_sum(goes ? 1 : 0, place, count, storage);
      __syncthreads();
      if (goes) freed[places + place] = base + thread;
      places += count;
    }
  }
  for (int base = 0; base < rows; base += kEvictThreads) {
    const bool stays = base + thread < rows && key(stored + base + thread) >= smallest;
    int place = 0, count = 0;
    Scan::exclusive_sum(stays ? 1 : 0, place, count, storage);
    __syncthreads();
    if (stays) chosen[stay + place] = scored.first + base + thread;
    stay += count;
  }
  __syncthreads();  // chosen and freed are written; no key is read from here on
  if constexpr (compacts) {
    for (int head = leader; head < leader + heads; ++head) {
      for (const RowList list : {RowList::full, RowList::compressed}) {
        if (!tables.has_scores(list)) continue;
        if (head != leader) detail::copy_moves(moves_of(list, leader), moves_of(list, head));
        detail::move_numbers(tables, list, slot, head, moves_of(list, leader));
      }
      for (int i = thread; i < stay; i += kEvictThreads) {
        if (head != leader) list_of(eviction.chosen, head)[i] = chosen[i];
        if (both) continue;
        const int place = kept[static_cast<int>(RowList::compressed)] + i;
        tables.row_scores(RowList::compressed, slot, head)[place] =
            score_of(head, chosen[i] - scored.first);
        tables.row_positions(RowList::compressed, slot, head)[place] =
            flushed.position[sequence] + chosen[i];
        // The row may be re-projected to another epoch before its residual is noted.
        if (tables.residuals[static_cast<int>(RowList::compressed)] != nullptr)
          tables.row_residuals(RowList::compressed, slot, head)[place] = 0;
      }
      if (thread > 0) continue;
      eviction.counts[sequence * tables.num_heads + head] = stay;
      HeadRows& own = tables.rows[tables.index(slot, head)];
      own = {both ? kept[0] : own.num_full, kept[1]};
    }
  } else {
    for (int head = leader; head < leader + heads; ++head) {
      float* own_scores = tables.row_scores(tables.scored, slot, head);
      std::int32_t *own_positions = tables.row_positions(tables.scored, slot, head),
                   *own_chosen = list_of(eviction.chosen, head),
                   *own_freed = list_of(eviction.freed, head);
      for (int i = thread; i < stay; i += kEvictThreads) {
        const int place = i < added ? stored + i : freed[i - added];
        own_scores[place] = score_of(head, chosen[i] - scored.first);
        own_positions[place] = flushed.position[sequence] + chosen[i];
        if (head == leader) continue;
        own_chosen[i] = chosen[i];
        if (i >= added) own_freed[i - added] = place;
      }
      if (thread == 0) eviction.counts[sequence * tables.num_heads + head] = places;
    }
  }
}

/// @brief Writes the keys and values of flushed rows that stay to freed places of the full list.
/// Grid: pieces of kReplaceRows places x heads x sequences.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    replace_rows_kernel(LayerEdit tables, RowSource source, FlushBatch flushed, Eviction eviction) {
  const int head = static_cast<int>(blockIdx.y), sequence = static_cast<int>(blockIdx.z),
            slot = flushed.slots[sequence], dim = tables.head_dim;
  const std::size_t list = (static_cast<std::size_t>(sequence) * gridDim.y + blockIdx.y) *
                           static_cast<std::size_t>(eviction.stride);
  const std::int32_t *chosen = eviction.chosen + list +
                               flushed.added(RowList::full, RowList::full, sequence,
                                             tables.num_rows(RowList::full, slot, head)),
                     *freed = eviction.freed + list;
  const int first = static_cast<int>(blockIdx.x) * kReplaceRows,
            end = min(first + kReplaceRows, eviction.counts[sequence * tables.num_heads + head]);
  const HeadTiles& layout = tables.listed;
  const std::int32_t* table = tables.page_table(RowList::full, slot, head);
  const SourceRows rows(tables, source, slot, head);
  for (int i = first; i < end; ++i) {
    const int place = freed[i], in_tile = place % layout.rows;
    std::uint8_t* tile = tables.tile(table, layout, place / layout.rows);
    if (layout.scaled) {
      const int part_warp = static_cast<int>(threadIdx.x) / 32,
                lane = static_cast<int>(threadIdx.x) % 32;
      if (part_warp > 1) continue;  // one warp writes the key, one the value
      const Part part = part_warp == 0 ? Part::key : Part::value;
      const auto number = [&](int channel) { return rows.element(part, chosen[i], channel); };
      const __half step = detail::row_step(dim, number);
      if (lane == 0) *reinterpret_cast<__half*>(tile + layout.step_byte(part, in_tile)) = step;
      for (int channel = lane; channel < dim; channel += 32)
        tile[layout.plain_byte(part, in_tile, channel)] = static_cast<std::uint8_t>(
            detail::scaled_code(number(channel), detail::inverse_of(step)));
      continue;
    }
    for (int channel = static_cast<int>(threadIdx.x); channel < 2 * dim; channel += kStoreThreads) {
      const Part part = channel < dim ? Part::key : Part::value;
      const int own = channel < dim ? channel : channel - dim;
      *reinterpret_cast<std::uint16_t*>(tile + layout.plain_byte(part, in_tile, own)) =
          to_bits(tables.full_type, rows.element(part, chosen[i], own));
    }
  }
}

/// @brief If both lists are scored: writes the accumulated scores of rows that are about to be
/// stored at the lists' ends. Lengths are those before. Grid: heads x sequences.
/// @param accumulated_scores  scores of flushed rows [heads, stride]; null: those of the tails
/// @param full, compressed  the rows that go to each list. Without an order, the first flushed.full
/// rows go to the full list, and none to the compressed list
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    note_scores_kernel(LayerEdit tables, FlushBatch flushed, const float* accumulated_scores,
                       std::int32_t stride, RowOrder full, RowOrder compressed) {
  const int head = static_cast<int>(blockIdx.x), sequence = static_cast<int>(blockIdx.y),
            slot = flushed.slots[sequence];
  for (const RowList list : {RowList::full, RowList::compressed}) {
    const RowOrder& order = list == RowList::full ? full : compressed;
    const std::int32_t* rows = order.of(sequence, tables.num_heads, head);
    const int2 active = order.active(sequence, tables.num_heads, head,
                                     list == RowList::full ? flushed.full[sequence] : 0);
    const int stored = tables.num_rows(list, slot, head);
    for (int i = active.x + static_cast<int>(threadIdx.x); i < active.y; i += kStoreThreads) {
      const int place = stored + i - active.x;
      tables.row_scores(list, slot, head)[place] = flushed_score(
          tables, accumulated_scores, stride, slot, head, rows == nullptr ? i : rows[i]);
      // The row may be re-projected to another epoch before its residual is noted.
      if (tables.residuals[static_cast<int>(list)] != nullptr)
        tables.row_residuals(list, slot, head)[place] = 0;
    }
  }
}

/// @brief Enqueues note_scores_kernel.
template <class = void>
void note_scores(const LayerState& layer, const FlushBatch& flushed,
                 const float* accumulated_scores, std::int32_t stride, const RowOrder& full,
                 const RowOrder& compressed, cudaStream_t stream) {
  note_scores_kernel<><<<dim3(static_cast<unsigned>(layer.tables().num_heads),
                              static_cast<unsigned>(flushed.count)),
                         kStoreThreads, 0, stream>>>(layer.tables(), flushed, accumulated_scores,
                                                     stride, full, compressed);
  check(cudaGetLastError(), "note_scores_kernel");
}

/// @brief Sets the tail's accumulated scores to those of rows [first, first + count) of a prompt
/// [heads, stride]. Grid: heads.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    renew_scores_kernel(LayerEdit tables, int slot, const float* accumulated_scores, int stride,
                        int first, int count) {
  const int head = static_cast<int>(blockIdx.x), begin = tables.lengths[slot].tail_first,
            ring = tables.ring_rows();
  for (int row = static_cast<int>(threadIdx.x); row < count; row += kStoreThreads) {
    const int place = begin + row;
    tables.tail_row_scores(slot, head)[place < ring ? place : place - ring] =
        accumulated_scores[static_cast<std::size_t>(head) * static_cast<std::size_t>(stride) +
                           static_cast<std::size_t>(first + row)];
  }
}

/// @brief Keeps the stored and flushed rows with the largest accumulated scores, and drops the
/// others. Up to five launches.
///
/// Returns the order of the flushed rows that stay: first those that go to the list's end, then
/// those that replace stored rows, `replacing` per sequence at most. Full rows that replace others
/// are stored here. Pages of the scored lists must be the sequences' own.
/// @param pinned  rows at positions below it stay
/// @param accumulated_scores  Eviction::accumulated_scores
/// @param replacing  output
/// @tparam compacts  bases move, or both lists are scored: lists are compacted, no flushed row
/// replaces another, and only the device knows where lists end until the rows are stored
template <bool compacts>
RowOrder evict_rows(const LayerState& layer, const FlushBatch& flushed, std::int64_t pinned,
                    const float* accumulated_scores, const RowSource& source,
                    const CompressScratch& scratch, std::int64_t& replacing, cudaStream_t stream) {
  const LayerEdit& tables = layer.tables();
  const bool full = tables.scored == RowList::full, joint = !full && tables.joint_heads > 0;
  // If both lists are scored, errors choose among these rows next and write scratch.chosen.
  std::int32_t* const chosen = tables.scores_both() ? scratch.kept : scratch.chosen;
  Eviction eviction{accumulated_scores,
                    chosen,
                    scratch.rest,
                    scratch.rows,
                    static_cast<std::int32_t>(pinned),
                    scratch.replaced,
                    nullptr,
                    0,
                    scratch.moves};
  const unsigned heads = static_cast<unsigned>(tables.num_heads),
                 sequences = static_cast<unsigned>(flushed.count),
                 // Heads with joint values decide together.
      decisions = joint ? heads / static_cast<unsigned>(tables.joint_heads) : heads;
  std::int64_t most_rows = 0, most_flushed = 0;
  replacing = 0;
  for (int i = 0; i < flushed.count; ++i) {
    const std::int64_t stored = tables.scored_rows(layer.sequence(flushed.slots[i]).rows);
    most_rows = (std::max)(most_rows, stored + flushed.rows[i]);
    most_flushed = (std::max)(most_flushed, std::int64_t{flushed.rows[i]});
    const std::int64_t displacing =
        tables.scores_both()
            ? flushed.candidates(i)
            : flushed.offered(tables.scored, i) -
                  flushed.added(tables.scored, tables.scored, i, static_cast<std::int32_t>(stored));
    replacing = (std::max)(replacing, (std::min)(displacing, stored));
  }
  if (joint) {
    eviction.group_scores = scratch.group_scores;
    eviction.group_stride = most_rows;
    const dim3 grid(static_cast<unsigned>((most_rows + kStoreThreads - 1) / kStoreThreads),
                    decisions, sequences);
    group_accumulated_scores_kernel<><<<grid, kStoreThreads, 0, stream>>>(
        tables, flushed, eviction.accumulated_scores, eviction.stride, eviction.group_stride,
        scratch.group_scores);
    check(cudaGetLastError(), "group_accumulated_scores_kernel");
  }
  evict_rows_kernel<compacts>
      <<<dim3(decisions, sequences), kEvictThreads, 0, stream>>>(tables, flushed, eviction);
  check(cudaGetLastError(), "evict_rows_kernel");
  if constexpr (compacts) {
    Batch batch;
    batch.count = flushed.count;
    std::copy_n(flushed.slots, flushed.count, batch.slots);
    for (const RowList list : {RowList::full, RowList::compressed}) {
      if (layer.is_scored(list) && replacing > 0)
        move_rows(tables, list, batch, scratch.moves.lists[static_cast<int>(list)],
                  layer.num_lists(list), most_flushed, stream);
    }
    if (layer.device_epochs().used())
      trim_device_epochs(tables, layer.device_epochs(), batch, stream);
    replacing = 0;
    return {chosen, scratch.rows, scratch.replaced, 1, 0};
  } else if (full && replacing > 0) {
    replace_rows_kernel<>
        <<<dim3(static_cast<unsigned>((replacing + kReplaceRows - 1) / kReplaceRows), heads,
                sequences),
           kStoreThreads, 0, stream>>>(tables, source, flushed, eviction);
    check(cudaGetLastError(), "replace_rows_kernel");
  }
  return {scratch.chosen, scratch.rows, nullptr, 0, 0};
}

/// @brief Enqueues renew_scores_kernel, when rows [first, first + count) of a packed prompt have
/// become the tail.
template <class = void>
void renew_scores(const LayerState& layer, int slot, const CompressScratch& scratch, int first,
                  int count, cudaStream_t stream) {
  renew_scores_kernel<>
      <<<static_cast<unsigned>(layer.tables().num_heads), kStoreThreads, 0, stream>>>(
          layer.tables(), slot, scratch.accumulated_scores, scratch.rows, first, count);
  check(cudaGetLastError(), "renew_scores_kernel");
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
