// SPDX-License-Identifier: Apache-2.0
// Trained projectors: chains of factors, ranks, the maps that they fold to.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "lowrankkv/calibrate/projector.hpp"
#include "support/matrices.hpp"

namespace projector_tests {

using namespace lowrankkv;
using Eigen::MatrixXd;
using Eigen::VectorXd;
using support::Random;
using support::relative_distance;
using support::uniform;

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
  CHECK(relative_distance(decoded_value, value * d_v * d_o) < 1e-6);
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

}  // namespace projector_tests
