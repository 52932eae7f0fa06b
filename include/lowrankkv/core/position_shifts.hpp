// SPDX-License-Identifier: Apache-2.0
/// @file core/position_shifts.hpp  Rotary positions of a sequence's tokens: their indices, shifted
/// and divided piecewise.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief From token `first` on, positions are (token + offset) / divisor, rounded down.
struct PositionShift {
  std::int64_t first = 0;    ///< token
  std::int64_t offset = 0;   ///< added before the division
  std::int64_t divisor = 1;  ///< 1 to PositionShifts::kMostDivisor

  std::int64_t position(std::int64_t token) const {
    const std::int64_t moved = token + offset;
    return divisor == 1 ? moved : (moved - (moved < 0 ? divisor - 1 : 0)) / divisor;
  }
  /// @brief The same map, starting at another token.
  PositionShift from(std::int64_t token) const { return {token, offset, divisor}; }
  /// @brief Whether both have the same offset and divisor.
  bool maps_like(const PositionShift& other) const {
    return offset == other.offset && divisor == other.divisor;
  }
  friend bool operator==(const PositionShift&, const PositionShift&) = default;
};

/// @brief The rotary positions of a sequence's tokens: their indices, shifted and divided in
/// pieces. Positions of tokens still to come are never divided.
///
/// Stored rows do not change when their tokens move (Rope::pre).
class PositionShifts {
 public:
  /// Largest magnitude of an offset on the CPU. With the largest max_tokens, positions stay below
  /// twice this value. The Cuda backend has other limits: positions within +-2^30, 32 pieces.
  static constexpr std::int64_t kLimit = std::int64_t{1} << 31;
  /// The largest divisor.
  static constexpr std::int64_t kMostDivisor = std::int64_t{1} << 20;

  PositionShifts() = default;
  PositionShifts(const PositionShifts& other) {
    reserve(other.pieces_.size());
    pieces_ = other.pieces_;
  }
  PositionShifts(PositionShifts&&) = default;
  PositionShifts& operator=(const PositionShifts& other) { return *this = PositionShifts(other); }
  PositionShifts& operator=(PositionShifts&&) = default;

  std::span<const PositionShift> pieces() const { return pieces_; }  ///< in order of their tokens
  std::size_t bytes() const { return pieces_.size() * sizeof(PositionShift); }  ///< of the pieces
  /// @brief The piece that contains a token. Cost: O(log pieces).
  PositionShift piece(std::int64_t token) const {
    const auto next = after(token);
    return next == pieces_.begin() ? PositionShift{} : *(next - 1);
  }
  /// @brief Position of a token. Cost: O(log pieces).
  std::int64_t position(std::int64_t token) const { return piece(token).position(token); }
  /// @brief Moves the tokens from `first` on by `delta`. Cost: O(pieces).
  void add(std::int64_t first, std::int64_t delta) {
    begin_piece(first);
    for (PositionShift& piece : pieces_) {
      if (piece.first >= first) piece.offset += delta * piece.divisor;
    }
    join_neighbours();
  }
  /// @brief Divides the positions of tokens [first, first + count) by `divisor`, rounded down.
  /// Cost: O(pieces).
  void divide(std::int64_t first, std::int64_t count, std::int64_t divisor) {
    begin_piece(first);
    begin_piece(first + count);
    for (PositionShift& piece : pieces_) {
      // floor(floor(x / a) / b) = floor(x / (a b)) for positive a and b.
      if (piece.first >= first && piece.first < first + count) piece.divisor *= divisor;
    }
    join_neighbours();
  }
  /// @brief Forgets the tokens from `length` on. Tokens appended next continue after the position
  /// of the last remaining token. Cannot fail: there is always room for one more piece.
  void truncate(std::int64_t length) noexcept {
    const PositionShift last = piece(length - 1);
    std::erase_if(pieces_, [length](const PositionShift& piece) { return piece.first >= length; });
    if (last.divisor != 1) pieces_.push_back({length, last.position(length - 1) + 1 - length});
  }
  /// @brief Removes `count` tokens from `first` on. Later tokens take their indices, and keep their
  /// own positions. Cost: O(pieces).
  void remove(std::int64_t first, std::int64_t count) {
    begin_piece(first + count);
    std::erase_if(pieces_, [&](const PositionShift& piece) {
      return piece.first >= first && piece.first < first + count;
    });
    for (PositionShift& piece : pieces_) {
      if (piece.first >= first) piece = {piece.first - count, piece.offset + count, piece.divisor};
    }
    join_neighbours();
  }
  /// @brief Appends a piece, to restore pieces() in the order in which it returned them.
  void append(const PositionShift& piece) {
    reserve(1);
    pieces_.push_back(piece);
  }
  friend bool operator==(const PositionShifts&, const PositionShifts&) = default;
  /// @brief Calls use(first token, count, position of the first) for stretches of consecutive
  /// positions among the tokens [first, first + count). Stretches are as long as possible; where
  /// positions are divided, they are single tokens.
  template <class Use>
  void for_each(std::int64_t first, std::int64_t count, Use&& use) const {
    const auto stretch = [&use](const PositionShift& piece, std::int64_t begin, std::int64_t end) {
      if (piece.divisor == 1 && begin < end) use(begin, end - begin, piece.position(begin));
      for (std::int64_t token = begin; piece.divisor != 1 && token < end; ++token)
        use(token, std::int64_t{1}, piece.position(token));
    };
    std::int64_t begin = first;
    PositionShift now = piece(first);
    for (auto next = after(first); next != pieces_.end() && next->first < first + count; ++next) {
      stretch(now, begin, next->first);
      begin = next->first;
      now = *next;
    }
    stretch(now, begin, first + count);
  }

