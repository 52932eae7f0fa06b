// SPDX-License-Identifier: Apache-2.0
/// @file core/position_shifts.hpp  Where the tokens of a sequence stand for the rotary embedding: their index, moved in pieces.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief From token `first` on, positions are `offset` more than token indices.
struct PositionShift {
  std::int64_t first = 0;
  std::int64_t offset = 0;

  friend bool operator==(const PositionShift&, const PositionShift&) = default;
};

/// @brief The offset between token index and rotary position, piecewise constant; without shifts, zero. What is stored of a
/// token does not change when it moves (Rope::pre).
class PositionShifts {
 public:
  /// The largest magnitude of an offset; with the largest max_tokens, positions stay below twice as much.
  static constexpr std::int64_t kLimit = std::int64_t{1} << 31;

  std::span<const PositionShift> pieces() const { return pieces_; }
  std::size_t bytes() const { return pieces_.size() * sizeof(PositionShift); }
  /// @brief Offset of a token. Cost: O(log pieces).
  std::int64_t offset(std::int64_t token) const {
    const auto next = after(token);
    return next == pieces_.begin() ? 0 : (next - 1)->offset;
  }
  /// @brief Moves the tokens from `first` on by `delta`. Cost: O(pieces).
  void add(std::int64_t first, std::int64_t delta) {
    const std::int64_t before = offset(first);
    const auto at = std::find_if(pieces_.begin(), pieces_.end(), [first](const PositionShift& piece) { return piece.first >= first; });
    if (at == pieces_.end() || at->first != first) pieces_.insert(at, {first, before});
    for (PositionShift& piece : pieces_) {
      if (piece.first >= first) piece.offset += delta;
    }
    // Neighbours with equal offsets are one piece.
    std::int64_t last = 0;
    std::erase_if(pieces_, [&](const PositionShift& piece) { return std::exchange(last, piece.offset) == piece.offset; });
  }
  /// @brief Forgets what was said of tokens from `length` on: those that come next go on from the last one that stays.
  void truncate(std::int64_t length) {
    std::erase_if(pieces_, [length](const PositionShift& piece) { return piece.first >= length; });
  }
  /// @brief Forgets `count` tokens from `first` on: those behind them take their places, and keep their positions. Cost: O(pieces).
  void remove(std::int64_t first, std::int64_t count) {
    const std::int64_t before = first == 0 ? 0 : offset(first - 1), behind = offset(first + count) + count;
    std::erase_if(pieces_, [&](const PositionShift& piece) { return piece.first >= first && piece.first <= first + count; });
    const auto next = std::find_if(pieces_.begin(), pieces_.end(), [first](const PositionShift& piece) { return piece.first > first; });
    for (auto piece = next; piece != pieces_.end(); ++piece) *piece = {piece->first - count, piece->offset + count};
    if (behind != before) pieces_.insert(next, {first, behind});
  }
  /// @brief Puts back pieces in order of their tokens, as pieces() gave them.
  void append(const PositionShift& piece) { pieces_.push_back(piece); }
  friend bool operator==(const PositionShifts&, const PositionShifts&) = default;
  /// @brief Calls use(first token, count, position of the first) for stretches of consecutive positions of tokens
  /// [first, first + count).
  template <class Use>
  void for_each(std::int64_t first, std::int64_t count, Use&& use) const {
    std::int64_t begin = first;
    std::int64_t offset = this->offset(first);
    for (auto piece = after(first); piece != pieces_.end() && piece->first < first + count; ++piece) {
      use(begin, piece->first - begin, begin + offset);
      begin = piece->first;
      offset = piece->offset;
    }
    if (begin < first + count) use(begin, first + count - begin, begin + offset);
  }

 private:
  std::vector<PositionShift>::const_iterator after(std::int64_t token) const {
    return std::upper_bound(pieces_.begin(), pieces_.end(), token, [](std::int64_t at, const PositionShift& piece) { return at < piece.first; });
  }
  std::vector<PositionShift> pieces_;
};

namespace detail {

/// Raises unless the tokens from `first` on can move by `delta`, and no offset beyond `limit` then. @param unrotated  keys are stored before their rotary embedding
inline void check_shift(const PositionShifts& shifts, bool unrotated, std::int64_t num_tokens, std::int64_t first, std::int64_t delta, std::int64_t limit) {
  if (!unrotated) fail<StateError>("shift_positions: keys are stored rotated (Rope::post), Rope::pre is needed to move them by ", delta);
  if (first < 0 || first > num_tokens) fail<ShapeError>("shift_positions: token ", first, ", sequence has ", num_tokens, " tokens");
  const auto check = [&](std::int64_t offset) {
    if (delta > 2 * limit || delta < -2 * limit || offset + delta > limit || offset + delta < -limit) {
      fail<ValueError>("shift_positions: by ", delta, " after ", offset, ", at most ", limit, " in all");
    }
  };
  check(shifts.offset(first));
  for (const PositionShift& piece : shifts.pieces()) {
    if (piece.first > first) check(piece.offset);
  }
}

/// Raises unless a sequence has the tokens [first, first + count), and no offset would be beyond `limit` without them.
inline void check_removal(const PositionShifts& shifts, std::int64_t num_tokens, std::int64_t first, std::int64_t count, std::int64_t limit) {
  if (first < 0 || count < 0 || first > num_tokens || count > num_tokens - first) fail<ShapeError>("remove: ", count, " tokens from token ", first, " on, sequence has ", num_tokens, " tokens");
  const auto check = [&](std::int64_t offset) {
    if (offset + count > limit) fail<ValueError>("remove: positions would be ", offset + count, " beyond their tokens, at most ", limit);
  };
  check(shifts.offset(first + count));
  for (const PositionShift& piece : shifts.pieces()) {
    if (piece.first > first + count) check(piece.offset);
  }
}

}  // namespace detail

LOWRANKKV_NAMESPACE_END
