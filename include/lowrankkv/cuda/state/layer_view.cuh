// SPDX-License-Identifier: Apache-2.0
/// @file cuda/state/layer_view.cuh  Device descriptors of a layer: lengths, row counts, page
/// tables, segments and tails. Their capacity is fixed and they never move.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "lowrankkv/core/descriptors.hpp"
#include "lowrankkv/cuda/maps/head_maps.cuh"
#include "lowrankkv/cuda/maps/rope.cuh"
#include "lowrankkv/cuda/runtime/device.cuh"
#include "lowrankkv/cuda/tiles/tile_layout.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kMaxBatch = 256;  ///< sequences of one launch; larger batches take several
inline constexpr int kMaxEdits = 400;  ///< page-table entries written by one launch

/// Most segments of a sequence: 16 epochs of its own, the calibrated epoch, and one that is being
/// merged.
inline constexpr int kMaxSegments = 18;

/// @brief Lengths of one sequence on the device. The tail is a ring buffer of rows.
struct DeviceLengths {
  std::int32_t tail_first = 0;  ///< index of the oldest row in the ring
  std::int32_t tail_length = 0;
  std::int32_t num_segments = 0;
  std::int32_t tail_position = 0;  ///< token position of the oldest row of the tail
};

/// @brief Number of rows of one of a head's lists.
__host__ __device__ constexpr std::int32_t rows_in(const HeadRows& rows, RowList list) {
  return list == RowList::full ? rows.num_full : rows.num_compressed;
}

/// @brief The rows of a head's compressed list that one epoch wrote: from first_row to the next
/// segment or the end of the list. All heads have segments of the same epochs. After heads have
/// lost different rows, a segment may be empty in some heads.
struct DeviceSegment {
  std::int32_t epoch = 0;  ///< in LayerView::maps
  std::int32_t first_row = 0;
};

/// @brief A segment resolved for a kernel: rows [begin, end) of the list, read in splits
/// [first_split, first_split + splits) of the list.
struct SegmentRows {
  int epoch = 0, begin = 0, end = 0, first_split = 0, splits = 0;
};

/// @brief Pointers to the descriptor arrays, the pages and the tails of a layer. Passed to kernels
/// by value.
/// @tparam edits  whether stored data may be written. Kernels take a LayerView, or a LayerEdit if
/// they change what is stored
template <bool edits>
struct LayerTables {
  template <class Element>
  using Pointer = std::conditional_t<edits, Element*, const Element*>;

  Pointer<DeviceLengths> lengths = nullptr;  ///< [slots]
  Pointer<HeadRows> rows = nullptr;          ///< [slots, heads]
  Pointer<std::int32_t> pages[2] = {};  ///< page tables by RowList: [slots, num_lists, max_pages]
  std::int32_t max_pages[2] = {};
  Pointer<std::uint32_t> faults = nullptr;  ///< counts rows that were not finite
  Pointer<std::uint8_t> pool = nullptr;
  std::uint64_t page_bytes = 0;
  Pointer<std::uint8_t> tails = nullptr;  ///< [slots, heads, tail_tiles] plain tiles
  std::int32_t tail_tiles = 0;
  std::int32_t num_heads = 0, head_dim = 0;
  /// Number of compressed lists: one per head; with joint values, one more per group of heads,
  /// after those of the heads.
  std::int32_t num_lists = 0;
  std::int32_t joint_heads = 0;  ///< heads of a group whose values are one latent; 0: none
  DType full_type = DType::f16;
  HeadTiles full;                         ///< of tails and of packed prompts
  HeadTiles listed;                       ///< of full rows in pages: as `full`, or in 8 bits
  const HeadTiles* compressed = nullptr;  ///< [num_lists]
  /// [epochs, heads]: the calibrated maps first, then those of the slots' own epochs.
  const HeadMaps* maps = nullptr;
  /// [heads]: metrics of errors, for policies that need errors. A part without an encoder has the
  /// plain metric.
  const HeadMaps* metrics = nullptr;
  /// By RowList: [slots, heads, max_rows], token positions of rows, if policies choose or drop
  /// rows. Ascending, unless the list is scored. Null: the order of positions is full list,
  /// compressed list, tail.
  Pointer<std::int32_t> positions[2] = {};
  std::int32_t max_rows[2] = {};
  /// By RowList: [slots, heads, max_rows], accumulated attention scores of the rows of scored
  /// lists. Rows are evicted by them, and others take their places.
  Pointer<float> accumulated_scores[2] = {};
  /// By RowList: [slots, heads, max_rows], if residuals are kept: upper bounds of what compression
  /// lost of a row, as f16; of its key in the lower half, of its value in the upper half.
  Pointer<std::uint32_t> residuals[2] = {};
  /// [slots, heads], if residuals are kept: an upper bound of the norms of all values that have
  /// left the tail.
  Pointer<float> largest_values = nullptr;
  /// The list whose rows are kept by accumulated score. Where errors choose full rows among the
  /// rows kept by score, the full list is scored too.
  RowList scored = RowList::full;
  /// [slots, heads, ring_rows()], accumulated scores of the tail's rows by index in the ring; null
  /// if rows have no scores.
  Pointer<float> tail_scores = nullptr;
  /// [slots, heads, max_segments]; null if the calibrated epoch is the only one.
  Pointer<DeviceSegment> segments = nullptr;
  std::int32_t max_segments = 1;
  Rotary rotary;  ///< of pre-RoPE keys; else empty