 private:
  /// Splits the pieces at token `first`, without changing any position.
  void begin_piece(std::int64_t first) {
    const PositionShift now = piece(first).from(first);
    const auto at =
        std::find_if(pieces_.begin(), pieces_.end(),
                     [first](const PositionShift& piece) { return piece.first >= first; });
    if (at != pieces_.end() && at->first == first) return;
    const std::ptrdiff_t index = at - pieces_.begin();
    reserve(1);
    pieces_.insert(pieces_.begin() + index, now);
  }
  /// Makes room for `more` pieces, and for the one that truncate() may add.
  void reserve(std::size_t more) { pieces_.reserve(pieces_.size() + more + 1); }
  /// Joins neighbouring pieces that have the same offset and divisor.
  void join_neighbours() {
    PositionShift last;
    std::erase_if(pieces_, [&](const PositionShift& piece) {
      return std::exchange(last, piece).maps_like(piece);
    });
  }
  std::vector<PositionShift>::const_iterator after(std::int64_t token) const {
    return std::upper_bound(
        pieces_.begin(), pieces_.end(), token,
        [](std::int64_t at, const PositionShift& piece) { return at < piece.first; });
  }
  std::vector<PositionShift> pieces_;
};

namespace detail {

/// Raises ShapeError unless a sequence has the tokens [first, first + count).
inline void check_token_range(const char* call, std::int64_t num_tokens, std::int64_t first,
                              std::int64_t count) {
  if (first < 0 || count < 0 || first > num_tokens || count > num_tokens - first)
    fail<ShapeError>(call, ": ", count, " tokens from token ", first, " on, sequence has ",
                     num_tokens, " tokens");
}
/// Calls check(piece) for the piece that contains token `first`, and for the later pieces that
/// begin before `end`.
template <class Check>
void check_pieces(const PositionShifts& shifts, std::int64_t first, Check&& check,
                  std::int64_t end = (std::numeric_limits<std::int64_t>::max)()) {
  check(shifts.piece(first));
  for (const PositionShift& piece : shifts.pieces()) {
    if (piece.first > first && piece.first < end) check(piece);
  }
}

/// Raises unless the tokens from `first` on can move by `delta` with no offset then beyond +-limit.
/// @param pre_rope  keys are stored pre-RoPE
/// @param limit      the backend's limit: PositionShifts::kLimit on the CPU, lower on the GPU
inline void check_shift(const PositionShifts& shifts, bool pre_rope, std::int64_t num_tokens,
                        std::int64_t first, std::int64_t delta, std::int64_t limit) {
  if (!pre_rope)
    fail<StateError>(
        "shift_positions: keys are stored rotated (Rope::post), Rope::pre is needed to move them "
        "by ",
        delta);
  if (first < 0 || first > num_tokens)
    fail<ShapeError>("shift_positions: token ", first, ", sequence has ", num_tokens, " tokens");
  const auto refuse = [limit](std::int64_t by, std::int64_t offset) {
    fail<ValueError>("shift_positions: by ", by, " after ", offset, ", at most ", limit, " in all");
  };
  if (delta > 2 * limit || delta < -2 * limit) refuse(delta, shifts.piece(first).offset);
  check_pieces(shifts, first, [&](const PositionShift& piece) {
    const std::int64_t by = delta * piece.divisor;
    if (piece.offset + by > limit || piece.offset + by < -limit) refuse(by, piece.offset);
  });
}

/// Raises unless the positions of tokens [first, first + count) can be divided.
/// @param pre_rope  keys are stored pre-RoPE
inline void check_division(const PositionShifts& shifts, bool pre_rope, std::int64_t num_tokens,
                           std::int64_t first, std::int64_t count, std::int64_t divisor) {
  if (!pre_rope)
    fail<StateError>(
        "divide_positions: keys are stored rotated (Rope::post), Rope::pre is needed to divide "
        "them by ",
        divisor);
  check_token_range("divide_positions", num_tokens, first, count);
  const auto check = [&](const PositionShift& piece) {
    if (divisor < 1 || divisor > PositionShifts::kMostDivisor / piece.divisor)
      fail<ValueError>("divide_positions: by ", divisor, " after ", piece.divisor, ", 1 to ",
                       PositionShifts::kMostDivisor, " in all expected");
  };
  check_pieces(shifts, first, check, first + count);
}

/// Raises unless a sequence has the tokens [first, first + count), and removing them leaves no
/// offset beyond `limit` (the backend's, as in check_shift()).
inline void check_removal(const PositionShifts& shifts, std::int64_t num_tokens, std::int64_t first,
                          std::int64_t count, std::int64_t limit) {
  check_token_range("remove", num_tokens, first, count);
  check_pieces(shifts, first + count, [&](const PositionShift& piece) {
    if (piece.offset + count > limit)
      fail<ValueError>("remove: positions would be ", piece.offset + count,
                       " beyond their tokens, at most ", limit);
  });
}

/// Raises FormatError if positions of tokens still to come are divided. No saved sequence has such
/// positions.
inline void check_saved(const PositionShifts& shifts) {
  if (!shifts.pieces().empty() && shifts.pieces().back().divisor != 1)
    fail<FormatError>("saved state: positions of tokens to come are divided by ",
                      shifts.pieces().back().divisor, ", 1 expected");
}

/// Whether a saved piece may come after a piece that begins at token `last`, in a sequence of
/// `num_tokens` tokens.
inline bool is_next_piece(const PositionShift& piece, std::int64_t last, std::int64_t num_tokens) {
  return piece.first > last && piece.first <= num_tokens && piece.divisor >= 1 &&
         piece.divisor <= PositionShifts::kMostDivisor;
}

}  // namespace detail

LOWRANKKV_NAMESPACE_END
