// SPDX-License-Identifier: Apache-2.0
// Positions of tokens that were shifted, divided, truncated or removed, against a plain list of
// positions.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "lowrankkv/core/position_shifts.hpp"

namespace position_shifts_tests {

using namespace lowrankkv;
using Random = std::mt19937_64;

TEST_CASE("positions are what was asked for, token by token: sums, and quotients rounded down") {
  Random random(6);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int round = 0; round < 200; ++round) {
    PositionShifts shifts;
    std::vector<std::int64_t> expected(60);
    std::iota(expected.begin(), expected.end(), 0);
    for (int i = 0; i < 10; ++i) {
      const int what = draw(0, 8);
      if (what == 0) {
        const std::size_t length = static_cast<std::size_t>(draw(1, 59));
        shifts.truncate(static_cast<std::int64_t>(length));
        for (std::size_t token = length; token < expected.size(); ++token)
          expected[token] = expected[token - 1] + 1;
        continue;
      }
      if (what == 1) {
        const int count = draw(0, 20), begin = draw(0, 59 - count);
        shifts.remove(begin, count);
        expected.erase(expected.begin() + begin, expected.begin() + begin + count);
        while (expected.size() < 60) expected.push_back(expected.back() + 1);
        continue;
      }
      if (what <= 3) {
        const int count = draw(0, 59), begin = draw(0, 59 - count), divisor = draw(1, 4);
        shifts.divide(begin, count, divisor);
        for (int token = begin; token < begin + count; ++token) {
          std::int64_t& position = expected[static_cast<std::size_t>(token)];
          position = static_cast<std::int64_t>(std::floor(static_cast<double>(position) / divisor));
        }
        continue;
      }
      const int first = draw(0, 59), delta = draw(-3, 3);
      shifts.add(first, delta);
      for (std::size_t token = static_cast<std::size_t>(first); token < expected.size(); ++token)
        expected[token] += delta;
    }
    for (std::size_t token = 0; token < expected.size(); ++token)
      REQUIRE(shifts.position(static_cast<std::int64_t>(token)) == expected[token]);
    REQUIRE(shifts.piece(60).divisor == 1);
    REQUIRE(shifts.bytes() == 24 * shifts.pieces().size());
    PositionShift last;
    for (const PositionShift& piece : shifts.pieces())
      REQUIRE(!std::exchange(last, piece).maps_like(piece));  // as few pieces as can be
    const int first = draw(0, 59), count = draw(0, 60 - first);
    std::int64_t next = first;
    shifts.for_each(first, count,
                    [&](std::int64_t token, std::int64_t length, std::int64_t position) {
                      REQUIRE(token == next);
                      for (std::int64_t i = 0; i < length; ++i)
                        REQUIRE(position + i == expected[static_cast<std::size_t>(token + i)]);
                      next += length;
                    });
    REQUIRE(next == first + count);
  }
}

TEST_CASE("positions of tokens behind those that were removed") {
  PositionShifts shifts;
  std::vector<std::int64_t> positions;
  for (int i = 0; i < 200; ++i) positions.push_back(i);
  Random random(12);
  for (int step = 0; step < 300 && positions.size() > 20; ++step) {
    const std::int64_t first = static_cast<std::int64_t>(random() % (positions.size() - 1));
    if (step % 3 == 0) {
      const std::int64_t count = static_cast<std::int64_t>(random() % 4);
      if (first + count > static_cast<std::int64_t>(positions.size()) - 1) continue;
      shifts.remove(first, count);
      positions.erase(positions.begin() + first, positions.begin() + first + count);
    } else {
      const std::int64_t delta = static_cast<std::int64_t>(random() % 9) - 4;
      shifts.add(first, delta);
      for (std::size_t i = static_cast<std::size_t>(first); i < positions.size(); ++i)
        positions[i] += delta;
    }
    for (std::size_t i = 0; i < positions.size(); ++i)
      REQUIRE(shifts.position(static_cast<std::int64_t>(i)) == positions[i]);
    std::int64_t last = 0;
    for (const PositionShift& piece : shifts.pieces())
      REQUIRE(std::exchange(last, piece.offset) != piece.offset);
  }
  CHECK_THROWS_AS(detail::check_removal(shifts, 100, 50, 51, 1000), ShapeError);
  PositionShifts far;
  far.add(60, 990);
  CHECK_THROWS_WITH_AS(detail::check_removal(far, 100, 50, 11, 1000),
                       "remove: positions would be 1001 beyond their tokens, at most 1000",
                       ValueError);
  detail::check_removal(far, 100, 50, 10, 1000);
}

}  // namespace position_shifts_tests
