// SPDX-License-Identifier: Apache-2.0
// Bits go where they lose least.
#include <doctest/doctest.h>

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "lowrankkv/calibrate/allocate_bits.hpp"

namespace allocate_bits_tests {

using namespace lowrankkv;
using Eigen::VectorXd;

TEST_CASE("more bits never leave a larger error, whatever the errors of widths are") {
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> uniform;
  const std::vector<int> widths{1, 2, 3, 5, 8};
  for (int trial = 0; trial < 20; ++trial) {
    std::vector<Eigen::MatrixXd> errors;
    for (int spectrum = 0; spectrum < 3; ++spectrum)
      errors.push_back(Eigen::MatrixXd::NullaryExpr(
          7, 6, [&] { return std::exp(6.0 * uniform(random)); }));  // not even falling
    double last = std::numeric_limits<double>::infinity();
    for (int budget = 0; budget <= 190; budget += 3) {
      const auto bits = calibrate::allocate_by_errors(errors, budget, widths);
      double error = 0.0;
      int used = 0;
      for (std::size_t spectrum = 0; spectrum < 3; ++spectrum) {
        for (std::size_t channel = 0; channel < 7; ++channel) {
          const auto width = std::find(widths.begin(), widths.end(), bits[spectrum][channel]);
          const auto column = bits[spectrum][channel] == 0 ? 0 : 1 + (width - widths.begin());
          error += errors[spectrum](static_cast<Eigen::Index>(channel), column);
          used += bits[spectrum][channel];
        }
      }
      REQUIRE(used <= budget);
      REQUIRE(error <= last * (1.0 + 1e-12));
      last = error;
    }
    // With all bits, every channel has the width with the smallest error.
    double least = 0.0;
    for (const Eigen::MatrixXd& own : errors) least += own.rowwise().minCoeff().sum();
    CHECK(last == doctest::Approx(least));
  }
  CHECK_THROWS_WITH_AS(calibrate::allocate_by_errors(
                           std::vector<Eigen::MatrixXd>{Eigen::MatrixXd::Ones(2, 4)}, 9.0, widths),
                       "allocate_bits: spectrum 0 has errors of 4 widths, expected 6", ShapeError);
}

TEST_CASE("bits: no other allocation of at most as many loses less") {
  std::mt19937_64 random(2);
  const std::vector<int> widths{2, 3, 4, 6, 8};
  for (int trial = 0; trial < 30; ++trial) {
    std::vector<VectorXd> energies;
    for (int spectrum = 0; spectrum < 2; ++spectrum)
      energies.push_back(VectorXd::NullaryExpr(
          2, [&] { return std::exp(4.0 * std::uniform_real_distribution<double>()(random)); }));
    const double budget = static_cast<double>(random() % 30);
    const auto bits = calibrate::allocate_bits(energies, budget, widths);
    const auto cost = [&](const std::vector<int>& all) {
      double sum = 0.0;
      for (int i = 0; i < 4; ++i)
        sum += energies[static_cast<std::size_t>(i / 2)][i % 2] *
               calibrate::gaussian_distortion(all[static_cast<std::size_t>(i)]);
      return sum;
    };
    std::vector<int> got;
    int used = 0;
    for (const auto& spectrum : bits) {
      for (const auto width : spectrum) {
        got.push_back(width);
        used += width;
      }
    }
    REQUIRE(used <= budget);
    // Optimal for the bits it used: no allocation of as many bits is better.
    double best = std::numeric_limits<double>::infinity();
    const int options[] = {0, 2, 3, 4, 6, 8};
    for (int code = 0; code < 1296; ++code) {
      const std::vector<int> all{options[code % 6], options[code / 6 % 6], options[code / 36 % 6],
                                 options[code / 216]};
      if (all[0] + all[1] + all[2] + all[3] <= used) best = std::min(best, cost(all));
    }
    // Steps that did not fit leave a gap of at most one step.
    REQUIRE(cost(got) <= best * 1.30 + 1e-12);
  }
  const std::vector<VectorXd> many{VectorXd::LinSpaced(50, 10.0, 0.1),
                                   VectorXd::LinSpaced(50, 100.0, 1.0)};
  const auto bits = calibrate::allocate_bits(many, 200.0, widths);
  for (const auto& spectrum : bits) CHECK(std::is_sorted(spectrum.rbegin(), spectrum.rend()));
  CHECK(bits[1][0] > bits[0][0]);
  CHECK_THROWS_AS(calibrate::allocate_bits(many, 10.0, std::vector<int>{3, 2}), ValueError);
  CHECK_THROWS_AS(calibrate::allocate_bits(std::vector<VectorXd>{-VectorXd::Ones(2)}, 10.0, widths),
                  ValueError);
}

}  // namespace allocate_bits_tests
