// SPDX-License-Identifier: Apache-2.0
// Joint values against head-wise ones of the same budget, and what output projections absorb.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "lowrankkv/basis/joint_values.hpp"
#include "lowrankkv/calibrate/choose_rank.hpp"
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

TEST_CASE("a layer's joint basis decomposes each group around its mean") {
  Random random(38);
  const CacheShape shape{4, 4, 6};
  const int n = 200, width = shape.num_kv_heads * shape.head_dim;
  MatrixXd values = support::gaussian(random, n, width) * support::gaussian(random, width, width);
  values.leftCols(12).rowwise() += Eigen::RowVectorXd::Constant(12, 40.0);  // the first group
  const FloatRows rows(values), other(support::gaussian(random, n, width));
  calibrate::LayerMoments layer(shape);
  layer.add({other.view().data, n, 4, 6}, {other.view().data, n, 4, 6},
            {rows.view().data, n, 4, 6});
  calibrate::BasisOptions options{.key_ratio = 0.5, .value_ratio = 0.25};
  options.mean_share = 0.1;  // the other groups' means are chance
  const LayerBasis basis = calibrate::joint_basis(layer, options, 2);
  validate(JointValues{2}, basis, shape);
  CHECK(basis.heads[0].value_rank == 3);
  CHECK(basis.heads[1].value_mean.size() == 6);
  CHECK(basis.heads[2].value_mean.empty());
  for (int group = 0; group < 2; ++group) {
    MatrixXd own = rows.matrix.middleCols(12 * group, 12), decoded = MatrixXd::Zero(n, 12);
    MatrixXd coefficients = MatrixXd::Zero(n, 3);
    Eigen::RowVectorXd mean = Eigen::RowVectorXd::Zero(12);
    if (group == 0) mean = own.colwise().mean();
    own.rowwise() -= mean;
    for (int head = 0; head < 2; ++head) {
      const HeadBasis& maps = basis.heads[static_cast<std::size_t>(2 * group + head)];
      coefficients += own.middleCols(6 * head, 6) * support::from_row_major(maps.value_down, 6, 3);
      for (int i = 0; i < 6 && group == 0; ++i)
        CHECK(maps.value_mean[static_cast<std::size_t>(i)] == doctest::Approx(mean[6 * head + i]));
    }
    for (int head = 0; head < 2; ++head) {
      const HeadBasis& maps = basis.heads[static_cast<std::size_t>(2 * group + head)];
      decoded.middleCols(6 * head, 6) =
          coefficients * support::from_row_major(maps.value_down, 6, 3).transpose();
    }
    calibrate::Moments moments(12);
    moments.add(FloatRows(own).view());
    CHECK((own - decoded).squaredNorm() ==
          doctest::Approx(calibrate::joint_error(moments, 3)).epsilon(1e-4));
  }
  options.policy.centred = false;
  CHECK(calibrate::joint_basis(layer, options, 2).heads[0].value_mean.empty());
  options.value_energy = 0.9;
  const LayerBasis by_energy = calibrate::joint_basis(layer, options, 2);
  int largest = 0;
  for (const calibrate::Moments& moments : calibrate::head_moments(layer.values(), 2))
    largest = std::max(
        largest, calibrate::rank_by_energy(calibrate::principal_axes(moments.second).values, 0.9));
  CHECK(by_energy.heads[0].value_rank == largest);
  CHECK(by_energy.heads[3].value_rank == largest);
  CHECK_THROWS_WITH_AS(calibrate::joint_basis(layer, options, 3),
                       "joint values: heads_per_group 3, num_kv_heads 4", ShapeError);
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
