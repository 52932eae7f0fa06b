// SPDX-License-Identifier: Apache-2.0
/// @file cuda/state/row_order.cuh  Flush batches: how many rows are flushed, in which order they
/// are stored, and which stored rows move.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lowrankkv/core/descriptors.hpp"
#include "lowrankkv/cuda/state/layer_view.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief The rows that several sequences flush, oldest first. A sequence stores `full` of its rows
/// in the full list and `compressed` in the compressed list, and drops the others.
struct FlushBatch {
  std::int32_t count = 0;
  std::int32_t slots[kMaxBatch];
  std::int32_t rows[kMaxBatch];
  std::int32_t full[kMaxBatch];        ///< RowCounts::full
  std::int32_t compressed[kMaxBatch];  ///< RowCounts::compressed: of a head, at most
  /// The oldest of the full rows: those that are full whatever their values.
  std::int32_t pinned[kMaxBatch];
  std::int32_t position[kMaxBatch];  ///< of the oldest flushed row
  std::int32_t limit[kMaxBatch];     ///< RowCounts::limit

  /// @brief Rows of a head that are added to a list. For a scored list: the candidates, of which
  /// scores choose.
  __host__ __device__ std::int32_t offered(RowList list, int sequence) const {
    return list == RowList::full ? full[sequence] : compressed[sequence];
  }
  /// @brief Number of rows by which a list grows.
  /// @param scored  the list whose rows are kept by accumulated score
  /// @param stored  rows that the list has
  __host__ __device__ std::int32_t added(RowList list, RowList scored, int sequence,
                                         std::int32_t stored) const {
    const std::int32_t most = offered(list, sequence),
                       room = limit[sequence] > stored ? limit[sequence] - stored : 0;
    return limit[sequence] < 0 || list != scored || most < room ? most : room;
  }
  /// @brief Rows of a sequence that may be compressed: neither pinned, nor dropped by counts or
  /// scores.
  __host__ __device__ std::int32_t candidates(int sequence) const {
    return full[sequence] + compressed[sequence] - pinned[sequence];
  }
};

/// @brief Moves of rows within the lists of several sequences, segment after segment. All arrays
/// are [sequence of the batch, head, stride]. The places of a segment become free only when the
/// moves of the segment before it are done.
struct RowMoves {
  std::int32_t* from = nullptr;
  std::int32_t* to = nullptr;
  /// [sequence of the batch, head, segments]: where the moves of every segment end.
  std::int32_t* ends = nullptr;
  std::int32_t stride = 0;
  std::int32_t segments = 1;  ///< most segments of a sequence

  /// @brief The moves of one list. @param list  sequence of the batch x heads + head
  __host__ __device__ RowMoves of(int list) const {
    return {from + static_cast<std::ptrdiff_t>(list) * stride,
            to + static_cast<std::ptrdiff_t>(list) * stride, ends + list * segments, stride,
            segments};
  }
};

/// @brief The moves of both lists, by RowList. A list that is not scored has none.
struct ListMoves {
  RowMoves lists[2];
};

/// @brief Which flushed rows go to a list, in order: [sequence of the batch, head, stride] row
/// numbers of the source, chosen by policies that decide by values. Null: the rows of the full list
/// come first, in their order, then the others.
struct RowOrder {
  const std::int32_t* rows = nullptr;
  std::int32_t stride = 0;
  /// [sequence of the batch, head, parts]: where the parts of every order end
  /// (cuda/compress/prompt_parts.cuh). Only part `part` is active. There is one part where heads
  /// have different numbers of rows. Null: the host's counts apply.
  const std::int32_t* ends = nullptr;
  std::int32_t parts = 0, part = 0;

  /// @brief The order of a head; null if there is none.
  __device__ const std::int32_t* of(int sequence, int heads, int head) const {
    return rows == nullptr
               ? nullptr
               : rows + (static_cast<std::size_t>(sequence) * static_cast<std::size_t>(heads) +
                         static_cast<std::size_t>(head)) *
                            static_cast<std::size_t>(stride);
  }
  /// @brief The active range [x, y) of a head's order. @param count  the host's count, used if
  /// `ends` is null
  __device__ int2 active(int sequence, int heads, int head, int count) const {
    if (ends == nullptr) return {0, count};
    const std::int32_t* own = ends + (sequence * heads + head) * parts + part;
    return {part == 0 ? 0 : own[-1], own[0]};
  }
  /// @brief The orders of the batch's sequences from `sequence` on.
  RowOrder from(int sequence, int heads) const {
    RowOrder some = *this;
    if (rows != nullptr) some.rows += static_cast<std::ptrdiff_t>(sequence) * heads * stride;
    if (ends != nullptr) some.ends += sequence * heads * parts;
    return some;
  }
};

/// @brief Tiles outside of pages, of new rows that will take the places of evicted rows
/// (cuda/store/compaction/place_rows.cuh). In a RowOrder, these rows follow the rows that are
/// appended to the list.
struct StagingTiles {
  /// [sequence of the batch, compressed list, piece of 64 rows]; null: rows are appended to their
  /// lists.
  std::uint8_t* data = nullptr;
  const std::int32_t* counts = nullptr;  ///< [sequence of the batch, head]: numbers of rows
  std::int32_t pieces = 0;               ///< of a list
  std::int32_t piece_bytes = 0;          ///< reserved for a piece

  /// @brief The first staging tile of a list.
  template <bool edits>
  __device__ std::uint8_t* of(const LayerTables<edits>& tables, int sequence, int list) const {
    return data + static_cast<std::size_t>((sequence * tables.num_lists + list) * pieces) *
                      static_cast<std::size_t>(piece_bytes);
  }
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
