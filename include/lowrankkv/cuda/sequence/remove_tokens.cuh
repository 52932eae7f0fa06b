// SPDX-License-Identifier: Apache-2.0
/// @file cuda/sequence/remove_tokens.cuh  Removes tokens from the middle of a sequence: lists are
/// compacted, and later tokens move up.
///
/// Rows keep their codes. Lists go through stable compaction
/// (cuda/store/compaction/stable_compact.cuh); scored lists, whose order does not matter, through
/// unordered compaction (cuda/store/compaction/retain_rows.cuh).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lowrankkv/cuda/layer/layer_state.cuh"
#include "lowrankkv/cuda/store/compaction/retain_rows.cuh"
#include "lowrankkv/cuda/store/compaction/split_lists.cuh"
#include "lowrankkv/cuda/store/compaction/stable_compact.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief The rows of tokens [first, first + count): rows [begin, end) of the lists, and rows
/// [tail_begin, tail_end) of the tail. In scored lists, which are in no order, end - begin is their
/// number.
struct RemovedRows {
  std::vector<HeadRows> begin, end;  ///< [heads]
  std::int32_t tail_begin = 0, tail_end = 0;

  /// @param chosen  values decided how rows are stored; as in ListBounds, which then waits
  static RemovedRows of(const LayerState& layer, int slot, std::int64_t first, std::int64_t count,
                        bool chosen, cudaStream_t stream) {
    const HostSequence& now = layer.sequence(slot);
    const auto in_tail = [&](std::int64_t token) {
      return static_cast<std::int32_t>(
          std::clamp(token - now.first_tail(), std::int64_t{0}, std::int64_t{now.tail_length}));
    };
    const ListBounds bounds(layer, slot, first, chosen, stream);
    return {bounds.below(first), bounds.below(first + count), in_tail(first),
            in_tail(first + count)};
  }
  /// @brief Rows of every head [heads] that are left without these rows.
  std::vector<HeadRows> left(const HostSequence& now) const {
    std::vector<HeadRows> rows;
    for (std::size_t head = 0; head < begin.size(); ++head) {
      const HeadRows own = now.rows_of(static_cast<int>(head));
      rows.push_back(
          {own.num_full - (end[head].num_full - begin[head].num_full),
           own.num_compressed - (end[head].num_compressed - begin[head].num_compressed)});
    }
    return rows;
  }
  /// @brief The first row whose place another row takes, in a list of any head, numbered as in the
  /// head with the longest list; -1: no row moves.
  /// @param anywhere  removed rows may be anywhere in the list
  std::int64_t first_moved(const HostSequence& now, RowList list, bool anywhere) const {
    std::int64_t first = -1;
    for (std::size_t head = 0; head < begin.size(); ++head) {
      const std::int64_t from = rows_in(begin[head], list), to = rows_in(end[head], list),
                         place = from + now.missing_in(list, static_cast<int>(head));
      if (from < to && anywhere) return 0;
      if (from < to && to < now.num_rows(list, static_cast<int>(head)) &&
          (first < 0 || place < first))
        first = place;
    }
    return first;
  }
};

/// @brief Compacts the positions and residuals (if kept) of rows as stable_compact() compacts the
/// rows. Positions of rows that move decrease by `removed`. Grid: heads.
template <class = void>
__global__ void __launch_bounds__(kMoveThreads)
    compact_numbers_kernel(LayerEdit tables, int slot, RowList list, ListGaps gaps, int removed) {
  const int begin = gaps.begin[blockIdx.x], end = gaps.end[blockIdx.x],
            rows = gaps.rows[blockIdx.x], head = gaps.first + static_cast<int>(blockIdx.x);
  const auto close = [&](auto* numbers, auto less) {
    for (int first = end; first < rows; first += kMoveThreads) {
      const int row = first + static_cast<int>(threadIdx.x);
      const auto number = row < rows ? numbers[row] : 0;
      __syncthreads();
      if (row < rows) numbers[row - (end - begin)] = number - less;
      __syncthreads();
    }
  };
  if (std::int32_t* positions = tables.row_positions(list, slot, head); positions != nullptr)
    close(positions, removed);
  if (tables.residuals[static_cast<int>(list)] != nullptr)
    close(tables.row_residuals(list, slot, head), 0U);
}

