// SPDX-License-Identifier: Apache-2.0
/// @file cuda/state/upload.cuh  Kernels that write a sequence's descriptors as the host decided
/// them: page tables, lengths, segments, row counts. All data is passed by value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lowrankkv/cuda/state/layer_view.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Page-table entries to be written, all of one RowList.
struct PageEdits {
  std::int32_t count = 0;
  std::int32_t list = 0;
  std::int32_t index[kMaxEdits];
  std::int32_t page[kMaxEdits];
};

/// @brief Writes entries of a page table.
template <class = void>
__global__ void write_pages_kernel(LayerEdit tables, PageEdits edits) {
  for (int i = static_cast<int>(threadIdx.x); i < edits.count; i += static_cast<int>(blockDim.x))
    tables.pages[edits.list][edits.index[i]] = edits.page[i];
}

/// @brief Pages to be copied (copy on write): sequences write only to pages of their own.
struct PageCopies {
  std::int32_t count = 0;
  std::int32_t from[kMaxEdits];
  std::int32_t to[kMaxEdits];
};

/// @brief Copies pages of the pool. Grid: pages.
template <class = void>
__global__ void copy_pages_kernel(LayerEdit tables, PageCopies copies) {
  const uint4* from = reinterpret_cast<const uint4*>(
      tables.pool + static_cast<std::size_t>(copies.from[blockIdx.x]) * tables.page_bytes);
  uint4* to = reinterpret_cast<uint4*>(
      tables.pool + static_cast<std::size_t>(copies.to[blockIdx.x]) * tables.page_bytes);
  for (std::uint64_t i = threadIdx.x; i < tables.page_bytes / sizeof(uint4); i += blockDim.x)
    to[i] = from[i];
}

/// @brief Segments of a sequence with the first rows of its first head, passed to a kernel by
/// value. A count of -1: the segments on the device stay.
struct SegmentList {
  std::int32_t count = 0;
  DeviceSegment items[kMaxSegments];
};

/// @brief Sets the lengths and the segments of one sequence, the same in all heads. The tail keeps
/// its oldest rows where they are, and loses the newest. That of an empty sequence begins where the
/// ring does, whoever had the slot before: sums over a tail have the order of its ring. One block.
template <class = void>
__global__ void write_lengths_kernel(LayerEdit tables, int slot, std::int32_t tail_length,
                                     std::int32_t tail_position, HeadRows rows,
                                     SegmentList segments) {
  if (threadIdx.x == 0) {
    tables.lengths[slot].tail_length = tail_length;
    tables.lengths[slot].tail_position = tail_position;
    if (tail_length == 0 && tail_position == 0) tables.lengths[slot].tail_first = 0;
    if (segments.count >= 0) tables.lengths[slot].num_segments = segments.count;
  }
  for (int head = static_cast<int>(threadIdx.x); head < tables.num_heads;
       head += static_cast<int>(blockDim.x)) {
    tables.rows[tables.index(slot, head)] = rows;
    for (int i = 0; i < segments.count; ++i) tables.segments_of(slot, head)[i] = segments.items[i];
  }
}

/// @brief First rows of the segments of some heads, passed to a kernel by value.
struct FirstRowsList {
  static constexpr int kMost = 32;
  std::int32_t first = 0, count = 0;  ///< heads
  std::int32_t segments = 0;
  std::int32_t rows[kMost][kMaxSegments];
};

/// @brief Sets the first rows of segments, for heads that differ from the first head. One block,
/// one thread per head.
template <class = void>
__global__ void write_first_rows_kernel(LayerEdit tables, int slot, FirstRowsList own) {
  const int head = static_cast<int>(threadIdx.x);
  for (int i = 0; head < own.count && i < own.segments; ++i)
    tables.segments_of(slot, own.first + head)[i].first_row = own.rows[head][i];
}

/// @brief Row counts of some heads, passed to a kernel by value.
struct HeadRowsList {
  static constexpr int kMost = 128;
  std::int32_t first = 0, count = 0;
  HeadRows items[kMost];
};

/// @brief Sets the row counts of heads that differ. One block, one thread per head.
template <class = void>
__global__ void write_rows_kernel(LayerEdit tables, int slot, HeadRowsList own) {
  const int head = static_cast<int>(threadIdx.x);
  if (head < own.count) tables.rows[tables.index(slot, own.first + head)] = own.items[head];
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
