// SPDX-License-Identifier: Apache-2.0
// STAR-KV's factors, the soft-thresholded projection, and its gradients against finite differences.
#include "lowrankkv/train/star_kv_gradient.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "support/matrices.hpp"

namespace star_kv_gradient_tests {

using namespace lowrankkv;
using Eigen::MatrixXd;
using Eigen::VectorXd;
using support::FloatRows;
using support::gaussian;
using support::Random;
using support::relative_distance;
using support::uniform;
using train::Decomposition;
using train::StarKvFactors;
using train::StarKvProjection;

constexpr Decomposition kBoth[] = {Decomposition::head_wise, Decomposition::joint};

/// U diag(values) V^T.
MatrixXd product(const StarKvFactors& block, const VectorXd& values) {
  return block.left * values.asDiagonal() * block.right.transpose();
}

/// As after some steps of training: columns that are not orthonormal, no order, a threshold between
/// the values, and no value so near to it that a finite difference would cross it.
StarKvProjection trained_projection(Random& random, int heads, int dim, int hidden,
                                    Decomposition decomposition) {
  const FloatRows weight(gaussian(random, heads * dim, hidden));
  StarKvProjection projection = train::star_kv_projection(weight.view(), heads, decomposition);
  for (StarKvFactors& block : projection.blocks) {
    block.left += 0.1 * gaussian(random, block.left.rows(), block.left.cols());
    block.right += 0.1 * gaussian(random, block.right.rows(), block.right.cols());
    block.sigma += 0.1 * gaussian(random, static_cast<int>(block.sigma.size()), 1);
    block.alpha = block.sigma.mean();
    for (double& sigma : block.sigma) {
      if (std::abs(sigma - block.alpha) < 1e-3) sigma += 0.01;
    }
  }
  return projection;
}

/// Calls `visit` with every trainable number of the projection and its entry in the gradient.
void for_each_number(StarKvProjection& projection, const StarKvProjection& gradient,
                     const std::function<void(double&, double)>& visit) {
  REQUIRE(projection.blocks.size() == gradient.blocks.size());
  for (std::size_t i = 0; i < projection.blocks.size(); ++i) {
    StarKvFactors& own = projection.blocks[i];
    const StarKvFactors& slope = gradient.blocks[i];
    REQUIRE(own.left.size() == slope.left.size());
    REQUIRE(own.sigma.size() == slope.sigma.size());
    REQUIRE(own.right.size() == slope.right.size());
    for (Eigen::Index k = 0; k < own.left.size(); ++k)
      visit(own.left.data()[k], slope.left.data()[k]);
    for (Eigen::Index k = 0; k < own.sigma.size(); ++k) visit(own.sigma[k], slope.sigma[k]);
    for (Eigen::Index k = 0; k < own.right.size(); ++k)
      visit(own.right.data()[k], slope.right.data()[k]);
    visit(own.alpha, slope.alpha);
  }
}

/// (f(x + h) - f(x - h)) / 2h at a number that `loss` reads.
double central_difference(double& number, const std::function<double()>& loss) {
  const double kept = number, h = 1e-5;
  number = kept + h;
  const double above = loss();
  number = kept - h;
  const double below = loss();
  number = kept;
  return (above - below) / (2.0 * h);
}

TEST_CASE("factors give the weight back, per head or jointly, and joint ones lose no more") {
  Random random(41);
  for (int round = 0; round < 40; ++round) {
    const int heads = uniform(random, 1, 5), dim = uniform(random, 1, 9),
              hidden = uniform(random, 1, 40), width = heads * dim;
    MatrixXd values = gaussian(random, width, hidden);
    if (round % 3 == 0) values = gaussian(random, width, 2) * gaussian(random, 2, hidden);
    const FloatRows weight(values);
    for (const Decomposition decomposition : kBoth) {
      const bool joint = decomposition == Decomposition::joint;
      const StarKvProjection projection =
          train::star_kv_projection(weight.view(), heads, decomposition, 0.25);
      REQUIRE(projection.blocks.size() == static_cast<std::size_t>(joint ? 1 : heads));
      CHECK(projection.channels() == width);
      CHECK(projection.hidden() == hidden);
      int row = 0;
      for (const StarKvFactors& block : projection.blocks) {
        const int channels = joint ? width : dim, rank = std::min(channels, hidden);
        REQUIRE(block.sigma.size() == rank);
        CHECK(block.alpha == 0.25);
        CHECK(std::is_sorted(block.sigma.begin(), block.sigma.end(), std::greater<>()));
        CHECK((block.left.transpose() * block.left - MatrixXd::Identity(rank, rank)).norm() <
              1e-12 * rank);
        CHECK((block.right.transpose() * block.right - MatrixXd::Identity(rank, rank)).norm() <
              1e-12 * rank);
        CHECK(relative_distance(product(block, block.sigma),
                                weight.matrix.middleRows(row, channels)) < 1e-13);
        row += channels;
      }
    }
    // Lemma 4.2: the same number of coefficients, jointly or per head.
    const auto lost = [&](Decomposition decomposition, int kept) {
      double sum = 0.0;
      for (const StarKvFactors& block :
           train::star_kv_projection(weight.view(), heads, decomposition).blocks)
        sum += block.sigma.tail(std::max<Eigen::Index>(block.sigma.size() - kept, 0)).squaredNorm();
      return sum;
    };
    for (int rank = 0; rank <= dim; ++rank)
      CHECK(lost(Decomposition::joint, heads * rank) <=
            lost(Decomposition::head_wise, rank) + 1e-12 * weight.matrix.squaredNorm());
  }
}

TEST_CASE("the slopes of the soft threshold are those of finite differences, and 0 below it") {
  Random random(42);
  std::uniform_real_distribution<double> number(-2.0, 4.0), sharpness(0.1, 60.0);
  int above = 0;
  for (int round = 0; round < 2000; ++round) {
    double sigma = number(random), alpha = number(random);
    const double s = sharpness(random);
    if (std::abs(sigma - alpha) < 1e-4) continue;
    const train::SoftThresholdSlopes slopes = train::soft_threshold_slopes(sigma, alpha, s);
    const auto loss = [&] { return calibrate::soft_threshold(sigma, alpha, s); };
    CHECK(slopes.value == loss());
    CHECK(slopes.by_sigma ==
          doctest::Approx(central_difference(sigma, loss)).epsilon(1e-5).scale(1e-2));
    CHECK(slopes.by_alpha ==
          doctest::Approx(central_difference(alpha, loss)).epsilon(1e-5).scale(1e-2));
    above += sigma > alpha;
    if (sigma < alpha) {
      CHECK(slopes.value == 0.0);
      CHECK(slopes.by_sigma == 0.0);
      CHECK(slopes.by_alpha == 0.0);
    }
  }
  CHECK(above > 500);
  // At the kink: eq. 2's upper branch, x >= alpha.
  const train::SoftThresholdSlopes kink = train::soft_threshold_slopes(2.0, 2.0, 3.0);
  CHECK(kink.value == 0.0);
  CHECK(kink.by_sigma == 6.0);
  CHECK(kink.by_alpha == -6.0);
  // Far from it nothing overflows, and the value is kept whole.
  const train::SoftThresholdSlopes far = train::soft_threshold_slopes(900.0, 1.0, 1e6);
  CHECK(far.value == 900.0);
  CHECK(far.by_sigma == 1.0);
  CHECK(far.by_alpha == 0.0);
  CHECK_THROWS_WITH_AS(train::soft_threshold_slopes(1.0, 0.5, -2.0),
                       "soft threshold: sharpness above 0, given -2", ValueError);
  CHECK_THROWS_AS(train::soft_threshold_slopes(1.0, std::nan(""), 1.0), ValueError);
}

TEST_CASE("the thresholded weight's limits: a hard threshold, all of it, nothing of it") {
  Random random(43);
  for (int round = 0; round < 20; ++round) {
    const int heads = uniform(random, 1, 4), dim = uniform(random, 2, 7),
              hidden = uniform(random, 2, 30);
    const FloatRows weight(gaussian(random, heads * dim, hidden));
    for (const Decomposition decomposition : kBoth) {
      StarKvProjection projection = train::star_kv_projection(weight.view(), heads, decomposition);
      int rank = 0;
      MatrixXd hard(heads * dim, hidden);
      int row = 0;
      for (StarKvFactors& block : projection.blocks) {  // eq. 1
        const int kept = uniform(random, 0, static_cast<int>(block.sigma.size()));
        block.alpha = calibrate::threshold_for_rank(block.sigma, kept);
        CHECK(block.rank() == kept);
        rank += kept;
        VectorXd sigma = block.sigma;
        sigma.tail(sigma.size() - kept).setZero();
        hard.middleRows(row, block.left.rows()) = product(block, sigma);
        row += static_cast<int>(block.left.rows());
      }
      CHECK(projection.rank() == rank);
      // The error falls with s, and is gone as s goes to infinity.
      double error = std::numeric_limits<double>::infinity();
      for (const double s : {0.5, 5.0, 50.0, 1e9}) {
        const double now = (train::star_kv_weight(projection, s) - hard).norm();
        CHECK(now <= error);
        error = now;
      }
      CHECK(error < 1e-12 * weight.matrix.norm());
      for (StarKvFactors& block : projection.blocks) block.alpha = -1e6;
      CHECK(relative_distance(train::star_kv_weight(projection, 1.0), weight.matrix) < 1e-13);
      for (StarKvFactors& block : projection.blocks) block.alpha = block.sigma[0] + 1e-9;
      CHECK(train::star_kv_weight(projection, 50.0).isZero(0.0));
      const StarKvProjection gradient =
          train::star_kv_weight_gradient(projection, weight.matrix, 50.0);
      for (const StarKvFactors& block : gradient.blocks) {
        CHECK(block.left.isZero(0.0));
        CHECK(block.sigma.isZero(0.0));
        CHECK(block.right.isZero(0.0));
        CHECK(block.alpha == 0.0);
      }
    }
  }
}

TEST_CASE("gradients of all factors and thresholds are those of finite differences") {
  Random random(44);
  for (int round = 0; round < 12; ++round) {
    const int heads = uniform(random, 1, 3), dim = uniform(random, 1, 5),
              hidden = uniform(random, 1, 9), n = uniform(random, 1, 6), width = heads * dim;
    const double s = round % 2 == 0 ? 3.0 : 0.7;
    for (const Decomposition decomposition : kBoth) {
      StarKvProjection projection = trained_projection(random, heads, dim, hidden, decomposition);
      // L = <R, W~> + |W~|^2 / 2, so G = R + W~.
      const MatrixXd linear = gaussian(random, width, hidden);
      const auto weight_loss = [&] {
        const MatrixXd weight = train::star_kv_weight(projection, s);
        return linear.cwiseProduct(weight).sum() + 0.5 * weight.squaredNorm();
      };
      const StarKvProjection of_weight = train::star_kv_weight_gradient(
          projection, linear + train::star_kv_weight(projection, s), s);
      double largest = 0.0;
      for_each_number(projection, of_weight, [&](double& number, double slope) {
        CHECK(slope ==
              doctest::Approx(central_difference(number, weight_loss)).epsilon(1e-6).scale(0.1));
        largest = std::max(largest, std::abs(slope));
      });
      CHECK(largest > 0.1);

      // The same of the output: y = x W~^T, dL/dy = S + y.
      MatrixXd input = gaussian(random, n, hidden);
      const MatrixXd target = gaussian(random, n, width);
      const MatrixXd output = train::star_kv_forward(projection, input, s);
      CHECK(relative_distance(output, input * train::star_kv_weight(projection, s).transpose()) <
            1e-13);
      const auto output_loss = [&] {
        const MatrixXd y = train::star_kv_forward(projection, input, s);
        return target.cwiseProduct(y).sum() + 0.5 * y.squaredNorm();
      };
      const train::StarKvOutputGradient of_output =
          train::star_kv_output_gradient(projection, input, target + output, s);
      for_each_number(projection, of_output.factors, [&](double& number, double slope) {
        CHECK(slope ==
              doctest::Approx(central_difference(number, output_loss)).epsilon(1e-6).scale(0.1));
      });
      REQUIRE(of_output.input.rows() == n);
      for (Eigen::Index k = 0; k < input.size(); ++k)
        CHECK(of_output.input.data()[k] ==
              doctest::Approx(central_difference(input.data()[k], output_loss))
                  .epsilon(1e-6)
                  .scale(0.1));
    }
  }
}

TEST_CASE("two runs give the same bits, and what does not fit is refused with both values") {
  const auto run = [] {
    Random random(45);
    const StarKvProjection projection =
        trained_projection(random, 3, 7, 23, Decomposition::head_wise);
    const MatrixXd gradient = gaussian(random, 21, 23);
    return std::pair(train::star_kv_weight(projection, 5.0),
                     train::star_kv_weight_gradient(projection, gradient, 5.0));
  };
  const auto first = run(), second = run();
  CHECK(first.first == second.first);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(first.second.blocks[i].left == second.second.blocks[i].left);
    CHECK(first.second.blocks[i].sigma == second.second.blocks[i].sigma);
    CHECK(first.second.blocks[i].right == second.second.blocks[i].right);
    CHECK(first.second.blocks[i].alpha == second.second.blocks[i].alpha);
  }
  Random random(46);
  FloatRows weight(gaussian(random, 6, 5));
  const StarKvProjection projection =
      train::star_kv_projection(weight.view(), 2, Decomposition::head_wise);
  CHECK_THROWS_WITH_AS(train::star_kv_projection(weight.view(), 4, Decomposition::joint),
                       "num_kv_heads: 4 does not divide the joint width 6", ShapeError);
  CHECK_THROWS_WITH_AS(train::star_kv_factors(MatrixXd(0, 5)),
                       "STAR-KV: weight of 0 rows, 5 columns, at least 1 of each expected",
                       ShapeError);
  CHECK_THROWS_WITH_AS(train::star_kv_factors(weight.matrix, HUGE_VAL),
                       "STAR-KV: alpha is inf, finite expected", ValueError);
  CHECK_THROWS_WITH_AS(train::star_kv_forward(projection, MatrixXd::Zero(3, 4), 1.0),
                       "hidden: projection 5, input 4", ShapeError);
  CHECK_THROWS_WITH_AS(train::star_kv_weight_gradient(projection, MatrixXd::Zero(5, 5), 1.0),
                       "channels: projection 6, weight_gradient 5", ShapeError);
  CHECK_THROWS_WITH_AS(train::star_kv_weight_gradient(projection, MatrixXd::Zero(6, 6), 1.0),
                       "hidden: projection 5, weight_gradient 6", ShapeError);
  CHECK_THROWS_WITH_AS(
      train::star_kv_output_gradient(projection, MatrixXd::Zero(3, 5), MatrixXd::Zero(4, 6), 1.0),
      "tokens: input 3, output_gradient 4", ShapeError);
  CHECK_THROWS_WITH_AS(
      train::star_kv_output_gradient(projection, MatrixXd::Zero(3, 5), MatrixXd::Zero(3, 5), 1.0),
      "channels: projection 6, output_gradient 5", ShapeError);
  weight.values[7] = std::numeric_limits<float>::quiet_NaN();
  CHECK_THROWS_AS(train::star_kv_projection(weight.view(), 2, Decomposition::head_wise),
                  ValueError);
}

}  // namespace star_kv_gradient_tests
