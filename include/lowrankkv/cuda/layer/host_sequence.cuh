// SPDX-License-Identifier: Apache-2.0
/// @file cuda/layer/host_sequence.cuh  The host's state of a sequence: lengths, epochs and pages.
/// Lengths follow from token counts, except where heads have different numbers of rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "lowrankkv/core/descriptors.hpp"
#include "lowrankkv/core/position_shifts.hpp"
#include "lowrankkv/cuda/epochs/host_epochs.cuh"
#include "lowrankkv/cuda/state/layer_view.cuh"
#include "lowrankkv/cuda/state/row_order.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Row counts of the lists of all heads.
///
/// Values choose which rows go to which list, but counts usually determine how many. Heads differ
/// in three cases: tokens were removed from among rows that values chose; errors choose among rows
/// that are kept by accumulated score, or that prompt scores kept in a part of a prompt; errors
/// must exceed a threshold.
struct SequenceRows {
  HeadRows rows;                  ///< the most of any head
  std::vector<HeadRows> missing;  ///< [heads]: how many fewer a head has; empty: none
  /// Heads of a group with joint values, which compress the same rows; 0: no joint values.
  int joint_heads = 0;

  std::int64_t num_rows(RowList list) const { return rows_in(rows, list); }
  /// @param index  list of a head; after the heads, list of the joint values of a group
  std::int64_t num_rows(RowList list, int index) const {
    return rows_in(rows, list) - missing_in(list, index);
  }
  std::int64_t missing_in(RowList list, int index) const {
    if (missing.empty()) return 0;
    const int heads = static_cast<int>(missing.size());
    return rows_in(
        missing[static_cast<std::size_t>(index < heads ? index : (index - heads) * joint_heads)],
        list);
  }
  HeadRows rows_of(int head) const {
    return {static_cast<std::int32_t>(num_rows(RowList::full, head)),
            static_cast<std::int32_t>(num_rows(RowList::compressed, head))};
  }
  /// @brief Whether any head has more rows in this list in `after`.
  bool grows(const SequenceRows& after, RowList list) const {
    const std::size_t heads = (std::max)({missing.size(), after.missing.size(), std::size_t{1}});
    for (std::size_t head = 0; head < heads; ++head) {
      if (after.num_rows(list, static_cast<int>(head)) > num_rows(list, static_cast<int>(head)))
        return true;
    }
    return false;
  }
  /// @brief The fewest rows of any head.
  std::int64_t least_rows(RowList list) const {
    std::int32_t most_missing = 0;
    for (const HeadRows& head : missing)
      most_missing = (std::max)(most_missing, rows_in(head, list));
    return rows_in(rows, list) - most_missing;
  }
  /// @brief Limits every head's rows of a list to `limit`; negative: no limit.
  void limit_rows(std::int64_t limit, RowList list) {
    if (limit < 0 || num_rows(list) <= limit) return;
    std::vector<HeadRows> own;
    for (std::size_t head = 0; head < (std::max)(missing.size(), std::size_t{1}); ++head) {
      own.push_back(rows_of(static_cast<int>(head)));
      std::int32_t& count = list == RowList::full ? own.back().num_full : own.back().num_compressed;
      count = (std::min)(count, static_cast<std::int32_t>(limit));
    }
    set_rows(std::move(own));
  }
  /// @brief Adds the flushed rows of sequence `i` of a batch. @param scored  the scored list
  void add_rows(const FlushBatch& flushed, int i, RowList scored) {
    const auto grown = [&](const HeadRows& own) {
      return HeadRows{
          own.num_full + flushed.added(RowList::full, scored, i, own.num_full),
          own.num_compressed + flushed.added(RowList::compressed, scored, i, own.num_compressed)};
    };
    if (missing.empty() || flushed.limit[i] < 0) {  // the same in all heads
      rows = grown(rows);
      return;
    }
    std::vector<HeadRows> own;
    for (std::size_t head = 0; head < missing.size(); ++head)
      own.push_back(grown(rows_of(static_cast<int>(head))));
    set_rows(std::move(own));
  }
  /// @brief Adds the flushed rows of sequence `i` of a batch where both lists are scored: as many
  /// as each list may get. @param most  the most rows of a list afterwards
  void add_scored(const FlushBatch& flushed, int i, std::int32_t most) {
    std::vector<HeadRows> own;
    const auto grown = [&](std::int32_t now, std::int32_t offered) {
      return (std::max)(now, (std::min)(now + offered, most));
    };
    for (std::size_t head = 0; head < (std::max)(missing.size(), std::size_t{1}); ++head) {
      const HeadRows now = rows_of(static_cast<int>(head));
      own.push_back(
          {grown(now.num_full, flushed.full[i]), grown(now.num_compressed, flushed.candidates(i))});
    }
    set_rows(std::move(own));
  }
  /// @brief Sets the row counts [heads] of every head; there is at least one.
  void set_rows(std::vector<HeadRows> own) {
    rows = own.front();
    for (const HeadRows& head : own)
      rows = {(std::max)(rows.num_full, head.num_full),
              (std::max)(rows.num_compressed, head.num_compressed)};
    bool differ = false;
    for (HeadRows& head : own) {
      head = {rows.num_full - head.num_full, rows.num_compressed - head.num_compressed};
      differ = differ || head.num_full != 0 || head.num_compressed != 0;
    }
    missing = differ ? std::move(own) : std::vector<HeadRows>{};
  }
};

/// @brief The host's state of one sequence.
struct HostSequence : SequenceRows {
  std::int64_t num_tokens = 0;
  std::int32_t tail_length = 0;
  HostEpochs epochs;
  /// Rotary positions that differ from the token's index. The device has a copy for pre-RoPE keys.
  PositionShifts shifts;
  /// By RowList: the pages of each list. The heads' lists come first, then, with joint values, one
  /// list per group.
  std::vector<std::vector<std::int32_t>> pages[2];

  /// @brief Number of tokens that have left the tail.
  std::int64_t first_tail() const { return num_tokens - tail_length; }
  /// @brief Ends segments where the heads' lists end, and erases segments that are empty in all
  /// heads. A merge of such a segment is over.
  void trim_segments() {
    std::vector<HostSegment>& all = epochs.segments;
    for (std::size_t i = all.size(); i-- > 0;) {
      bool empty = true;
      for (std::size_t head = 0; head < all[i].first_rows.size(); ++head) {
        std::int32_t& first = all[i].first_rows[head];
        const std::int32_t own_rows = static_cast<std::int32_t>(
                               num_rows(RowList::compressed, static_cast<int>(head))),
                           end = i + 1 < all.size() ? all[i + 1].first_rows[head] : own_rows;
        first = (std::min)(first, own_rows);
        empty = empty && first >= end;
      }
      if (!empty) continue;
      all.erase(all.begin() + static_cast<std::ptrdiff_t>(i));
      const std::int32_t erased = static_cast<std::int32_t>(i);
      if (erased == epochs.merging || erased == epochs.merging + 1)
        epochs.merging = -1;
      else if (erased < epochs.merging)
        --epochs.merging;
    }
  }
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
