// SPDX-License-Identifier: Apache-2.0
// Cosines and sines of any position, to f32 rounding.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "lowrankkv/cpu/rotary_table.hpp"
#include "support/rope.hpp"

namespace rotary_table_tests {

using namespace lowrankkv;

TEST_CASE("angles of any position to f32 rounding") {
  for (const RopeConfig& rope : support::rope_variants()) {
    const std::vector<double> frequencies = rope_frequencies(rope, 32);
    const cpu::RotaryTable table(rope, 32);
    REQUIRE(table.num_pairs() == static_cast<int>(frequencies.size()));
    for (const std::int64_t position :
         {std::int64_t{0}, std::int64_t{1}, std::int64_t{63}, std::int64_t{64}, std::int64_t{4095},
          std::int64_t{131071}, std::int64_t{1} << 31, std::int64_t{-7}, std::int64_t{-70000}}) {
      constexpr int count = 150, stride = 160;
      std::vector<float> cosines(frequencies.size() * stride), sines(cosines.size());
      table.angles(position, count, cosines.data(), sines.data(), stride);
      for (std::size_t pair = 0; pair < frequencies.size(); ++pair) {
        for (int token = 0; token < count; ++token) {
          const double angle = frequencies[pair] * static_cast<double>(position + token);
          // f64 itself knows sin(2^31 f) to 2^31 * 2^-53 only.
          REQUIRE(std::abs(static_cast<double>(
                               cosines[pair * stride + static_cast<std::size_t>(token)]) -
                           std::cos(angle)) < 2e-6);
          REQUIRE(
              std::abs(static_cast<double>(sines[pair * stride + static_cast<std::size_t>(token)]) -
                       std::sin(angle)) < 2e-6);
        }
      }
    }
  }
}

}  // namespace rotary_table_tests