  __device__ int index(int slot, int head) const { return slot * num_heads + head; }
  __host__ __device__ int ring_rows() const { return tail_tiles * full.rows; }
  /// @brief The tile of a tail that holds index `place` of its ring.
  __device__ Pointer<std::uint8_t> tail_tile(int slot, int head, int place) const {
    return tail(slot, head) +
           static_cast<std::size_t>(place / full.rows) * static_cast<std::size_t>(full.bytes);
  }
  __device__ Pointer<std::uint8_t> tail(int slot, int head) const {
    return tails + static_cast<std::size_t>(index(slot, head)) *
                       static_cast<std::size_t>(tail_tiles) * static_cast<std::size_t>(full.bytes);
  }
  /// @brief Page table of a list. @param index  of the head, or of the compressed list
  __device__ const std::int32_t* page_table(RowList list, int slot, int index) const {
    const int which = static_cast<int>(list);
    return pages[which] + static_cast<std::size_t>(slot * num_lists + index) *
                              static_cast<std::size_t>(max_pages[which]);
  }
  __device__ int num_rows(RowList list, int slot, int head) const {
    return rows_in(rows[index(slot, head)], list);
  }
  /// @brief Positions of the rows of a list; null if they are not kept.
  __device__ Pointer<std::int32_t> row_positions(RowList list, int slot, int head) const {
    const int which = static_cast<int>(list);
    return positions[which] == nullptr
               ? nullptr
               : positions[which] + static_cast<std::size_t>(index(slot, head)) *
                                        static_cast<std::size_t>(max_rows[which]);
  }
  /// @brief Residuals of the rows of a list, which must be kept.
  __device__ Pointer<std::uint32_t> row_residuals(RowList list, int slot, int head) const {
    const int which = static_cast<int>(list);
    return residuals[which] +
           static_cast<std::size_t>(index(slot, head)) * static_cast<std::size_t>(max_rows[which]);
  }
  /// @brief Whether a list is scored.
  __host__ __device__ bool has_scores(RowList list) const {
    return accumulated_scores[static_cast<int>(list)] != nullptr;
  }
  /// @brief Whether rows of both lists are kept by accumulated score. Errors decide which of the
  /// two lists a row is in.
  __host__ __device__ bool scores_both() const {
    return has_scores(RowList::full) && has_scores(RowList::compressed);
  }
  /// @brief Number of a head's rows in scored lists.
  __host__ __device__ std::int32_t scored_rows(const HeadRows& own) const {
    return (has_scores(RowList::full) ? own.num_full : 0) +
           (has_scores(RowList::compressed) ? own.num_compressed : 0);
  }
  /// @brief Accumulated scores of the rows of a list, which must be scored.
  __device__ Pointer<float> row_scores(RowList list, int slot, int head) const {
    const int which = static_cast<int>(list);
    return accumulated_scores[which] +
           static_cast<std::size_t>(index(slot, head)) * static_cast<std::size_t>(max_rows[which]);
  }
  /// @brief Accumulated scores of the tail's rows, by index in the ring. Some list must be scored.
  __device__ Pointer<float> tail_row_scores(int slot, int head) const {
    return tail_scores +
           static_cast<std::size_t>(index(slot, head)) * static_cast<std::size_t>(ring_rows());
  }
  /// @brief Number of segments of a compressed list with so many rows.
  __device__ int num_segments(int slot, int list_rows) const {
    return max_segments == 1 ? (list_rows > 0 ? 1 : 0) : lengths[slot].num_segments;
  }
  /// @brief The lengths[slot].num_segments segments of a head. Needs max_segments > 1.
  __device__ Pointer<DeviceSegment> segments_of(int slot, int head) const {
    return segments + index(slot, head) * max_segments;
  }
  /// @brief Segment `index`, which must exist, of a compressed list with so many rows. Its splits
  /// begin at `first_split`.
  __device__ SegmentRows segment(int slot, int head, int list_rows, int index,
                                 int first_split) const {
    if (max_segments == 1) return {0, 0, list_rows, 0, splits_of(list_rows)};
    const DeviceSegment* own = segments_of(slot, head) + index;
    const int begin = own->first_row,
              end = index + 1 < lengths[slot].num_segments ? own[1].first_row : list_rows;
    return {own->epoch, begin, end, first_split, segment_splits(end - begin, list_rows)};
  }
  /// @brief Number of splits of all segments of a compressed list with so many rows.
  __device__ int list_splits(int slot, int head, int list_rows) const {
    int splits = 0;
    for (int i = 0; i < num_segments(slot, list_rows); ++i)
      splits += segment(slot, head, list_rows, i, splits).splits;
    return splits;
  }
  /// @brief Finds the segment of a compressed list that contains split `split`, and sets `index` to
  /// its number. For a split beyond the last one, returns a segment that ends before it.
  __device__ SegmentRows segment_of_split(int slot, int head, int list_rows, int split,
                                          int& index) const {
    SegmentRows range;
    for (index = 0; index < num_segments(slot, list_rows); ++index) {
      range = segment(slot, head, list_rows, index, range.first_split + range.splits);
      if (split < range.first_split + range.splits) break;
    }
    return range;
  }
  /// @brief The maps under which rows of a sequence are written now: those of its last segment, or
  /// the calibrated maps if it has no segment.
  __device__ const HeadMaps& current_maps(int slot, int head) const {
    const int count = max_segments == 1 ? 0 : lengths[slot].num_segments,
              epoch = count == 0 ? 0 : segments_of(slot, head)[count - 1].epoch;
    return maps[epoch * num_heads + head];
  }
  /// @brief Tile `tile` of a list with the given page table and layout.
  __device__ Pointer<std::uint8_t> tile(const std::int32_t* table, const HeadTiles& layout,
                                        int tile) const {
    const std::size_t page = static_cast<std::size_t>(table[tile / layout.tiles_per_page]);
    return pool + page * page_bytes +
           static_cast<std::size_t>(tile % layout.tiles_per_page) *
               static_cast<std::size_t>(layout.bytes);
  }

