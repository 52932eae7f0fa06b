// SPDX-License-Identifier: Apache-2.0
/// @file core/descriptors.hpp  Descriptors that an attention kernel reads besides pages: lengths,
/// page tables, segments.
///
/// All arrays have a fixed capacity and never move, so that a captured CUDA graph can keep their
/// addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief State of a row that left the tail: stored as K and V rows, stored as coefficients, or
/// dropped.
enum class RowState : std::uint8_t { full, compressed, dropped };

/// @brief Rows [first_row, first_row + num_rows) of the compressed list of one KV head, all written
/// under one epoch.
struct Segment {
  std::int32_t epoch = 0;
  std::int32_t first_row = 0;
  std::int32_t num_rows = 0;
  std::int32_t level = 0;  ///< rounds of merging that the segment went through
};

/// @brief Row counts of one (sequence, KV head).
struct HeadRows {
  std::int32_t num_full = 0;
  std::int32_t num_compressed = 0;
};

/// @brief Lengths of one sequence, the same for all heads. The tail holds the last `tail_length`
/// positions.
struct SequenceLengths {
  std::int64_t num_tokens = 0;
  std::int32_t tail_length = 0;
  std::int32_t num_segments = 0;
};

/// @brief The two lists of rows that live in pages.
enum class RowList : std::uint8_t { full, compressed };

/// @brief Fixed-capacity descriptor arrays of one layer: slots x heads.
class DescriptorTable {
 public:
  DescriptorTable() = default;
  DescriptorTable(int num_slots, int num_heads, std::int32_t max_full_pages,
                  std::int32_t max_compressed_pages, std::int32_t max_segments)
      : num_heads_(num_heads),
        max_pages_{max_full_pages, max_compressed_pages},
        max_segments_(max_segments) {
    const std::size_t slots = static_cast<std::size_t>(num_slots);
    const std::size_t heads = slots * static_cast<std::size_t>(num_heads);
    lengths_.resize(slots);
    rows_.resize(heads);
    segments_.resize(heads * static_cast<std::size_t>(max_segments));
    for (int list = 0; list < 2; ++list)
      pages_[list].resize(heads * static_cast<std::size_t>(max_pages_[list]), -1);
  }

  SequenceLengths& lengths(int slot) { return lengths_[static_cast<std::size_t>(slot)]; }
  const SequenceLengths& lengths(int slot) const {
    return lengths_[static_cast<std::size_t>(slot)];
  }
  HeadRows& rows(int slot, int head) { return rows_[index(slot, head)]; }
  const HeadRows& rows(int slot, int head) const { return rows_[index(slot, head)]; }
  int num_lists() const { return num_heads_; }  ///< the same for both kinds of lists
  std::int32_t max_segments() const { return max_segments_; }
  std::int32_t max_pages(RowList list) const { return max_pages_[static_cast<int>(list)]; }

  /// @brief The segments of a head, of which lengths(slot).num_segments are in use. A publication
  /// opens one segment for every head.
  std::span<Segment> segments(int slot, int head) {
    return {segments_.data() + index(slot, head) * static_cast<std::size_t>(max_segments_),
            static_cast<std::size_t>(max_segments_)};
  }
  std::span<const Segment> segments(int slot, int head) const {
    return {segments_.data() + index(slot, head) * static_cast<std::size_t>(max_segments_),
            static_cast<std::size_t>(max_segments_)};
  }
  /// @brief Page numbers of one list of one head.
  std::span<std::int32_t> pages(RowList list, int slot, int head) {
    const std::size_t count = static_cast<std::size_t>(max_pages(list));
    return {pages_[static_cast<int>(list)].data() + index(slot, head) * count, count};
  }
  std::span<const std::int32_t> pages(RowList list, int slot, int head) const {
    const std::size_t count = static_cast<std::size_t>(max_pages(list));
    return {pages_[static_cast<int>(list)].data() + index(slot, head) * count, count};
  }
  /// @brief Bytes of all tables.
  std::size_t bytes() const {
    return lengths_.size() * sizeof(SequenceLengths) + rows_.size() * sizeof(HeadRows) +
           segments_.size() * sizeof(Segment) +
           (pages_[0].size() + pages_[1].size()) * sizeof(std::int32_t);
  }

 private:
  std::size_t index(int slot, int head) const {
    return static_cast<std::size_t>(slot) * static_cast<std::size_t>(num_heads_) +
           static_cast<std::size_t>(head);
  }
  int num_heads_ = 0;
  std::int32_t max_pages_[2] = {0, 0};
  std::int32_t max_segments_ = 0;
  std::vector<SequenceLengths> lengths_;
  std::vector<HeadRows> rows_;
  std::vector<Segment> segments_;
  std::vector<std::int32_t> pages_[2];
};

LOWRANKKV_NAMESPACE_END
