// SPDX-License-Identifier: Apache-2.0
// The bases that follow from weights, thresholds, joint values and trained projectors.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "../support/random_layer.hpp"
#include "lowrankkv/calibrate/joint_values.hpp"
#include "lowrankkv/calibrate/projector.hpp"
#include "lowrankkv/calibrate/soft_threshold.hpp"
#include "lowrankkv/calibrate/weights.hpp"
#include "lowrankkv/diagnostics/spectra.hpp"

using namespace lowrankkv;
using Eigen::MatrixXd;
using Eigen::VectorXd;
using support::Random;

namespace {

int uniform(Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

/// An f32 copy of a matrix, row-major, and the f64 matrix of exactly these values.
struct Rows {
  explicit Rows(const MatrixXd& of)
      : values(support::row_major(of)), matrix(of.cast<float>().cast<double>()) {}
  MatrixView view() const { return {values.data(), matrix.rows(), matrix.cols()}; }
  std::vector<float> values;
  MatrixXd matrix;
};

double distance(const MatrixXd& a, const MatrixXd& b) {
  return (a - b).norm() / (b.norm() + 1e-300);
}

}  // namespace

TEST_CASE("moments from weights are the moments of the activations") {
  Random random(33);
  const int hidden = 20, heads = 3, dim = 6, n = 200;
  const Rows weight(support::gaussian(random, heads * dim, hidden));
  MatrixXd mixed = support::gaussian(random, n, hidden) * support::gaussian(random, hidden, hidden);
  mixed.rowwise() += support::gaussian(random, 1, hidden).row(0);
  const Rows input(mixed);
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
    CHECK(distance(joint.second, keys.transpose() * keys) < 1e-13);
    CHECK(distance(joint.first, keys.colwise().sum().transpose()) < 1e-13);
    const MatrixXd around = keys.rowwise() - keys.colwise().mean();
    CHECK(distance(joint.centred(), around.transpose() * around) < 1e-12);
    const auto per_head = calibrate::head_moments(joint, heads);
    REQUIRE(per_head.size() == heads);
    for (int head = 0; head < heads; ++head) {
      const MatrixXd own = keys.middleCols(head * dim, dim);
      CHECK(distance(per_head[static_cast<std::size_t>(head)].second, own.transpose() * own) <
            1e-13);
      CHECK(distance(per_head[static_cast<std::size_t>(head)].first,
                     own.colwise().sum().transpose()) < 1e-13);
      CHECK(per_head[static_cast<std::size_t>(head)].count == n);
    }
    // One head's rows alone: the same.
    const MatrixView one(weight.values.data() + dim * hidden, dim, hidden);
    if (!biased)
      CHECK(distance(calibrate::weight_moments(one, of_input).second, per_head[1].second) < 1e-13);
  }

