// SPDX-License-Identifier: Apache-2.0
/// @file cuda/remove_tokens.cuh  Tokens leave the middle of a sequence: lists close up, and the tokens behind take their places.
///
/// Where the host knows from counts which rows are stored how: full ones are the first tokens, compressed ones follow. Rows keep their codes and move up in order, a block a list, at most as many at a
/// time as were removed, so that none is overwritten before it has moved. Floor: the rows behind, read and written once; a block moves them with one multiprocessor's bandwidth.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lowrankkv/cuda/layer.cuh"
#include "lowrankkv/cuda/place_rows.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kMoveThreads = 1024;  ///< of a block that moves rows, a warp a row

/// @brief Tokens [first, first + count) as rows: those of the lists, and of the tail. A list's rows [begin, end) go.
struct RemovedRows {
  std::int32_t begin[2] = {}, end[2] = {};  ///< by RowList
  std::int32_t tail_begin = 0, tail_end = 0;

  /// @param now  whose full rows are its first tokens, and compressed ones those behind
  static RemovedRows of(const HostSequence& now, std::int64_t first, std::int64_t count) {
    RemovedRows rows;
    const auto cut = [&](std::int64_t list_begin, std::int64_t list_rows, std::int32_t& begin, std::int32_t& end) {
      begin = static_cast<std::int32_t>(std::clamp(first - list_begin, std::int64_t{0}, list_rows));
      end = static_cast<std::int32_t>(std::clamp(first + count - list_begin, std::int64_t{0}, list_rows));
    };
    cut(0, now.rows.num_full, rows.begin[0], rows.end[0]);
    cut(now.rows.num_full, now.rows.num_compressed, rows.begin[1], rows.end[1]);
    cut(now.num_tokens - now.tail_length, now.tail_length, rows.tail_begin, rows.tail_end);
    return rows;
  }
  std::int32_t count(RowList list) const { return end[static_cast<int>(list)] - begin[static_cast<int>(list)]; }
};

/// @brief Rows [end, rows) of every list become rows [begin, ...), in order. Grid: lists.
template <class = void>
__global__ void __launch_bounds__(kMoveThreads) close_up_kernel(Tables tables, int slot, RowList list, int begin, int end, int rows) {
  const int index = static_cast<int>(blockIdx.x), warp = static_cast<int>(threadIdx.x) / 32, at_once = min(kMoveThreads / 32, end - begin);
  const HeadTiles& layout = list == RowList::full ? tables.listed : tables.compressed[index];
  const std::int32_t* table = tables.page_table(list, slot, index);
  for (int first = end; first < rows; first += at_once) {
    const int from = first + warp, to = from - (end - begin);
    if (warp < at_once && from < rows) {
      const std::uint8_t* source = tables.tile(table, layout, from / layout.rows);
      std::uint8_t* target = tables.tile(table, layout, to / layout.rows);
      detail::move_row(layout, source, from % layout.rows, target, to % layout.rows);
    }
    __syncthreads();
  }
}

/// @brief Rows [end, length) of a tail become rows [begin, ...), their masses with them. Grid: heads; a thread has the same channels of all rows.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads) close_tail_kernel(Tables tables, int slot, int begin, int end) {
  const int head = static_cast<int>(blockIdx.x), dim = tables.head_dim, ring = tables.ring_rows();
  const DeviceLengths lengths = tables.lengths[slot];
  for (int row = end; row < lengths.tail_length; ++row) {
    const int from = (lengths.tail_first + row) % ring, to = (lengths.tail_first + row - (end - begin)) % ring;
    const std::uint8_t* source = tables.tail_tile(slot, head, from);
    std::uint8_t* target = tables.tail_tile(slot, head, to);
    for (int item = static_cast<int>(threadIdx.x); item < 2 * dim; item += kStoreThreads) {
      const Part part = item < dim ? Part::key : Part::value;
      *reinterpret_cast<std::uint16_t*>(target + tables.full.plain_byte(part, to % tables.full.rows, item % dim)) = *reinterpret_cast<const std::uint16_t*>(source + tables.full.plain_byte(part, from % tables.full.rows, item % dim));
    }
    if (tables.tail_masses != nullptr && threadIdx.x == 0) tables.tail_row_masses(slot, head)[to] = tables.tail_row_masses(slot, head)[from];
  }
}

/// @brief Segments after rows [begin, end) have gone; those that are left without a row go too. @param segment  gives the i-th of `count`, a reference; @param take  moves the second to the first
#pragma nv_exec_check_disable
template <class SegmentAt, class Take>
__host__ __device__ int close_segments(int count, int begin, int end, int rows, SegmentAt&& segment, Take&& take) {
  const auto moved = [&](int row) { return row <= begin ? row : row >= end ? row - (end - begin) : begin; };
  int kept = 0;
  for (int i = 0; i < count; ++i) {
    const int first = moved(segment(i).first_row), next = moved(i + 1 < count ? segment(i + 1).first_row : rows);
    if (first == next) continue;
    take(kept, i);
    segment(kept++).first_row = first;
  }
  return kept;
}

