// SPDX-License-Identifier: Apache-2.0
/// @file cuda/store/compaction/stable_compact.cuh  Stable compaction: rows behind a gap in their
/// list move up and keep their order.
///
/// Rows move by way of scratch memory, so that any number of rows can move at once. One kernel
/// copies their tiles out, the next puts the new tiles together; it copies whole tiles where the
/// gap is a number of whole tiles. Floor: the rows read and written once; this does so twice.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "lowrankkv/cuda/layer/layer_state.cuh"
#include "lowrankkv/cuda/store/compaction/place_rows.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// Scratch memory for the rows that move at a time, about, in bytes.
inline constexpr std::size_t kShiftBytes = std::size_t{32} << 20;
inline constexpr int kLeastShift = 256;  ///< rows of a list that move at a time, at least

/// @brief The gaps of some lists: rows [begin, end) of each list's `rows` rows are removed. Kernels
/// take it by value.
struct ListGaps {
  static constexpr int kMost = 128;
  std::int32_t first = 0, count = 0;  ///< of the lists: [first, first + count)
  std::int32_t begin[kMost], end[kMost], rows[kMost];

  /// @brief The number of rows behind a gap, the largest of all lists.
  int most_behind() const {
    int most = 0;
    for (int i = 0; i < count; ++i)
      most = begin[i] == end[i] ? most : (std::max)(most, rows[i] - end[i]);
    return most;
  }
};

/// @brief The rows that move at a time: of the rows behind each list's gap, [first, first + count).
struct RowShift {
  std::int32_t first = 0, count = 0;
  std::size_t stride = 0;           ///< bytes from a list's staged tiles to the next list's
  std::uint8_t* scratch = nullptr;  ///< the staged tiles
};

namespace detail {

/// One list's part of a RowShift.
struct ListShift {
  const HeadTiles& layout;
  const std::int32_t* table;
  std::uint8_t* tiles;         // the staged tiles
  int gap, from, until, rows;  // rows of the gap; source rows [from, until) of `rows`

  template <bool edits>
  __device__ ListShift(const LayerTables<edits>& tables, int slot, RowList list,
                       const ListGaps& gaps, int which, const RowShift& shift)
      : layout(list == RowList::full ? tables.listed : tables.compressed[gaps.first + which]),
        table(tables.page_table(list, slot, gaps.first + which)),
        tiles(shift.scratch + static_cast<std::size_t>(which) * shift.stride),
        gap(gaps.end[which] - gaps.begin[which]),
        from(gaps.end[which] + shift.first),
        until(min(gaps.rows[which], from + shift.count)),
        rows(gaps.rows[which]) {
    if (gap == 0) until = from;
  }
  /// The staged tile of a source row.
  __device__ const std::uint8_t* copied(int row) const {
    return tiles + static_cast<std::size_t>(row / layout.rows - from / layout.rows) *
                       static_cast<std::size_t>(layout.bytes);
  }
};

/// Copies a tile. All threads of the block call it.
__device__ inline void copy_tile(const HeadTiles& layout, const std::uint8_t* source,
                                 std::uint8_t* target) {
  for (int i = static_cast<int>(threadIdx.x); i < layout.bytes / 16;
       i += static_cast<int>(blockDim.x))
    reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(source)[i];
}

}  // namespace detail

/// @brief Copies the tiles that hold moving rows to scratch memory. Grid: tiles of a list x lists.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    copy_out_kernel(LayerView tables, int slot, RowList list, ListGaps gaps, RowShift shift) {
  const detail::ListShift own(tables, slot, list, gaps, static_cast<int>(blockIdx.y), shift);
  const int tile = own.from / own.layout.rows + static_cast<int>(blockIdx.x);
  if (own.from >= own.until || tile * own.layout.rows >= own.until) return;
  detail::copy_tile(own.layout, tables.tile(own.table, own.layout, tile),
                    own.tiles + static_cast<std::size_t>(blockIdx.x) *
                                    static_cast<std::size_t>(own.layout.bytes));
}