/// @brief Moves rows [end, length) of a tail to rows [begin, ...), with their accumulated scores.
/// Grid: heads. A thread moves the same channels of all rows.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    compact_tail_kernel(LayerEdit tables, int slot, int begin, int end) {
  const int head = static_cast<int>(blockIdx.x), dim = tables.head_dim, ring = tables.ring_rows();
  const DeviceLengths lengths = tables.lengths[slot];
  for (int row = end; row < lengths.tail_length; ++row) {
    const int from = (lengths.tail_first + row) % ring,
              to = (lengths.tail_first + row - (end - begin)) % ring;
    const std::uint8_t* source = tables.tail_tile(slot, head, from);
    std::uint8_t* target = tables.tail_tile(slot, head, to);
    for (int item = static_cast<int>(threadIdx.x); item < 2 * dim; item += kStoreThreads) {
      const Part part = item < dim ? Part::key : Part::value;
      *reinterpret_cast<std::uint16_t*>(
          target + tables.full.plain_byte(part, to % tables.full.rows, item % dim)) =
          *reinterpret_cast<const std::uint16_t*>(
              source + tables.full.plain_byte(part, from % tables.full.rows, item % dim));
    }
    if (tables.tail_scores != nullptr && threadIdx.x == 0)
      tables.tail_row_scores(slot, head)[to] = tables.tail_row_scores(slot, head)[from];
  }
}

/// @brief A row's number after rows [begin, end) of its list were removed. For a removed row: the
/// number of the row that follows them.
__host__ __device__ constexpr std::int32_t row_after(std::int32_t row, std::int32_t begin,
                                                     std::int32_t end) {
  return row <= begin ? row : row >= end ? row - (end - begin) : begin;
}

/// @brief Updates where segments begin after rows were removed, with device-managed epochs. One
/// thread per list.
template <class = void>
__global__ void close_segment_gaps_kernel(LayerEdit tables, int slot, ListGaps gaps) {
  const int index = static_cast<int>(threadIdx.x);
  for (int i = 0; index < gaps.count && i < tables.lengths[slot].num_segments; ++i) {
    std::int32_t& first = tables.segments_of(slot, gaps.first + index)[i].first_row;
    first = row_after(first, gaps.begin[index], gaps.end[index]);
  }
}

/// @brief Calls function(gaps) for the lists of a kind, at most ListGaps::kMost at a time.
/// @param lists  number of lists: of the heads only, or of joint values too
template <class Function>
void for_each_gaps(const LayerState& layer, const HostSequence& now, const RemovedRows& rows,
                   RowList list, int lists, Function&& function) {
  const LayerEdit& tables = layer.tables();
  for (int index = 0; index < lists; index += ListGaps::kMost) {
    ListGaps gaps;
    gaps.first = index;
    for (; gaps.count < ListGaps::kMost && index + gaps.count < lists; ++gaps.count) {
      const int own = index + gaps.count,
                head = own < tables.num_heads ? own : (own - tables.num_heads) * tables.joint_heads;
      gaps.begin[gaps.count] = rows_in(rows.begin[static_cast<std::size_t>(head)], list);
      gaps.end[gaps.count] = rows_in(rows.end[static_cast<std::size_t>(head)], list);
      gaps.rows[gaps.count] = static_cast<std::int32_t>(now.num_rows(list, head));
    }
    function(gaps);
  }
}

/// @brief Adds to `demand` the pages shared with forks that remove_tokens() must copy. Reserves its
/// scratch memory, which may allocate and wait.
inline void demand_removal(const LayerState& layer, int slot, const RemovedRows& rows,
                           PageDemand& demand) {
  const HostSequence& now = layer.sequence(slot);
  for (const RowList list : {RowList::full, RowList::compressed}) {
    if (!layer.is_scored(list))
      for_each_gaps(layer, now, rows, list, layer.num_lists(list),
                    [&](const ListGaps& gaps) { reserve_stable_compact(layer, list, gaps); });
    if (const std::int64_t first = rows.first_moved(now, list, layer.is_scored(list)); first >= 0)
      layer.demand_writes(slot, list, first, now.num_rows(list), demand);
  }
}