/// @brief close_segments() where the device alone knows them. One thread.
template <class = void>
__global__ void close_rolls_kernel(Tables tables, int slot, int begin, int end, int rows, RollLimits limits, RollState* states) {
  DeviceSegment* segments = tables.segments + slot * tables.max_segments;
  RollState& state = states[slot];
  tables.lengths[slot].num_segments = close_segments(
      tables.lengths[slot].num_segments, begin, end, rows, [&](int i) -> DeviceSegment& { return segments[i]; },
      [&](int to, int from) {
        segments[to] = segments[from];
        state.levels[to] = state.levels[from];
      });
  state.used = used_epochs(tables, slot, state.current, limits.slots_per_sequence);
}

/// @brief Adds the pages that remove_tokens() has to copy, since forks share them.
inline void demand_removal(const LayerState& layer, int slot, const RemovedRows& rows, PageDemand& demand) {
  for (const RowList list : {RowList::full, RowList::compressed}) {
    if (rows.count(list) > 0 && rows.end[static_cast<int>(list)] < layer.sequence(slot).num_rows(list)) layer.demand_writes(slot, list, rows.begin[static_cast<int>(list)], layer.sequence(slot).num_rows(list), demand);
  }
}

/// @brief Raises unless `count` tokens from `first` on can be removed. @param chosen  values decided which rows are stored how: the host does not know how many go
/// @throws ShapeError beyond the sequence, ValueError and CapacityError as of positions that move, StateError before the tail where rows were chosen
inline void check_removal(const LayerState& layer, const HostSequence& now, std::int64_t first, std::int64_t count, bool chosen) {
  using ::lowrankkv::detail::fail;
  const bool turns = layer.tables().rotary.turns();
  ::lowrankkv::detail::check_removal(now.shifts, now.num_tokens, first, count, turns ? farthest_shift(layer.config().max_tokens) : PositionShifts::kLimit);
  const std::int64_t first_tail = now.num_tokens - now.tail_length;
  if (chosen && count > 0 && first < first_tail) fail<StateError>("remove: from token ", first, " on, rows up to ", first_tail, " are stored as their values decided; at least that expected on this backend");
  PositionShifts left = now.shifts;
  left.remove(first, count);
  if (turns && left.pieces().size() > kMaxShifts) fail<CapacityError>("remove: positions in ", left.pieces().size(), " pieces, at most ", kMaxShifts, " on this backend");
}

/// @brief Removes the tokens [first, first + count), dropped ones among them. Pages were checked (demand_removal).
template <class = void>
void remove_tokens(LayerState& layer, int slot, std::int64_t first, std::int64_t count, cudaStream_t stream) {
  HostSequence& now = layer.sequence(slot);
  const RemovedRows rows = RemovedRows::of(now, first, count);
  const Tables& tables = layer.tables();
  if (rows.tail_begin < rows.tail_end && rows.tail_end < now.tail_length) {
    close_tail_kernel<><<<static_cast<unsigned>(tables.num_heads), kStoreThreads, 0, stream>>>(tables, slot, rows.tail_begin, rows.tail_end);
    check(cudaGetLastError(), "close_tail_kernel");
  }
  for (const RowList list : {RowList::full, RowList::compressed}) {
    const int which = static_cast<int>(list), begin = rows.begin[which], end = rows.end[which], stored = static_cast<int>(now.num_rows(list));
    if (end == begin) continue;
    if (end < stored) {
      layer.own_pages(slot, list, begin, stored, stream);
      close_up_kernel<><<<static_cast<unsigned>(layer.num_lists(list)), kMoveThreads, 0, stream>>>(tables, slot, list, begin, end, stored);
      check(cudaGetLastError(), "close_up_kernel");
    }
    if (list == RowList::full) {
      now.rows.num_full -= end - begin;
      continue;
    }
    now.rows.num_compressed -= end - begin;
    if (layer.rolls().rolls()) {
      close_rolls_kernel<><<<1, 1, 0, stream>>>(tables, slot, begin, end, stored, layer.rolls().limits(), layer.rolls().states());
      check(cudaGetLastError(), "close_rolls_kernel");
    } else {
      std::vector<Segment>& segments = now.epochs.segments;
      const int kept = close_segments(
          static_cast<int>(segments.size()), begin, end, stored, [&](int i) -> Segment& { return segments[static_cast<std::size_t>(i)]; },
          [&](int to, int from) { segments[static_cast<std::size_t>(to)] = segments[static_cast<std::size_t>(from)]; });
      segments.resize(static_cast<std::size_t>(kept));
    }
  }
  now.tail_length -= rows.tail_end - rows.tail_begin;
  now.num_tokens -= count;
  now.shifts.remove(first, count);
  layer.rotary().write_shifts(slot, now.shifts, stream);
  layer.settle(slot, stream);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
