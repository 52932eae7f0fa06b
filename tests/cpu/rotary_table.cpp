// SPDX-License-Identifier: Apache-2.0
// Cosines and sines of any position, to f32 rounding.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <random>
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

TEST_CASE("tiles of keys are rotated as rows are, and no other number is touched") {
  std::mt19937_64 random(3);
  for (const RopeConfig& rope : support::rope_variants()) {
    for (const int dim : {32, 256}) {
      if (!rope.frequencies.empty() && dim != 32) continue;  // given for 32 channels
      const std::vector<double> frequencies = rope_frequencies(rope, dim);
      const cpu::RotaryTable table(rope, dim);
      for (const int count : {1, 5, 16, 31, 64, 150}) {
        const int stride = count + 3;
        const std::vector<float> before = support::gaussian_rows(random, dim * stride);
        const std::int64_t position = std::int64_t{count} * 997 - 31000;
        std::vector<float> tile = before;
        table.rotate(position, count, tile.data(), stride);
        const auto at = [&](const std::vector<float>& rows, int channel, int token) {
          return rows[static_cast<std::size_t>(channel * stride + token)];
        };
        for (int token = 0; token < stride; ++token) {
          std::vector<float> row;
          for (int channel = 0; channel < dim; ++channel) row.push_back(at(before, channel, token));
          if (token < count) apply_rope(row.data(), frequencies, position + token, rope.pairing);
          for (int channel = 0; channel < dim; ++channel) {
            const float expected = row[static_cast<std::size_t>(channel)];
            if (token < count)
              REQUIRE(std::abs(at(tile, channel, token) - expected) < 2e-5);
            else
              REQUIRE(at(tile, channel, token) == expected);
          }
        }
      }
    }
  }
}

}  // namespace rotary_table_tests
