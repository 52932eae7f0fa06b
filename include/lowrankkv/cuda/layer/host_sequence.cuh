// SPDX-License-Identifier: Apache-2.0
/// @file cuda/layer/host_sequence.cuh  What the host knows of a sequence: its lengths, which follow
/// from counts but where heads keep rows of their own, and its pages.
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

/// @brief Rows of the lists of all heads. Values choose which rows go where, seldom how many: heads
/// differ after tokens have gone from among rows that values chose, where errors choose among those
/// that masses keep or that scores left of a part of a prompt, and where errors must exceed a
/// threshold.
struct SequenceRows {
  HeadRows rows;                  ///< the most of a head
  std::vector<HeadRows> missing;  ///< [heads]: how many fewer a head has; empty: none
  int joint_heads = 0;  ///< of a group whose values are joint: the same rows of them all; 0: none

  std::int64_t num_rows(RowList list) const { return rows_in(rows, list); }
  /// @param index  of a list: of a head, or, behind those, of the joint values of a group
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
  /// @brief Whether a list of any head has more rows in `after`.
  bool grows(const SequenceRows& after, RowList list) const {
    const std::size_t heads = (std::max)({missing.size(), after.missing.size(), std::size_t{1}});
    for (std::size_t head = 0; head < heads; ++head) {
      if (after.num_rows(list, static_cast<int>(head)) > num_rows(list, static_cast<int>(head)))
        return true;
    }
    return false;
  }
  /// @brief The fewest of a head.
  std::int64_t least_rows(RowList list) const {
    std::int32_t most_missing = 0;
    for (const HeadRows& head : missing)
      most_missing = (std::max)(most_missing, rows_in(head, list));
    return rows_in(rows, list) - most_missing;
  }
  /// @brief Leaves so many rows of a list to every head, at most. @param limit  negative: all
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
  /// @brief Adds the rows that leave sequence `i` of a batch. @param weighed  the list whose rows
  /// masses choose
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
  /// @brief Adds the rows that leave sequence `i` of a batch, as many as lists may get where masses
  /// choose among those of both. @param most  of a list, then
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
  /// @brief Sets the rows of every head, of which there is at least one.
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

/// @brief The host's knowledge of one sequence.
struct HostSequence : SequenceRows {
  std::int64_t num_tokens = 0;
  std::int32_t tail_length = 0;
  HostEpochs epochs;
  PositionShifts shifts;  ///< rotary positions, where they are not the token's index; the device
                          ///< has those of keys that are stored before their rotary embedding
  std::vector<std::vector<std::int32_t>> pages[2];  ///< by RowList, per list: of a head; joint
                                                    ///< values have one a group, behind the heads'

  std::int64_t first_tail() const {
    return num_tokens - tail_length;
  }  ///< tokens that have left the tail
  /// @brief Segments end where their heads' lists do, and go where no head has a row of them.
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
      if (empty) all.erase(all.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
