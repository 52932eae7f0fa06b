// SPDX-License-Identifier: Apache-2.0
/// @file cuda/state/row_order.cuh  Rows that leave the tails: how many, in which order they are
/// stored, and which stored rows move.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lowrankkv/core/descriptors.hpp"
#include "lowrankkv/cuda/state/layer_view.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Rows that leave the tails of some sequences, oldest first: so many to the list of full
/// rows, so many to the compressed one, the others are dropped.
struct FlushBatch {
  std::int32_t count = 0;
  std::int32_t slots[kMaxBatch];
  std::int32_t rows[kMaxBatch];
  std::int32_t full[kMaxBatch];        ///< RowCounts::full
  std::int32_t compressed[kMaxBatch];  ///< RowCounts::compressed: of a head, at most
  std::int32_t pinned[kMaxBatch];  ///< of the full ones, those that are full whatever their values:
                                   ///< the oldest
  std::int32_t position[kMaxBatch];  ///< of the oldest
  std::int32_t limit[kMaxBatch];     ///< RowCounts::limit

  /// @brief Rows of a head that come to a list, or, where masses choose those, that they choose
  /// among.
  __host__ __device__ std::int32_t offered(RowList list, int sequence) const {
    return list == RowList::full ? full[sequence] : compressed[sequence];
  }
  /// @brief By how many rows a list grows. @param weighed  the list whose rows masses choose @param
  /// stored  rows that it has
  __host__ __device__ std::int32_t added(RowList list, RowList scored, int sequence,
                                         std::int32_t stored) const {
    const std::int32_t most = offered(list, sequence),
                       room = limit[sequence] > stored ? limit[sequence] - stored : 0;
    return limit[sequence] < 0 || list != scored || most < room ? most : room;
  }
  /// @brief Rows of a sequence that could be compressed: not pinned, nor dropped by counts or
  /// scores.
  __host__ __device__ std::int32_t candidates(int sequence) const {
    return full[sequence] + compressed[sequence] - pinned[sequence];
  }
};

/// @brief Which rows of the lists of some sequences move where, segment after segment: [sequence of
/// the batch, head, stride] each. Only when those of a segment have moved are places of the next
/// one's free.
struct RowMoves {
  std::int32_t* from = nullptr;
  std::int32_t* to = nullptr;
  std::int32_t* ends =
      nullptr;  ///< [sequence of the batch, head, segments]: where the moves of segments end
  std::int32_t stride = 0;
  std::int32_t segments = 1;  ///< that a sequence can have

  /// @brief The moves of one list. @param list  of the head of a sequence of the batch
  __host__ __device__ RowMoves of(int list) const {
    return {from + static_cast<std::ptrdiff_t>(list) * stride,
            to + static_cast<std::ptrdiff_t>(list) * stride, ends + list * segments, stride,
            segments};
  }
};

/// @brief The moves of both lists, by RowList; of one that is not weighed, none.
struct ListMoves {
  RowMoves lists[2];
};

/// @brief Which leaving rows go to a list, in order: [sequence of the batch, head, stride] numbers
/// of rows of the source, which policies that decide by values chose; null: those to the full list
/// come first, in their order, the others follow.
struct RowOrder {
  const std::int32_t* rows = nullptr;
  std::int32_t stride = 0;
  const std::int32_t* ends =
      nullptr;  ///< [sequence of the batch, head, parts]: where parts of the orders end, of which
                ///< `part` is meant (cuda/compress/prompt_parts.cuh; one part, where heads have
                ///< different numbers of rows); null: as many are as the host says
  std::int32_t parts = 0, part = 0;

  /// @brief The order of a head; null, if there is none.
  __device__ const std::int32_t* of(int sequence, int heads, int head) const {
    return rows == nullptr
               ? nullptr
               : rows + (static_cast<std::size_t>(sequence) * static_cast<std::size_t>(heads) +
                         static_cast<std::size_t>(head)) *
                            static_cast<std::size_t>(stride);
  }
  /// @brief The rows [x, y) of a head's order that are meant. @param count  as the host says
  __device__ int2 active(int sequence, int heads, int head, int count) const {
    if (ends == nullptr) return {0, count};
    const std::int32_t* own = ends + (sequence * heads + head) * parts + part;
    return {part == 0 ? 0 : own[-1], own[0]};
  }
  /// @brief The orders of a batch's sequences from `sequence` on.
  RowOrder from(int sequence, int heads) const {
    RowOrder some = *this;
    if (rows != nullptr) some.rows += static_cast<std::ptrdiff_t>(sequence) * heads * stride;
    if (ends != nullptr) some.ends += sequence * heads * parts;
    return some;
  }
};

/// @brief Tiles outside of pages, of rows that will take the places of stored ones
/// (cuda/store/compaction/place_rows.cuh). They follow those that go to a list's end in its order.
struct StagingTiles {
  std::uint8_t* data = nullptr;  ///< [sequence of the batch, compressed list, piece of 64 rows];
                                 ///< null: rows go to their lists' ends
  const std::int32_t* counts = nullptr;  ///< [sequence of the batch, head]: rows
  std::int32_t pieces = 0;               ///< of a list
  std::int32_t piece_bytes = 0;          ///< set aside for each

  /// @brief Where those of a list begin.
  template <bool edits>
  __device__ std::uint8_t* of(const LayerTables<edits>& tables, int sequence, int list) const {
    return data + static_cast<std::size_t>((sequence * tables.num_lists + list) * pieces) *
                      static_cast<std::size_t>(piece_bytes);
  }
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
