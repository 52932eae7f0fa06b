// SPDX-License-Identifier: Apache-2.0
// Thresholds of residuals, by percentile.
#include <doctest/doctest.h>

#include <Eigen/Dense>
#include <random>

#include "lowrankkv/calibrate/residual_thresholds.hpp"
#include "support/random_model.hpp"

namespace residual_thresholds_tests {

using namespace lowrankkv;
using Eigen::MatrixXd;
using support::random_model;

TEST_CASE("residual thresholds are percentiles") {
  const MatrixXd rows = (MatrixXd(4, 2) << 1, 1, 2, 2, 3, 3, 4, 4).finished();
  const MatrixXd axis = (MatrixXd(2, 1) << 1, 0).finished();
  CHECK(calibrate::residual_percentile(rows, axis, 0.5) == doctest::Approx(2.0));
  CHECK(calibrate::residual_percentile(rows, axis, 1.0) == doctest::Approx(4.0));
  CHECK(calibrate::residual_percentile(rows, axis, 0.0) == doctest::Approx(1.0));
  CHECK_THROWS_AS(calibrate::residual_percentile(rows, axis, 1.5), ValueError);
  std::mt19937_64 random(4);
  const CacheShape shape{2, 1, 16};
  const auto model = random_model(random, shape, 1, 300);
  LayerBasis basis = model[0].basis({.key_ratio = 0.5, .value_ratio = 0.5});
  calibrate::set_residual_thresholds(model[0], {}, 0.9, basis);
  CHECK(basis.heads[0].key_threshold > 0.0F);
  const float at90 = basis.heads[0].key_threshold;
  calibrate::set_residual_thresholds(model[0], {}, 0.5, basis);
  CHECK(basis.heads[0].key_threshold < at90);
}

}  // namespace residual_thresholds_tests