  const auto from_mean = calibrate::weight_moments(weight.view(), of_input.second / n, n);
  CHECK(distance(from_mean.second, calibrate::weight_moments(weight.view(), of_input).second) <
        1e-13);
  CHECK(from_mean.first.isZero(0.0));
  // Without whitening: the left singular vectors of the weights and their squared singular values.
  const auto plain = calibrate::weight_moments(weight.view());
  CHECK(distance(plain.second,
                 calibrate::weight_moments(weight.view(), MatrixXd::Identity(hidden, hidden), 1.0)
                     .second) < 1e-14);
  CHECK(distance(calibrate::principal_axes(plain.second).values.cwiseSqrt(),
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
  CHECK(distance(found.second, expected.second / 4.0) < 1e-5);
  CHECK(distance(found.first, expected.first / 4.0) < 1e-5);
}

TEST_CASE("whitened weights lose least on the activations, plain ones on the weights") {
  Random random(34);
  const int hidden = 16, dim = 8, rank = 3;
  const Rows weight(support::gaussian(random, dim, hidden));
  const VectorXd scale = VectorXd::LinSpaced(hidden, 3.0, 0.05);
  const Rows input(support::gaussian(random, 500, hidden) * scale.asDiagonal());
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

TEST_CASE("the soft threshold approaches the hard one, and a threshold exists for every rank") {
  using calibrate::rank_by_threshold, calibrate::soft_threshold, calibrate::threshold_for_rank;
  CHECK(soft_threshold(3.0, 1.0, 0.5) == doctest::Approx(3.0 * std::tanh(1.0)));
  CHECK(soft_threshold(0.999, 1.0, 5.0) == 0.0);
  CHECK(soft_threshold(1.0, 1.0, 5.0) == 0.0);
  Random random(35);
  for (int round = 0; round < 50; ++round) {
    const int size = uniform(random, 1, 40);
    VectorXd values = support::gaussian(random, size, 1).cwiseAbs();
    std::sort(values.data(), values.data() + size, std::greater<>());
    for (int rank = 0; rank <= size; ++rank) {
      const double alpha = threshold_for_rank(values, rank);
      CHECK(rank_by_threshold(values, alpha) == rank);
      const VectorXd soft = soft_threshold(values, alpha, 4.0),
                     sharp = soft_threshold(values, alpha, 1e12);
      for (int i = 0; i < size; ++i) {
        CHECK(soft[i] <= values[i]);
        CHECK(soft[i] <= sharp[i]);
        CHECK(sharp[i] == doctest::Approx(i < rank ? values[i] : 0.0).epsilon(1e-9));
        if (i > 0) CHECK(soft[i] <= soft[i - 1]);
      }
    }
  }
  const VectorXd neighbours = (VectorXd(3) << std::nextafter(1.0, 2.0), 1.0, 0.0).finished();
  for (int rank = 0; rank <= 3; ++rank)
    CHECK(rank_by_threshold(neighbours, threshold_for_rank(neighbours, rank)) == rank);
  CHECK(threshold_for_rank({}, 0) == 0.0);
  const std::vector<double> alphas{0.0, 1.0, -0.5};
  CHECK(calibrate::compression_loss(alphas) ==
        doctest::Approx(1.0 + std::exp(-1.0) + std::exp(0.5)));
  CHECK(calibrate::compression_loss({}) == 0.0);
  const VectorXd tied = (VectorXd(3) << 2.0, 1.0, 1.0).finished(),
                 rising = (VectorXd(2) << 1.0, 2.0).finished();
  CHECK_THROWS_WITH_AS(threshold_for_rank(tied, 2),
                       "threshold: no alpha gives rank 2: the singular values on both sides are 1",
                       ValueError);
  CHECK_THROWS_WITH_AS(threshold_for_rank(tied, 4), "threshold: rank in [0, 3], given 4",
                       ValueError);
  CHECK_THROWS_WITH_AS(threshold_for_rank(rising, 1),
                       "threshold: singular value 1 is 2, expected in [0, 1], descending",
                       ValueError);
  CHECK_THROWS_WITH_AS(soft_threshold(1.0, 0.5, 0.0), "soft threshold: sharpness above 0, given 0",
                       ValueError);
  CHECK_THROWS_AS(soft_threshold(1.0, std::nan(""), 1.0), ValueError);
  CHECK_THROWS_AS(rank_by_threshold(tied, std::nan("")), ValueError);
}

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
    const Rows rows(values);
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
  moments.add(Rows(same).view());
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
  const Rows rows(support::gaussian(random, n, heads * dim));
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
  CHECK(distance(folded, expected) < 1e-13);
  CHECK_THROWS_WITH_AS(calibrate::absorb_output(maps.output_up[0], MatrixXd::Zero(6, 7)),
                       "head_dim: output_up 5, projection 6", ShapeError);
}

TEST_CASE("a chain folds to its product, and its factors' norms bound the nuclear norm") {
  Random random(38);
  double tightest = 0.0;
  for (int round = 0; round < 400; ++round) {
    const int count = uniform(random, 2, 5);
    std::vector<MatrixXd> chain;
    for (int n = 0, rows = uniform(random, 1, 8); n < count; ++n) {
      const int cols = uniform(random, 1, 8);
      chain.push_back(std::exp(std::uniform_real_distribution<double>(-2.0, 2.0)(random)) *
                      support::gaussian(random, rows, cols));
      rows = cols;
    }
    const MatrixXd product = calibrate::fold(chain);
    const VectorXd probe = support::gaussian(random, static_cast<int>(product.cols()), 1);
    VectorXd stepwise = probe;
    for (int n = count - 1; n >= 0; --n)
      stepwise = (chain[static_cast<std::size_t>(n)] * stepwise).eval();
    CHECK((product * probe - stepwise).norm() <= 1e-12 * stepwise.norm() + 1e-300);
    const double norm = calibrate::nuclear_norm(product),
                 bound = calibrate::nuclear_norm_bound(chain);
    CHECK(norm <= bound * (1 + 1e-12));
    tightest = std::max(tightest, norm / bound);
    double sum = 0.0;
    for (const MatrixXd& factor : chain) sum += factor.norm();
    CHECK(bound <= std::pow(sum, count) / count);  // the printed one
  }
  MESSAGE("largest nuclear norm / bound of random chains: ", tightest);
  // Attained: a matrix and its transpose; rank-one factors of equal norm that fit.
  const MatrixXd a = support::gaussian(random, 6, 9);
  const std::vector<MatrixXd> square{a, a.transpose()};
  CHECK(calibrate::nuclear_norm(calibrate::fold(square)) ==
        doctest::Approx(calibrate::nuclear_norm_bound(square)).epsilon(1e-12));
  std::vector<MatrixXd> line;
  const MatrixXd u = support::random_orthonormal(random, 7, 1);
  for (int n = 0; n < 4; ++n) line.push_back(1.3 * u * u.transpose());
  CHECK(calibrate::nuclear_norm(calibrate::fold(line)) ==
        doctest::Approx(calibrate::nuclear_norm_bound(line)).epsilon(1e-12));
  CHECK(calibrate::nuclear_norm(MatrixXd(support::random_orthonormal(random, 9, 4))) ==
        doctest::Approx(4.0));
  CHECK(calibrate::nuclear_norm(-3.0 * MatrixXd::Identity(2, 2)) == doctest::Approx(6.0));

  CHECK(calibrate::fold(std::vector<MatrixXd>{a}) == a);
  CHECK_THROWS_WITH_AS(calibrate::fold({}), "projector: num_factors 0, at least 1 needed",
                       ShapeError);
  CHECK_THROWS_WITH_AS(calibrate::fold(std::vector<MatrixXd>{a, a}),
                       "projector: factor 0 has 9 columns, factor 1 has 6 rows", ShapeError);
  CHECK_THROWS_WITH_AS(calibrate::nuclear_norm_bound(std::vector<MatrixXd>{a}),
                       "projector: num_factors 1, the nuclear-norm bound needs at least 2",
                       ValueError);
  CHECK_THROWS_AS(calibrate::nuclear_norm(MatrixXd::Constant(2, 2, std::nan(""))), ValueError);
}

TEST_CASE("projector ranks are the larger of a pair, by sigma squared") {
  Random random(39);
  const auto of = [&](const VectorXd& sigma) -> MatrixXd {
    const int n = static_cast<int>(sigma.size());
    return support::random_orthonormal(random, n, n) * sigma.asDiagonal() *
           support::random_orthonormal(random, n, n).transpose();
  };
  const MatrixXd narrow =
      of((VectorXd(4) << 10.0, 3.0, 0.1, 0.1)
             .finished());  // sigma^2: 100, 9, ...; sigma alone would say 2 at 0.9
  const MatrixXd wide = of((VectorXd(4) << 2.0, 2.0, 2.0, 0.1).finished());
  CHECK(calibrate::paired_rank(narrow, narrow, 0.9) == 1);
  CHECK(calibrate::paired_rank(narrow, narrow, 0.95) == 2);
  CHECK(calibrate::paired_rank(narrow, wide, 0.9) == 3);
  CHECK(calibrate::paired_rank(wide, narrow, 0.9) == 3);
  CHECK_THROWS_AS(calibrate::paired_rank(wide, narrow, 1.5), ValueError);
}

TEST_CASE("a projector's maps give its logits and its outputs") {
  Random random(40);
  const int dim = 8, key_rank = 5, value_rank = 3;
  const MatrixXd d_q = support::gaussian(random, dim, key_rank),
                 d_k = support::gaussian(random, dim, key_rank);
  const MatrixXd d_v = support::gaussian(random, dim, value_rank),
                 d_o = support::gaussian(random, value_rank, dim);
  const HeadBasis head = calibrate::make_projector_head(d_q, d_k, d_v, d_o);
  CHECK(head.key_rank == key_rank);
  CHECK(head.value_rank == value_rank);
  // As HeadBasis defines its maps: k^ = (k key_down) query_down^T, v^ = (v value_down) output_up.
  const MatrixXd key = support::gaussian(random, 1, dim), query = support::gaussian(random, 1, dim),
                 value = support::gaussian(random, 1, dim);
  const MatrixXd decoded_key = key * support::from_row_major(head.key_down, dim, key_rank) *
                               support::from_row_major(head.query_down, dim, key_rank).transpose();
  const MatrixXd decoded_value = value * support::from_row_major(head.value_down, dim, value_rank) *
                                 support::from_row_major(head.output_up, value_rank, dim);
  CHECK((query * decoded_key.transpose())(0, 0) ==
        doctest::Approx((query * d_q * (key * d_k).transpose())(0, 0)).epsilon(1e-5));
  CHECK(distance(decoded_value, value * d_v * d_o) < 1e-6);
  CHECK(head.key_mean.empty());
  CHECK(head.bytes() == 4U * static_cast<std::size_t>(2 * dim * (key_rank + value_rank)));

  using calibrate::make_projector_head;
  CHECK_THROWS_WITH_AS(make_projector_head(d_q.leftCols(4), d_k, d_v, d_o),
                       "key_rank: key 5, query 4", ShapeError);
  CHECK_THROWS_WITH_AS(make_projector_head(d_q, d_k, d_v, d_o.topRows(2)),
                       "value_rank: value 3, output 2", ShapeError);
  CHECK_THROWS_WITH_AS(make_projector_head(d_q.topRows(7), d_k, d_v, d_o),
                       "head_dim: key 8, query 7", ShapeError);
  CHECK_THROWS_WITH_AS(make_projector_head(d_q, d_k, d_v.topRows(7), d_o),
                       "head_dim: key 8, value 7", ShapeError);
  CHECK_THROWS_WITH_AS(make_projector_head(d_q, d_k, d_v, d_o.leftCols(7)),
                       "head_dim: key 8, output 7", ShapeError);
  CHECK_THROWS_WITH_AS(make_projector_head(MatrixXd::Ones(3, 4), MatrixXd::Ones(3, 4),
                                           MatrixXd::Ones(3, 1), MatrixXd::Ones(1, 3)),
                       "rank: key_rank 4, head_dim 3", ShapeError);
  CHECK_THROWS_WITH_AS(make_projector_head(1e200 * MatrixXd::Identity(8, 5), d_k, d_v, d_o),
                       "projector: D_Q holds 1e+200, not finite in f32", ValueError);
}