  /// @brief A LayerEdit converts to a LayerView.
  template <bool written = false>
  requires(edits && !written) operator LayerTables<written>() const {
    LayerTables<false> view;
    view.lengths = lengths;
    view.rows = rows;
    for (int list = 0; list < 2; ++list) {
      view.pages[list] = pages[list];
      view.max_pages[list] = max_pages[list];
      view.positions[list] = positions[list];
      view.max_rows[list] = max_rows[list];
      view.accumulated_scores[list] = accumulated_scores[list];
      view.residuals[list] = residuals[list];
    }
    view.faults = faults;
    view.pool = pool;
    view.page_bytes = page_bytes;
    view.tails = tails;
    view.tail_tiles = tail_tiles;
    view.num_heads = num_heads;
    view.head_dim = head_dim;
    view.num_lists = num_lists;
    view.joint_heads = joint_heads;
    view.full_type = full_type;
    view.full = full;
    view.listed = listed;
    view.compressed = compressed;
    view.maps = maps;
    view.metrics = metrics;
    view.largest_values = largest_values;
    view.scored = scored;
    view.tail_scores = tail_scores;
    view.segments = segments;
    view.max_segments = max_segments;
    view.rotary = rotary;
    return view;
  }
};

/// @brief A layer that kernels only read.
using LayerView = LayerTables<false>;
/// @brief A layer that kernels may change.
using LayerEdit = LayerTables<true>;

