// SPDX-License-Identifier: Apache-2.0
// Rotary embedding, written plainly: both pairings, and the frequency scaling of Llama 3.
#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "lowrankkv/core/rope.hpp"

namespace rope_tests {

using namespace lowrankkv;

TEST_CASE(
    "rope turns pairs by position times frequency, in both pairings, and scaling follows Llama 3") {
  auto frequencies = rope_frequencies(8, 10000.0);
  CHECK(frequencies[0] == 1.0);
  CHECK(frequencies[3] == doctest::Approx(1e-3));
  std::vector<float> half{1, 2, 3, 4, 5, 6, 7, 8}, inter{1, 5, 2, 6, 3, 7, 4, 8};
  apply_rope(half.data(), frequencies, 17, RopePairing::half_split);
  apply_rope(inter.data(), frequencies, 17, RopePairing::interleaved);
  for (int i = 0; i < 4; ++i) {
    CHECK(half[static_cast<std::size_t>(i)] ==
          doctest::Approx(inter[static_cast<std::size_t>(2 * i)]));
    CHECK(half[static_cast<std::size_t>(i + 4)] ==
          doctest::Approx(inter[static_cast<std::size_t>(2 * i + 1)]));
  }
  CHECK(half[0] == doctest::Approx(std::cos(17.0) - 5 * std::sin(17.0)));
  auto scaled = rope_frequencies(128, 500000.0);
  const auto plain = scaled;
  scale_frequencies(scaled, {});
  CHECK(scaled.front() == plain.front());
  CHECK(scaled.back() == doctest::Approx(plain.back() / 8.0));
  CHECK_THROWS_WITH_AS(rope_frequencies(7, 1e4), "rope: head_dim must be even, given 7",
                       ShapeError);
}

}  // namespace rope_tests