/// @brief Puts the rows of the staged tiles to their new places. Grid: tiles of a list x lists.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    stable_compact_kernel(LayerEdit tables, int slot, RowList list, ListGaps gaps, RowShift shift) {
  const detail::ListShift own(tables, slot, list, gaps, static_cast<int>(blockIdx.y), shift);
  const int tile_rows = own.layout.rows, begin = own.from - own.gap, end = own.until - own.gap,
            tile = begin / tile_rows + static_cast<int>(blockIdx.x);
  const int first = max(begin, tile * tile_rows), last = min(end, (tile + 1) * tile_rows);
  if (first >= last) return;
  std::uint8_t* const target = tables.tile(own.table, own.layout, tile);
  const bool complete = last == (tile + 1) * tile_rows ||
                        own.until == own.rows;  // nothing is stored behind the list's last row
  if (own.gap % tile_rows == 0 && first == tile * tile_rows && complete) {
    detail::copy_tile(own.layout, own.copied(first + own.gap), target);
    return;
  }
  for (int row = first + static_cast<int>(threadIdx.x) / 32; row < last;
       row += kStoreThreads / 32) {
    const int source = row + own.gap;
    detail::move_row(own.layout, own.copied(source), source % tile_rows, target, row % tile_rows);
  }
}

/// @brief How many rows behind the gaps of lists move at a time: as many as kShiftBytes hold, but
/// at least kLeastShift. RowShift::scratch stays null.
inline RowShift shift_of(const LayerState& layer, RowList list, const ListGaps& gaps) {
  std::size_t row_bytes = 1;  // of the largest list
  for (int i = 0; i < gaps.count; ++i) {
    const HeadTiles& layout = layer.layout(list, gaps.first + i);
    row_bytes = (std::max)(row_bytes, static_cast<std::size_t>(layout.bytes / layout.rows));
  }
  const std::int64_t most = (gaps.most_behind() + kStoreRows - 1) / kStoreRows * kStoreRows,
                     wanted =
                         static_cast<std::int64_t>(
                             kShiftBytes / (static_cast<std::size_t>(gaps.count) * row_bytes)) /
                         kStoreRows * kStoreRows;
  RowShift shift;
  shift.count =
      static_cast<std::int32_t>((std::min)((std::max)(wanted, std::int64_t{kLeastShift}), most));
  // At both ends the tiles hold other rows too.
  shift.stride = (static_cast<std::size_t>(shift.count) + 2 * kStoreRows) * row_bytes;
  return shift;
}

/// @brief Reserves the scratch memory of stable_compact(). If there was less, allocates it and
/// waits.
inline void reserve_stable_compact(const LayerState& layer, RowList list, const ListGaps& gaps) {
  if (gaps.most_behind() > 0)
    layer.pool().scratch(static_cast<std::size_t>(gaps.count) * shift_of(layer, list, gaps).stride);
}

/// @brief Enqueues the moves that make rows [end, rows) of each list rows [begin, ...). The caller
/// has reserved scratch memory (reserve_stable_compact()), and the pages are the sequence's own.
template <class = void>
void stable_compact(const LayerState& layer, int slot, RowList list, const ListGaps& gaps,
                    cudaStream_t stream) {
  const int most = gaps.most_behind();
  if (most == 0) return;
  RowShift shift = shift_of(layer, list, gaps);
  shift.scratch = layer.pool().scratch(static_cast<std::size_t>(gaps.count) * shift.stride);
  int tile_rows = kStoreRows;  // the fewest
  for (int i = 0; i < gaps.count; ++i)
    tile_rows = (std::min)(tile_rows, static_cast<int>(layer.layout(list, gaps.first + i).rows));
  const dim3 grid(static_cast<unsigned>(shift.count / tile_rows + 1),
                  static_cast<unsigned>(gaps.count));
  for (; shift.first < most; shift.first += shift.count) {
    copy_out_kernel<><<<grid, kStoreThreads, 0, stream>>>(layer.tables(), slot, list, gaps, shift);
    check(cudaGetLastError(), "copy_out_kernel");
    stable_compact_kernel<>
        <<<grid, kStoreThreads, 0, stream>>>(layer.tables(), slot, list, gaps, shift);
    check(cudaGetLastError(), "stable_compact_kernel");
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
