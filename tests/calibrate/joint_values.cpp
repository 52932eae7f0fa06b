// SPDX-License-Identifier: Apache-2.0
// Joint values against head-wise ones of the same budget, and what output projections absorb.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "lowrankkv/calibrate/joint_values.hpp"
#include "support/matrices.hpp"

namespace joint_values_tests {

using namespace lowrankkv;
using Eigen::MatrixXd;
using Eigen::VectorXd;
using support::FloatRows;
using support::Random;
using support::relative_distance;
using support::uniform;

TEST_CASE("joint values lose no more than head-wise ones of the same budget") {
  Random random(36);
  double largest = 0.0, smallest = 1.0;
  for (int round = 0; round < 300; ++round) {
    const int heads = uniform(random, 1, 6), dim = uniform(random, 1, 10),
              n = uniform(random, 1, 80), width = heads * dim;
    MatrixXd values = support::gaussian(random, n, width);
    if (round % 2 == 0)
      values = values * support::gaussian(random, width, width);  // correlated heads
    if (round % 7 == 0) values.rightCols(width - dim).setZero();  // all energy in one head
    const FloatRows rows(values);
    calibrate::Moments moments(width);
    moments.add(rows.view());
    for (int rank = 0; rank <= dim; ++rank) {
      const double joint = calibrate::joint_error(moments, heads * rank),
                   apart = calibrate::head_wise_error(moments, heads, rank);
      CHECK(joint <= apart + 1e-12 * moments.second.trace());
      if (apart > 1e-9 * moments.second.trace())
        largest = std::max(largest, joint / apart), smallest = std::min(smallest, joint / apart);
    }
    // The maps have the error that joint_error predicts.
    const int rank = uniform(random, 1, width);
    const auto maps = calibrate::joint_values(moments, heads, rank);
    CHECK((maps.value_down.transpose() * maps.value_down - MatrixXd::Identity(rank, rank))
              .cwiseAbs()
              .maxCoeff() < 1e-12);
    MatrixXd decoded(n, width);
    const MatrixXd coefficients = rows.matrix * maps.value_down;
    REQUIRE(maps.output_up.size() == static_cast<std::size_t>(heads));
    for (int head = 0; head < heads; ++head)
      decoded.middleCols(head * dim, dim) =
          coefficients * maps.output_up[static_cast<std::size_t>(head)];
    CHECK((rows.matrix - decoded).squaredNorm() ==
          doctest::Approx(calibrate::joint_error(moments, rank))
              .epsilon(1e-9)
              .scale(1e-3 * moments.second.trace()));
  }
  CHECK(largest > 0.999);
  CHECK(smallest < 0.05);
  MESSAGE("joint / head-wise error: ", smallest, " to ", largest);
  // Identical heads: one head's basis serves all of them.
  const MatrixXd one = support::gaussian(random, 50, 4);
  MatrixXd same(50, 12);
  same << one, one, one;
  calibrate::Moments moments(12);
  moments.add(FloatRows(same).view());
  CHECK(calibrate::joint_error(moments, 4) < 1e-12 * moments.second.trace());
  CHECK(calibrate::head_wise_error(moments, 3, 1) > 0.1 * moments.second.trace());
  CHECK_THROWS_WITH_AS(calibrate::joint_values(moments, 3, 13),
                       "rank: joint rank 13, num_kv_heads * head_dim 12", ShapeError);
  CHECK_THROWS_WITH_AS(calibrate::joint_values(moments, 5, 2),
                       "num_kv_heads: 5 does not divide the joint width 12", ShapeError);
  CHECK_THROWS_WITH_AS(calibrate::head_wise_error(moments, 3, 5),
                       "rank: rank_per_head 5, head_dim 4", ShapeError);
  CHECK_THROWS_AS(calibrate::joint_error(moments, -1), ShapeError);
}

TEST_CASE("an absorbed output projection reads coefficients as the engine reads decoded values") {
  Random random(37);
  const int heads = 2, dim = 5, rank = 4, hidden = 7, n = 9;
  const FloatRows rows(support::gaussian(random, n, heads * dim));
  calibrate::Moments moments(heads * dim);
  moments.add(rows.view());
  const auto maps = calibrate::joint_values(moments, heads, rank);
  const MatrixXd projection = support::gaussian(random, heads * dim, hidden),
                 coefficients = rows.matrix * maps.value_down;
  MatrixXd expected = MatrixXd::Zero(1, hidden), folded = expected;
  for (int head = 0; head < heads; ++head) {
    const MatrixXd alpha = support::gaussian(random, 1, n).cwiseAbs();  // any weights
    const MatrixXd own = projection.middleRows(head * dim, dim),
                   up = maps.output_up[static_cast<std::size_t>(head)];
    expected += alpha * (coefficients * up) * own;
    folded += (alpha * coefficients) * calibrate::absorb_output(up, own);
  }
  CHECK(relative_distance(folded, expected) < 1e-13);
  CHECK_THROWS_WITH_AS(calibrate::absorb_output(maps.output_up[0], MatrixXd::Zero(6, 7)),
                       "head_dim: output_up 5, projection 6", ShapeError);
}

}  // namespace joint_values_tests
