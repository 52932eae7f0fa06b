// SPDX-License-Identifier: Apache-2.0
// Chains of factors: their start, and gradients against central differences.
#include "lowrankkv/train/factor_chain.hpp"

#include <doctest/doctest.h>

#include <vector>

#include "support/random_projectors.hpp"

namespace factor_chain_tests {

using namespace lowrankkv;
using Eigen::MatrixXd;
using support::Random;
using support::uniform;

TEST_CASE("a chain starts as the identity, at any depth and width") {
  Random random(410);
  for (int round = 0; round < 100; ++round) {
    const int rows = uniform(random, 1, 9), cols = uniform(random, 1, 9);
    const int depth = uniform(random, 1, 4);
    const int hidden = std::min(rows, cols) + uniform(random, 0, 5);
    const auto chain = train::identity_chain(rows, cols, hidden, depth);
    CHECK(chain.size() == static_cast<std::size_t>(depth));
    CHECK(calibrate::fold(chain) == MatrixXd::Identity(rows, cols));
    if (depth > 1) {
      CHECK(chain.front().cols() == hidden);
      CHECK(chain.back().rows() == hidden);
      if (depth > 2) CHECK(chain[1] == MatrixXd::Identity(hidden, hidden));
    }
  }
  CHECK_THROWS_WITH_AS(train::identity_chain(0, 3, 4, 2),
                       "chain: rows 0, cols 3; both must be at least 1", ShapeError);
  CHECK_THROWS_WITH_AS(train::identity_chain(3, 3, 4, 0), "chain: num_factors 0, at least 1 needed",
                       ShapeError);
  CHECK_THROWS_WITH_AS(train::identity_chain(5, 4, 3, 2),
                       "chain: hidden 3, below the 4 of an identity [5, 4]", ShapeError);
  CHECK(train::identity_chain(5, 4, 0, 1).size() == 1);  // one factor has no hidden width
}

TEST_CASE("gradients of factors are those of central differences") {
  Random random(411);
  double worst = 0.0;
  for (int round = 0; round < 60; ++round) {
    const int depth = uniform(random, 1, 4);
    std::vector<MatrixXd> chain;
    for (int n = 0, rows = uniform(random, 1, 6); n < depth; ++n) {
      const int cols = uniform(random, 1, 6);
      chain.emplace_back(0.7 * support::gaussian(random, rows, cols));
      rows = cols;
    }
    const MatrixXd product = calibrate::fold(chain);
    const MatrixXd weight = support::gaussian(random, product.rows(), product.cols());
    const auto value = [&] {
      return (weight.array() * calibrate::fold(chain).array().sin()).sum();
    };
    const auto gradients =
        train::chain_gradients(chain, MatrixXd(weight.array() * product.array().cos()));
    REQUIRE(gradients.size() == chain.size());
    for (std::size_t n = 0; n < chain.size(); ++n) {
      REQUIRE(gradients[n].rows() == chain[n].rows());
      REQUIRE(gradients[n].cols() == chain[n].cols());
      worst = std::max(worst, support::gradient_error(chain[n], gradients[n], value));
    }
  }
  MESSAGE("largest difference from central differences: ", worst);
  CHECK(worst < 2e-8);
  const std::vector<MatrixXd> chain{MatrixXd::Ones(2, 3), MatrixXd::Ones(3, 4)};
  CHECK_THROWS_WITH_AS(train::chain_gradients(chain, MatrixXd::Ones(3, 4)),
                       "rows: chain 2, gradient 3", ShapeError);
  CHECK_THROWS_WITH_AS(train::chain_gradients(chain, MatrixXd::Ones(2, 5)),
                       "cols: chain 4, gradient 5", ShapeError);
  CHECK_THROWS_WITH_AS(train::chain_gradients({}, MatrixXd::Ones(2, 5)),
                       "projector: num_factors 0, at least 1 needed", ShapeError);
}

}  // namespace factor_chain_tests
