// SPDX-License-Identifier: Apache-2.0
// Runs of positions against a plain list of their states: removed, written, read.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "lowrankkv/core/row_runs.hpp"

namespace row_runs_tests {

using namespace lowrankkv;

namespace {

RowRuns runs_of(const std::vector<RowState>& states) {
  RowRuns runs;
  for (const RowState state : states) runs.append(state, 1);
  return runs;
}
std::vector<std::byte> written(const RowRuns& runs) {
  ByteWriter count;
  runs.write(count);
  std::vector<std::byte> bytes(count.size());
  ByteWriter out(bytes);
  runs.write(out);
  return bytes;
}
std::string refused(std::vector<int> numbers, std::int64_t most) {
  std::vector<std::byte> bytes;
  for (const int number : numbers) bytes.push_back(static_cast<std::byte>(number));
  ByteReader in(bytes);
  try {
    static_cast<void>(RowRuns::read(in, most));
  } catch (const FormatError& error) {
    return error.what();
  }
  return "nothing was raised";
}

}  // namespace

TEST_CASE("runs hold what a list of states holds, and are written in at most a byte a position") {
  std::mt19937_64 random(5);
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<RowState> states;
    const auto draw = [&](std::size_t below) { return random() % below; };
    for (std::size_t run = draw(12); run > 0; --run)
      states.insert(states.end(), 1 + draw(trial % 2 == 0 ? 3 : 9000),
                    static_cast<RowState>(draw(3)));
    RowRuns runs = runs_of(states);
    if (!states.empty()) {
      const std::size_t first = draw(states.size()), count = draw(states.size() - first + 1);
      states.erase(states.begin() + static_cast<std::ptrdiff_t>(first),
                   states.begin() + static_cast<std::ptrdiff_t>(first + count));
      runs.remove(static_cast<std::int64_t>(first), static_cast<std::int64_t>(count));
    }
    REQUIRE(runs == runs_of(states));
    const std::vector<std::byte> bytes = written(runs);
    CHECK(bytes.size() <= 8 + states.size());
    ByteReader in(bytes);
    const RowRuns read = RowRuns::read(in, runs.num_positions());
    CHECK(in.left() == 0);
    REQUIRE(read == runs);
    std::int32_t rows[3] = {0, 0, 0};
    bool found = true;
    for (std::size_t at = 0; at < states.size(); ++at) {
      const RowPlace place = read.find(static_cast<std::int64_t>(at));
      found =
          found && place.state == states[at] && place.row == rows[static_cast<int>(states[at])]++;
    }
    CHECK(found);
  }
}

TEST_CASE("runs of any length are read back") {
  for (const std::int64_t length : {1, 31, 32, 4095, 4096, 1 << 19, 1 << 26, 2147483647}) {
    RowRuns runs;
    runs.append(RowState::dropped, static_cast<std::int32_t>(length));
    const std::vector<std::byte> bytes = written(runs);
    ByteReader in(bytes);
    CHECK(RowRuns::read(in, length) == runs);
    ByteReader again(bytes);
    CHECK_THROWS_AS(static_cast<void>(RowRuns::read(again, length - 1)), FormatError);
  }
}

TEST_CASE("runs that cannot be are refused") {
  const auto one = [](std::vector<int> number) {
    number.insert(number.begin(), {1, 0, 0, 0, 0, 0, 0, 0});
    return number;
  };
  CHECK(refused(one({4 * 3 + 3}), 9) == "saved state: row state 3, at most 2");
  CHECK(refused(one({2}), 9) == "saved state: run 0 of a head has 0 positions, 1 to 9 expected");
  CHECK(refused(one({4 * 10 + 1}), 9) ==
        "saved state: run 0 of a head has 10 positions, 1 to 9 expected");
  CHECK(refused(one({255, 255, 255, 255, 32}), 9) ==
        "saved state: run 0 of a head has byte 32 as its fifth, at most 31 expected");
  CHECK(refused({2, 0, 0, 0, 0, 0, 0, 0, 4 * 3 + 1, 4 * 4 + 1}, 9) ==
        "saved state: runs 0 and 1 of a head are of one state, 1");
  CHECK(refused(one({}), 9).starts_with("saved state: 1 bytes expected"));
}

}  // namespace row_runs_tests