/// @brief Checks that a sequence has `count` tokens from `first` on, and that the positions of the
/// remaining tokens can be stored.
/// @throws ShapeError beyond the sequence, ValueError for too large offsets, CapacityError beyond
/// kMaxShifts pieces with pre-RoPE keys
inline void check_removal(const LayerState& layer, const HostSequence& now, std::int64_t first,
                          std::int64_t count) {
  using ::lowrankkv::detail::fail;
  const bool pre_rope = layer.tables().rotary.pre_rope();
  ::lowrankkv::detail::check_removal(
      now.shifts, now.num_tokens, first, count,
      pre_rope ? farthest_shift(layer.config().max_tokens) : PositionShifts::kLimit);
  PositionShifts left = now.shifts;
  left.remove(first, count);
  if (pre_rope && left.pieces().size() > kMaxShifts)
    fail<CapacityError>("remove: positions in ", left.pieces().size(), " pieces, at most ",
                        kMaxShifts, " on this backend");
}

/// @brief Removes tokens [first, first + count), dropped ones included. The caller has checked the
/// pages (demand_removal).
/// @param rows  the rows of these tokens
template <class = void>
void remove_tokens(LayerState& layer, int slot, std::int64_t first, std::int64_t count,
                   const RemovedRows& rows, cudaStream_t stream) {
  HostSequence& now = layer.sequence(slot);
  const LayerEdit& tables = layer.tables();
  if (rows.tail_begin < rows.tail_end && rows.tail_end < now.tail_length) {
    compact_tail_kernel<><<<static_cast<unsigned>(tables.num_heads), kStoreThreads, 0, stream>>>(
        tables, slot, rows.tail_begin, rows.tail_end);
    check(cudaGetLastError(), "compact_tail_kernel");
  }
  if (tables.tail_scores != nullptr && first < now.first_tail()) {
    for (const RowList list : {RowList::full, RowList::compressed}) {
      if (layer.is_scored(list) && rows.first_moved(now, list, true) >= 0)
        layer.own_pages(slot, list, 0, now.num_rows(list), stream);
    }
    retain_rows(layer, slot,
                {static_cast<std::int32_t>(first), static_cast<std::int32_t>(first + count),
                 static_cast<std::int32_t>(count)},
                stream);
  }
  for (const RowList list : {RowList::full, RowList::compressed}) {
    if (layer.is_scored(list)) continue;
    if (const std::int64_t moved = rows.first_moved(now, list, false); moved >= 0) {
      layer.own_pages(slot, list, moved, now.num_rows(list), stream);
      for_each_gaps(layer, now, rows, list, layer.num_lists(list),
                    [&](const ListGaps& gaps) { stable_compact(layer, slot, list, gaps, stream); });
    }
    if ((tables.positions[static_cast<int>(list)] == nullptr &&
         tables.residuals[static_cast<int>(list)] == nullptr) ||
        count == 0)
      continue;
    for_each_gaps(layer, now, rows, list, tables.num_heads, [&](const ListGaps& gaps) {
      compact_numbers_kernel<><<<static_cast<unsigned>(gaps.count), kMoveThreads, 0, stream>>>(
          tables, slot, list, gaps, static_cast<int>(count));
      check(cudaGetLastError(), "compact_numbers_kernel");
    });
  }
  for (HostSegment& segment : now.epochs.segments) {
    for (std::size_t head = 0; head < segment.first_rows.size(); ++head)
      segment.first_rows[head] = row_after(
          segment.first_rows[head], rows.begin[head].num_compressed, rows.end[head].num_compressed);
  }
  if (layer.device_epochs().used() && !layer.is_scored(RowList::compressed)) {
    for_each_gaps(
        layer, now, rows, RowList::compressed, tables.num_heads, [&](const ListGaps& gaps) {
          close_segment_gaps_kernel<><<<1, ListGaps::kMost, 0, stream>>>(tables, slot, gaps);
          check(cudaGetLastError(), "close_segment_gaps_kernel");
        });
  }
  now.set_rows(rows.left(now));
  now.tail_length -= rows.tail_end - rows.tail_begin;
  now.num_tokens -= count;
  now.shifts.remove(first, count);
  layer.rotary().write_shifts(slot, now.shifts, stream);
  layer.release_and_upload(slot, stream);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
