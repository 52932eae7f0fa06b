// SPDX-License-Identifier: Apache-2.0
// The rotation that spreads a row over its channels.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "lowrankkv/quantizer/flat_rotation.hpp"

namespace flat_rotation_tests {

using namespace lowrankkv;

TEST_CASE("flat rotations are orthogonal and symmetric for every size, and flat") {
  for (int size = 1; size <= 160; ++size) {
    const std::vector<float> matrix = flat_rotation(size);
    const auto at = [&](int i, int j) {
      return static_cast<double>(matrix[static_cast<std::size_t>(i * size + j)]);
    };
    double worst = 0.0, largest = 0.0;
    for (int i = 0; i < size; ++i) {
      for (int j = 0; j < size; ++j) {
        double product = i == j ? -1.0 : 0.0;
        for (int k = 0; k < size; ++k) product += at(i, k) * at(j, k);
        worst = std::max({worst, std::abs(product), std::abs(at(i, j) - at(j, i))});
        largest = std::max(largest, std::abs(at(i, j)));
      }
    }
    REQUIRE(worst < 2e-6);
    REQUIRE(largest <= std::sqrt(2.0 / size) * 1.000001);
    if ((size & (size - 1)) == 0) REQUIRE(largest == doctest::Approx(1.0 / std::sqrt(size)));
  }
}

}  // namespace flat_rotation_tests
