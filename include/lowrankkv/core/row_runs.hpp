// SPDX-License-Identifier: Apache-2.0
/// @file core/row_runs.hpp  Where each position of one KV head is stored, as runs of consecutive
/// positions of one state.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lowrankkv/core/descriptors.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Where a position that left the tail is stored: row `row` of the list of its state. For a
/// dropped position, `row` has no meaning.
struct RowPlace {
  RowState state = RowState::full;
  std::int32_t row = 0;
};

/// @brief Consecutive positions of one state, and the row of the first one in the state's list.
struct RowRun {
  std::int32_t first_position = 0;
  std::int32_t first_row = 0;
  RowState state = RowState::full;
};

/// @brief The positions of one head, in order. A state's list holds rows in the order of their
/// positions, so a run of any length needs only two numbers: positions of contiguous rows are
/// implicit.
class RowRuns {
 public:
  /// Bytes of a stored run: a position, and a row whose two upper bits hold the state.
  static constexpr std::size_t kRunBytes = 8;

  /// @brief Positions covered, dropped ones included.
  std::int64_t num_positions() const { return end_; }
  /// @brief Rows of a state.
  std::int32_t num_rows(RowState state) const { return rows_[index(state)]; }
  std::size_t bytes() const { return runs_.size() * kRunBytes; }
  std::span<const RowRun> runs() const { return runs_; }
  /// @brief One past the last position of a run.
  std::int32_t end_of(std::size_t run) const {
    return run + 1 < runs_.size() ? runs_[run + 1].first_position : end_;
  }

  /// @brief The next `count` positions have this state.
  void append(RowState state, std::int32_t count) {
    if (count == 0) return;
    if (runs_.empty() || runs_.back().state != state)
      runs_.push_back({end_, rows_[index(state)], state});
    rows_[index(state)] += count;
    end_ += count;
  }
  /// @brief Where `position` is. Cost: O(log runs).
  RowPlace find(std::int64_t position) const {
    const auto next = std::upper_bound(
        runs_.begin(), runs_.end(), position,
        [](std::int64_t at, const RowRun& run) { return at < run.first_position; });
    const RowRun& run = *(next - 1);
    return {run.state, run.first_row + static_cast<std::int32_t>(position) - run.first_position};
  }
  /// @brief Rows of `state` at positions below `position`.
  std::int32_t rows_before(RowState state, std::int64_t position) const {
    std::int32_t rows = 0;
    for (std::size_t run = 0; run < runs_.size() && runs_[run].first_position < position; ++run) {
      if (runs_[run].state != state) continue;
      rows = runs_[run].first_row +
             static_cast<std::int32_t>((std::min)(position, std::int64_t{end_of(run)})) -
             runs_[run].first_position;
    }
    return rows;
  }
  /// @brief Forgets the positions from `length` on.
  void truncate(std::int64_t length) {
    if (length >= end_) return;
    for (const RowState state : {RowState::full, RowState::compressed, RowState::dropped})
      rows_[index(state)] = rows_before(state, length);
    while (!runs_.empty() && runs_.back().first_position >= length) runs_.pop_back();
    end_ = static_cast<std::int32_t>(length);
  }
  /// @brief Removes `count` positions from `first` on, all of which are covered. Later positions
  /// move down to close the gap. Cost: O(positions)
  void remove(std::int64_t first, std::int64_t count) {
    std::vector<RowState> left = states();
    left.erase(left.begin() + static_cast<std::ptrdiff_t>(first),
               left.begin() + static_cast<std::ptrdiff_t>(first + count));
    assign(left);
  }
  /// @brief Replaces the states of all positions; rows are renumbered. `states` holds one state per
  /// position.
  void assign(std::span<const RowState> states) {
    *this = {};
    for (const RowState state : states) append(state, 1);
  }
  /// @brief The states of all positions.
  std::vector<RowState> states() const {
    std::vector<RowState> all(static_cast<std::size_t>(end_));
    for (std::size_t run = 0; run < runs_.size(); ++run)
      std::fill(all.begin() + runs_[run].first_position, all.begin() + end_of(run),
                runs_[run].state);
    return all;
  }

 private:
  static std::size_t index(RowState state) { return static_cast<std::size_t>(state); }
  std::vector<RowRun> runs_;
  std::int32_t rows_[3] = {0, 0, 0};
  std::int32_t end_ = 0;
};

LOWRANKKV_NAMESPACE_END
