// SPDX-License-Identifier: Apache-2.0
/// @file cuda/store/compaction/stable_compact.cuh  Rows behind a gap in their list move up, in
/// order.
///
/// By way of scratch memory, since any number of them may be moved at once then: their tiles are
/// copied out, and new ones put together, whole where the gap is one of whole tiles. Floor: the
/// rows read and written once; this does so twice.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "lowrankkv/cuda/layer/layer_state.cuh"
#include "lowrankkv/cuda/store/compaction/place_rows.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr std::size_t kShiftBytes =
    std::size_t{32} << 20;               ///< of scratch memory for rows on their way, about
inline constexpr int kLeastShift = 256;  ///< rows of a list that are moved at once in any case

/// @brief What goes of some lists, given to a kernel by value: rows [begin, end) of so many.
struct ListCuts {
  static constexpr int kMost = 128;
  std::int32_t first = 0, count = 0;  ///< lists
  std::int32_t begin[kMost], end[kMost], rows[kMost];

  /// @brief The most rows that stand behind a gap.
  int most_behind() const {
    int most = 0;
    for (int i = 0; i < count; ++i)
      most = begin[i] == end[i] ? most : (std::max)(most, rows[i] - end[i]);
    return most;
  }
};

/// @brief Some of the rows behind the gaps of lists: the `first`-th and so many after it, and where
/// they are on their way.
struct RowShift {
  std::int32_t first = 0, count = 0;
  std::size_t stride = 0;  ///< bytes, from a list's tiles to the next one's
  std::uint8_t* scratch = nullptr;
};

namespace detail {

/// One list's part of a shift.
struct ListShift {
  const HeadTiles& layout;
  const std::int32_t* table;
  std::uint8_t* tiles;         // on their way
  int gap, from, until, rows;  // source rows [from, until) of so many

  __device__ ListShift(const LayerView& tables, int slot, RowList list, const ListCuts& cuts,
                       int which, const RowShift& shift)
      : layout(list == RowList::full ? tables.listed : tables.compressed[cuts.first + which]),
        table(tables.page_table(list, slot, cuts.first + which)),
        tiles(shift.scratch + static_cast<std::size_t>(which) * shift.stride),
        gap(cuts.end[which] - cuts.begin[which]),
        from(cuts.end[which] + shift.first),
        until(min(cuts.rows[which], from + shift.count)),
        rows(cuts.rows[which]) {
    if (gap == 0) until = from;
  }
  __device__ const std::uint8_t* copied(int row) const {
    return tiles + static_cast<std::size_t>(row / layout.rows - from / layout.rows) *
                       static_cast<std::size_t>(layout.bytes);
  }
};

/// A block copies a tile.
__device__ inline void copy_tile(const HeadTiles& layout, const std::uint8_t* source,
                                 std::uint8_t* target) {
  for (int i = static_cast<int>(threadIdx.x); i < layout.bytes / 16;
       i += static_cast<int>(blockDim.x))
    reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(source)[i];
}

}  // namespace detail

/// @brief Copies tiles with rows that move to scratch memory. Grid: tiles of a list x lists.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    copy_out_kernel(LayerView tables, int slot, RowList list, ListCuts cuts, RowShift shift) {
  const detail::ListShift own(tables, slot, list, cuts, static_cast<int>(blockIdx.y), shift);
  const int tile = own.from / own.layout.rows + static_cast<int>(blockIdx.x);
  if (own.from >= own.until || tile * own.layout.rows >= own.until) return;
  detail::copy_tile(own.layout, tables.tile(own.table, own.layout, tile),
                    own.tiles + static_cast<std::size_t>(blockIdx.x) *
                                    static_cast<std::size_t>(own.layout.bytes));
}

/// @brief Puts the rows of those tiles where they go. Grid: tiles of a list x lists.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    stable_compact_kernel(LayerEdit tables, int slot, RowList list, ListCuts cuts, RowShift shift) {
  const detail::ListShift own(tables, slot, list, cuts, static_cast<int>(blockIdx.y), shift);
  const int tile_rows = own.layout.rows, begin = own.from - own.gap, end = own.until - own.gap,
            tile = begin / tile_rows + static_cast<int>(blockIdx.x);
  const int first = max(begin, tile * tile_rows), last = min(end, (tile + 1) * tile_rows);
  if (first >= last) return;
  std::uint8_t* const target = tables.tile(own.table, own.layout, tile);
  const bool complete = last == (tile + 1) * tile_rows ||
                        own.until == own.rows;  // behind the list's last row is nothing
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

/// @brief How the rows behind the gaps of lists are moved: as many at a time as kShiftBytes hold.
/// Scratch memory is left out.
inline RowShift shift_of(const LayerState& layer, RowList list, const ListCuts& cuts) {
  std::size_t row_bytes = 1;  // of the largest list
  for (int i = 0; i < cuts.count; ++i) {
    const HeadTiles& layout = layer.layout(list, cuts.first + i);
    row_bytes = (std::max)(row_bytes, static_cast<std::size_t>(layout.bytes / layout.rows));
  }
  const std::int64_t most = (cuts.most_behind() + kStoreRows - 1) / kStoreRows * kStoreRows,
                     wanted =
                         static_cast<std::int64_t>(
                             kShiftBytes / (static_cast<std::size_t>(cuts.count) * row_bytes)) /
                         kStoreRows * kStoreRows;
  RowShift shift;
  shift.count =
      static_cast<std::int32_t>((std::min)((std::max)(wanted, std::int64_t{kLeastShift}), most));
  shift.stride = (static_cast<std::size_t>(shift.count) + 2 * kStoreRows) *
                 row_bytes;  // tiles that rows share at both ends
  return shift;
}

/// @brief Makes sure of the scratch memory that stable_compact() takes. Allocates it, and waits
/// then, if there was less.
inline void reserve_stable_compact(const LayerState& layer, RowList list, const ListCuts& cuts) {
  if (cuts.most_behind() > 0)
    layer.pool().scratch(static_cast<std::size_t>(cuts.count) * shift_of(layer, list, cuts).stride);
}

/// @brief Enqueues what makes rows [end, rows) of lists rows [begin, ...). Scratch memory was made
/// sure of (reserve_stable_compact). Pages are the sequence's own.
template <class = void>
void stable_compact(const LayerState& layer, int slot, RowList list, const ListCuts& cuts,
                    cudaStream_t stream) {
  const int most = cuts.most_behind();
  if (most == 0) return;
  RowShift shift = shift_of(layer, list, cuts);
  shift.scratch = layer.pool().scratch(static_cast<std::size_t>(cuts.count) * shift.stride);
  int tile_rows = kStoreRows;  // the fewest
  for (int i = 0; i < cuts.count; ++i)
    tile_rows = (std::min)(tile_rows, static_cast<int>(layer.layout(list, cuts.first + i).rows));
  const dim3 grid(static_cast<unsigned>(shift.count / tile_rows + 1),
                  static_cast<unsigned>(cuts.count));
  for (; shift.first < most; shift.first += shift.count) {
    copy_out_kernel<><<<grid, kStoreThreads, 0, stream>>>(layer.tables(), slot, list, cuts, shift);
    check(cudaGetLastError(), "copy_out_kernel");
    stable_compact_kernel<>
        <<<grid, kStoreThreads, 0, stream>>>(layer.tables(), slot, list, cuts, shift);
    check(cudaGetLastError(), "stable_compact_kernel");
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
