// SPDX-License-Identifier: Apache-2.0
/// @file core/row_runs.hpp  Where each position of one KV head is stored, as runs of consecutive
/// positions of one state.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "lowrankkv/core/byte_stream.hpp"
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
  friend bool operator==(const RowRun&, const RowRun&) = default;
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
  /// move down to close the gap. Cost: O(runs)
  void remove(std::int64_t first, std::int64_t count) {
    RowRuns left;
    left.runs_.reserve(runs_.size());
    for (std::size_t run = 0; run < runs_.size(); ++run) {
      const std::int64_t begin = runs_[run].first_position, end = end_of(run);
      const std::int64_t below = (std::min)(end, first) - begin;
      const std::int64_t above = end - (std::max)(begin, first + count);
      left.append(runs_[run].state, static_cast<std::int32_t>((std::max)(below, std::int64_t{0}) +
                                                              (std::max)(above, std::int64_t{0})));
    }
    *this = std::move(left);
  }

  /// @brief Writes the number of runs (u64), then (length * 4 + state) of each run, seven bits a
  /// byte, the lowest first; all bytes of a number but its last have their highest bit set. At most
  /// a byte a position.
  void write(ByteWriter& out) const {
    out.value(static_cast<std::uint64_t>(runs_.size()));
    for (std::size_t run = 0; run < runs_.size(); ++run) {
      auto number = static_cast<std::uint64_t>(end_of(run) - runs_[run].first_position) * 4 +
                    static_cast<std::uint64_t>(runs_[run].state);
      for (; number >= 128; number /= 128) out.value(static_cast<std::uint8_t>(number % 128 + 128));
      out.value(static_cast<std::uint8_t>(number));
    }
  }
  /// @brief Reads what write() wrote. @throws FormatError for a state that there is not, for runs
  /// that are empty, unjoined or longer than `most` positions in all, and at the end of the bytes
  static RowRuns read(ByteReader& in, std::int64_t most) {
    RowRuns all;
    const auto count = in.value<std::uint64_t>();
    for (std::uint64_t run = 0; run < count; ++run) {
      std::uint64_t number = 0;
      for (int shift = 0;; shift += 7) {
        const auto byte = in.value<std::uint8_t>();
        if (shift == 28 && byte > 31)  // lengths have at most 31 bits, states 2
          detail::fail<FormatError>("saved state: run ", run, " of a head has byte ", int{byte},
                                    " as its fifth, at most 31 expected");
        number += static_cast<std::uint64_t>(byte % 128) << shift;
        if (byte < 128) break;
      }
      const auto length = static_cast<std::int64_t>(number / 4);
      const auto state = static_cast<RowState>(number % 4);
      if (state > RowState::dropped)
        detail::fail<FormatError>("saved state: row state ", number % 4, ", at most 2");
      if (length < 1 || length > most - all.end_)
        detail::fail<FormatError>("saved state: run ", run, " of a head has ", length,
                                  " positions, 1 to ", most - all.end_, " expected");
      if (!all.runs_.empty() && all.runs_.back().state == state)
        detail::fail<FormatError>("saved state: runs ", run - 1, " and ", run,
                                  " of a head are of "
                                  "one state, ",
                                  number % 4);
      all.append(state, static_cast<std::int32_t>(length));
    }
    return all;
  }
  friend bool operator==(const RowRuns& a, const RowRuns& b) {
    return a.end_ == b.end_ && a.runs_ == b.runs_;
  }

 private:
  static std::size_t index(RowState state) { return static_cast<std::size_t>(state); }
  std::vector<RowRun> runs_;
  std::int32_t rows_[3] = {0, 0, 0};
  std::int32_t end_ = 0;
};

LOWRANKKV_NAMESPACE_END