namespace detail {

/// The first index i with number(i) > wanted, among `count` ascending numbers; `count` if there is
/// none.
template <class Number>
__device__ int upper_bound(int count, int wanted, Number&& number) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (number(middle) <= wanted)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

/// The token position of a row of a list.
template <bool edits>
__device__ int position_of(const LayerTables<edits>& tables, RowList list, int slot, int head,
                           const HeadRows& lists, int row) {
  const std::int32_t *own = tables.row_positions(list, slot, head),
                     *full = tables.row_positions(RowList::full, slot, head);
  if (own != nullptr) return own[row];
  if (list == RowList::full) return row;
  if (full == nullptr) return lists.num_full + row;
  return row + upper_bound(lists.num_full, row,
                           [&](int i) { return full[i] - i; });  // full rows before it
}

}  // namespace detail

/// @brief The rows of a head's scored lists: full rows, then compressed rows.
template <bool edits>
class ScoredRows {
 public:
  __device__ ScoredRows(const LayerTables<edits>& tables, int slot, int head)
      : full_(0), count_(tables.scored_rows(tables.rows[tables.index(slot, head)])) {
    for (const RowList list : {RowList::full, RowList::compressed}) {
      if (!tables.has_scores(list)) continue;
      accumulated_scores_[static_cast<int>(list)] = tables.row_scores(list, slot, head);
      positions_[static_cast<int>(list)] = tables.row_positions(list, slot, head);
    }
    if (tables.has_scores(RowList::full)) full_ = tables.num_rows(RowList::full, slot, head);
  }
  __device__ int count() const { return count_; }
  /// @brief Number of full rows among them.
  __device__ int full() const { return full_; }
  __device__ std::conditional_t<edits, float&, float> accumulated(int row) const {
    return row < full_ ? accumulated_scores_[0][row] : accumulated_scores_[1][row - full_];
  }
  __device__ std::int32_t position(int row) const {
    return row < full_ ? positions_[0][row] : positions_[1][row - full_];
  }
  /// @brief Number of these rows at positions before `pinned`. They stay in any case, and displace
  /// no other row. All threads of a block call it.
  __device__ int pinned_among(int pinned) const {
    int found = 0;
    for (int base = 0; base < count_ && pinned > 0; base += static_cast<int>(blockDim.x)) {
      const int row = base + static_cast<int>(threadIdx.x);
      found += __syncthreads_count(row < count_ && position(row) < pinned ? 1 : 0);
    }
    return found;
  }

 private:
  int full_, count_;
  typename LayerTables<edits>::template Pointer<float> accumulated_scores_[2] = {};
  const std::int32_t* positions_[2] = {};
};

/// @brief Iterates over every step-th tile of a list, without a division per tile.
class PageWalk {
 public:
  template <bool edits>
  __device__ PageWalk(const LayerTables<edits>& tables, const std::int32_t* table,
                      const HeadTiles& layout, int tile)
      : pool_(tables.pool),
        page_bytes_(tables.page_bytes),
        table_(table),
        tiles_per_page_(layout.tiles_per_page),
        bytes_(layout.bytes) {
    seek(tile);
  }
  /// @brief Moves to a tile.
  __device__ void seek(int tile) {
    page_ = tile / tiles_per_page_;
    tile_ = tile % tiles_per_page_;
  }
  /// @brief Returns the current tile, which must exist, and moves on by `step` tiles.
  __device__ __forceinline__ const std::uint8_t* next(int step) {
    const std::uint8_t* here = pool_ + static_cast<std::size_t>(table_[page_]) * page_bytes_ +
                               static_cast<std::size_t>(tile_) * static_cast<std::size_t>(bytes_);
    for (tile_ += step; tile_ >= tiles_per_page_; tile_ -= tiles_per_page_) ++page_;
    return here;
  }

 private:
  const std::uint8_t* pool_;
  std::uint64_t page_bytes_;
  const std::int32_t* table_;
  int tiles_per_page_, bytes_, page_, tile_;
};

/// @brief The sequences of a launch: their slots come with it, or are in device memory, where -1
/// stands for no sequence.
struct Batch {
  std::int32_t count = 0;
  std::int32_t slots[kMaxBatch];
  const std::int32_t* on_device = nullptr;  ///< [count] instead of `slots`; null: none

  /// @brief The slot of a sequence of the launch; negative: there is none.
  __device__ std::int32_t slot(unsigned index) const {
    return on_device == nullptr ? slots[index] : on_device[index];
  }
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
