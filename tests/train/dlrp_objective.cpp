// SPDX-License-Identifier: Apache-2.0
// DLRP's objective: eq. 7 and 9, and the gradient with respect to every factor of a model.
#include "lowrankkv/train/dlrp_objective.hpp"

#include <doctest/doctest.h>

#include <limits>
#include <vector>

#include "lowrankkv/train/low_rank_projectors.hpp"
#include "support/random_projectors.hpp"

namespace dlrp_objective_tests {

using namespace lowrankkv;
using Eigen::MatrixXd;
using support::Random;
using train::DlrpGeometry;

TEST_CASE("the objective's gradient is that of central differences, at full and at low rank") {
  Random random(440);
  double worst = 0.0;
  for (int round = 0; round < 12; ++round) {
    const auto geometry = round % 2 == 0 ? DlrpGeometry::before_rope : DlrpGeometry::after_rope;
    auto projectors = support::random_projectors(random, geometry);
    if (round % 3 == 0)
      projectors =
          train::low_rank_projectors(projectors, support::random_ranks(random, projectors));
    const double alpha = round % 4 == 3 ? 0.0 : 0.3;
    const support::SineLoss loss(random, projectors);
    const auto value = [&] {
      double sum = loss.value(train::fold_chains(projectors));
      for (const MatrixXd& factor : projectors.factors) sum += alpha * factor.norm();
      return sum;
    };
    const auto products = train::fold_chains(projectors);
    std::vector<MatrixXd> gradients;
    const train::Objective objective = train::dlrp_objective(
        projectors, loss.value(products), loss.gradients(products), alpha, gradients);
    CHECK(objective.total == doctest::Approx(value()).epsilon(1e-12));
    CHECK(objective.task == loss.value(products));
    CHECK(objective.total == objective.task + alpha * objective.regulariser);
    if (alpha == 0.0) CHECK(objective.regulariser == 0.0);
    REQUIRE(gradients.size() == projectors.factors.size());
    for (std::size_t i = 0; i < gradients.size(); i += 1 + gradients.size() / 7)
      worst = std::max(worst, support::gradient_error(projectors.factors[i], gradients[i], value));
  }
  MESSAGE("largest difference from central differences: ", worst);
  CHECK(worst < 1e-7);
}

TEST_CASE("losses and gradients that do not fit are refused, and nothing changes") {
  Random random(441);
  train::DlrpOptions options;
  options.hidden = 4;
  const auto projectors = train::identity_projectors({2, 1, 4}, 1, options);
  const auto products = train::fold_chains(projectors);
  std::vector<MatrixXd> gradients{MatrixXd::Constant(1, 1, 3.0)};
  const auto refused = [&](double task, auto&& change) {
    auto of_products = products;
    change(of_products);
    train::dlrp_objective(projectors, task, of_products, 0.1, gradients);
  };
  const auto nothing = [](auto&) {};
  CHECK_THROWS_WITH_AS(refused(std::numeric_limits<double>::infinity(), nothing),
                       "task loss: inf, finite expected", ValueError);
  CHECK_THROWS_WITH_AS(refused(1.0, [](auto& g) { g.pop_back(); }),
                       "chains: projectors 6, gradients 5", ShapeError);
  CHECK_THROWS_WITH_AS(refused(1.0, [](auto& g) { g[3] = MatrixXd::Ones(4, 3); }),
                       "cols: chain 4, gradient 3", ShapeError);
  CHECK_THROWS_WITH_AS(refused(1.0, [](auto& g) { g[5](1, 1) = -HUGE_VAL; }),
                       "gradient of layer 0, output 1: its norm is inf, finite expected",
                       ValueError);
  CHECK(gradients.size() == 1);
  CHECK(gradients[0](0, 0) == 3.0);
  CHECK_THROWS_WITH_AS(train::add_regulariser(projectors, 1.0, gradients),
                       "factors: projectors 12, gradients 1", ShapeError);
}

}  // namespace dlrp_objective_tests
