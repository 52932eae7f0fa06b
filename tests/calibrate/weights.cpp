// SPDX-License-Identifier: Apache-2.0
// Moments from the weights of projections, without a text.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "lowrankkv/calibrate/weights.hpp"
#include "lowrankkv/diagnostics/spectra.hpp"
#include "support/matrices.hpp"

namespace weights_tests {

using namespace lowrankkv;
using Eigen::MatrixXd;
using Eigen::VectorXd;
using support::FloatRows;
using support::Random;
using support::relative_distance;

TEST_CASE("moments from weights are the moments of the activations") {
  Random random(33);
  const int hidden = 20, heads = 3, dim = 6, n = 200;
  const FloatRows weight(support::gaussian(random, heads * dim, hidden));
  MatrixXd mixed = support::gaussian(random, n, hidden) * support::gaussian(random, hidden, hidden);
  mixed.rowwise() += support::gaussian(random, 1, hidden).row(0);
  const FloatRows input(mixed);
  const std::vector<float> bias = support::row_major(support::gaussian(random, heads * dim, 1));
  calibrate::Moments of_input(hidden);
  of_input.add(input.view());

  for (const bool biased : {false, true}) {
    MatrixXd keys = input.matrix * weight.matrix.transpose();
    if (biased) keys.rowwise() += support::from_row_major(bias, 1, heads * dim).row(0);
    const calibrate::Moments joint = biased
                                         ? calibrate::weight_moments(weight.view(), of_input, bias)
                                         : calibrate::weight_moments(weight.view(), of_input);
    CHECK(joint.count == n);
    CHECK(relative_distance(joint.second, keys.transpose() * keys) < 1e-13);
    CHECK(relative_distance(joint.first, keys.colwise().sum().transpose()) < 1e-13);
    const MatrixXd around = keys.rowwise() - keys.colwise().mean();
    CHECK(relative_distance(joint.centred(), around.transpose() * around) < 1e-12);
    const auto per_head = calibrate::head_moments(joint, heads);
    REQUIRE(per_head.size() == heads);
    for (int head = 0; head < heads; ++head) {
      const MatrixXd own = keys.middleCols(head * dim, dim);
      CHECK(relative_distance(per_head[static_cast<std::size_t>(head)].second,
                              own.transpose() * own) < 1e-13);
      CHECK(relative_distance(per_head[static_cast<std::size_t>(head)].first,
                              own.colwise().sum().transpose()) < 1e-13);
      CHECK(per_head[static_cast<std::size_t>(head)].count == n);
    }
    // One head's rows alone: the same.
    const MatrixView one(weight.values.data() + dim * hidden, dim, hidden);
    if (!biased)
      CHECK(relative_distance(calibrate::weight_moments(one, of_input).second, per_head[1].second) <
            1e-13);
  }

  const auto from_mean = calibrate::weight_moments(weight.view(), of_input.second / n, n);
  CHECK(relative_distance(from_mean.second,
                          calibrate::weight_moments(weight.view(), of_input).second) < 1e-13);
  CHECK(from_mean.first.isZero(0.0));
  // Without whitening: the left singular vectors of the weights and their squared singular values.
  const auto plain = calibrate::weight_moments(weight.view());
  CHECK(relative_distance(plain.second, calibrate::weight_moments(
                                            weight.view(), MatrixXd::Identity(hidden, hidden), 1.0)
                                            .second) < 1e-14);
  CHECK(relative_distance(calibrate::principal_axes(plain.second).values.cwiseSqrt(),
                          diagnostics::singular_values(weight.matrix)) < 1e-7);

  CHECK_THROWS_WITH_AS(calibrate::weight_moments(weight.view(), calibrate::Moments(8)),
                       "hidden: weight 20, second moment 8", ShapeError);
  CHECK_THROWS_WITH_AS(calibrate::weight_moments(weight.view(), of_input, std::vector<float>(4)),
                       "channels: weight 18, bias 4", ShapeError);
  CHECK_THROWS_WITH_AS(calibrate::weight_moments(weight.view(), MatrixXd::Zero(20, 19), 1.0),
                       "hidden: second moment has 20 rows, 19 columns", ShapeError);
  CHECK_THROWS_AS(calibrate::weight_moments(weight.view(), MatrixXd::Zero(20, 20), -1.0),
                  ValueError);
  CHECK_THROWS_WITH_AS(calibrate::head_moments(plain, 4),
                       "num_kv_heads: 4 does not divide the joint width 18", ShapeError);
}

TEST_CASE("moments rotated by distances are the moments of rows rotated by them") {
  Random random(34);
  constexpr int dim = 10, n = 50;
  RopeConfig rope;
  rope.keys = Rope::pre;
  rope.pairing = RopePairing::interleaved;
  const cpu::RotaryTable rotary(rope, dim);
  const std::vector<std::int64_t> distances{0, 3, 17, 400};
  const MatrixXd rows = support::gaussian(random, n, dim);
  calibrate::Moments moments(dim), expected(dim);
  const std::vector<float> values = support::row_major(rows);
  moments.add({values.data(), n, dim});
  for (const std::int64_t distance : distances) {
    std::vector<float> rotated = values;
    for (int row = 0; row < n; ++row) rotary.rotate_row(distance, rotated.data() + row * dim);
    expected.add({rotated.data(), n, dim});
  }
  const calibrate::Moments found = calibrate::rotated_moments(moments, rotary, distances);
  CHECK(found.count == n);
  CHECK(relative_distance(found.second, expected.second / 4.0) < 1e-5);
  CHECK(relative_distance(found.first, expected.first / 4.0) < 1e-5);
}

TEST_CASE("whitened weights lose least on the activations, plain ones on the weights") {
  Random random(34);
  const int hidden = 16, dim = 8, rank = 3;
  const FloatRows weight(support::gaussian(random, dim, hidden));
  const VectorXd scale = VectorXd::LinSpaced(hidden, 3.0, 0.05);
  const FloatRows input(support::gaussian(random, 500, hidden) * scale.asDiagonal());
  calibrate::Moments of_input(hidden);
  of_input.add(input.view());
  const MatrixXd whitened =
      calibrate::principal_axes(calibrate::weight_moments(weight.view(), of_input).second)
          .vectors.leftCols(rank);
  const MatrixXd plain = calibrate::principal_axes(calibrate::weight_moments(weight.view()).second)
                             .vectors.leftCols(rank);
  const auto missed = [](const MatrixXd& columns, const MatrixXd& basis) {
    return (columns - basis * basis.transpose() * columns).squaredNorm();
  };
  const MatrixXd keys = weight.matrix * input.matrix.transpose();
  CHECK(missed(keys, whitened) < 0.98 * missed(keys, plain));
  CHECK(missed(weight.matrix, plain) < 0.98 * missed(weight.matrix, whitened));
}

}  // namespace weights_tests
