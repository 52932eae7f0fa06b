// SPDX-License-Identifier: Apache-2.0
// The surrogate of the nuclear norm: theorem 3.1, its tighter forms, and gradients.
#include "lowrankkv/train/nuclear_surrogate.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "support/random_projectors.hpp"

namespace nuclear_surrogate_tests {

using namespace lowrankkv;
using Eigen::MatrixXd;
using support::Random;
using support::uniform;

std::vector<MatrixXd> random_chain(Random& random, int least, double spread) {
  const int depth = uniform(random, least, 5);
  std::vector<MatrixXd> chain;
  for (int n = 0, rows = uniform(random, 1, 8); n < depth; ++n) {
    const int cols = uniform(random, 1, 8);
    chain.emplace_back(std::exp(std::uniform_real_distribution<double>(-spread, spread)(random)) *
                       support::gaussian(random, rows, cols));
    rows = cols;
  }
  return chain;
}

TEST_CASE("the nuclear norm is below the product of norms, their mean's power and theorem 3.1") {
  Random random(420);
  for (int round = 0; round < 400; ++round) {
    const auto chain = random_chain(random, 2, 2.0);
    double product = 1.0, sum = 0.0;
    for (const MatrixXd& factor : chain) product *= factor.norm(), sum += factor.norm();
    const double norm = calibrate::nuclear_norm(calibrate::fold(chain));
    const double mean = train::mean_bound(chain).value, printed = train::printed_bound(chain).value;
    const double count = static_cast<double>(chain.size());
    CHECK(norm <= product * (1 + 1e-12));
    CHECK(product <= mean * (1 + 1e-12));
    CHECK(mean <= printed * (1 + 1e-12));
    CHECK(train::frobenius_sum(chain).value == doctest::Approx(sum).epsilon(1e-14));
    CHECK(mean == doctest::Approx(std::pow(sum / count, count)).epsilon(1e-13));
    CHECK(printed == doctest::Approx(std::pow(sum, count) / count).epsilon(1e-13));
  }
  // The first two are attained by D and its transpose; the printed one is then twice as large.
  const MatrixXd a = support::gaussian(random, 5, 7);
  const std::vector<MatrixXd> square{a, a.transpose()};
  const double norm = calibrate::nuclear_norm(calibrate::fold(square));
  CHECK(train::mean_bound(square).value == doctest::Approx(norm).epsilon(1e-12));
  CHECK(train::printed_bound(square).value == doctest::Approx(2.0 * norm).epsilon(1e-12));
  // Of one factor they are no bounds: an identity's nuclear norm is 4, its Frobenius norm 2.
  const std::vector<MatrixXd> one{MatrixXd::Identity(4, 4)};
  CHECK(train::frobenius_sum(one).value == 2.0);
  CHECK_THROWS_WITH_AS(train::mean_bound(one),
                       "projector: num_factors 1, the nuclear-norm bound needs at least 2",
                       ValueError);
}

TEST_CASE("gradients of the surrogate and of its bounds are those of central differences") {
  Random random(421);
  double worst = 0.0;
  for (int round = 0; round < 60; ++round) {
    auto chain = random_chain(random, 1, 0.5);
    const auto check = [&](auto&& function) {
      const train::ChainFunction at = function(chain);
      REQUIRE(at.gradients.size() == chain.size());
      for (std::size_t n = 0; n < chain.size(); ++n) {
        // Of norms near 0 differences tell little: the second derivative is 1 / norm.
        if (chain[n].norm() < 0.1) continue;
        worst = std::max(worst, support::gradient_error(chain[n], at.gradients[n], [&] {
                                  return function(chain).value;
                                }) / std::max(1.0, at.value));
      }
    };
    check([](const auto& of) { return train::frobenius_sum(of); });
    if (chain.size() < 2) continue;
    check([](const auto& of) { return train::mean_bound(of); });
    check([](const auto& of) { return train::printed_bound(of); });
  }
  MESSAGE("largest difference from central differences: ", worst);
  CHECK(worst < 2e-8);
  // A factor of zeros: a subgradient, and no NaN.
  const std::vector<MatrixXd> zeros{MatrixXd::Zero(2, 3), MatrixXd::Ones(3, 2)};
  CHECK(train::frobenius_sum(zeros).gradients[0] == MatrixXd::Zero(2, 3));
  CHECK(train::mean_bound(zeros).gradients[0] == MatrixXd::Zero(2, 3));
  CHECK_THROWS_WITH_AS(train::frobenius_sum({}), "surrogate: num_factors 0, at least 1 needed",
                       ShapeError);
  const std::vector<MatrixXd> endless{
      MatrixXd::Ones(1, 1), MatrixXd::Constant(1, 1, std::numeric_limits<double>::infinity())};
  CHECK_THROWS_WITH_AS(train::frobenius_sum(endless),
                       "surrogate: the norm of factor 1 is inf, finite expected", ValueError);
}

}  // namespace nuclear_surrogate_tests
