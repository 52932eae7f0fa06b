// SPDX-License-Identifier: Apache-2.0
// Principal axes lose least.
#include <doctest/doctest.h>

#include <cmath>
#include <random>

#include "lowrankkv/calibrate/choose_rank.hpp"
#include "lowrankkv/calibrate/moments.hpp"
#include "lowrankkv/linalg/orthonormalize.hpp"
#include "lowrankkv/diagnostics/residual_energy.hpp"
#include "lowrankkv/diagnostics/spectra.hpp"
#include "support/matrices.hpp"

namespace moments_tests {

using namespace lowrankkv;
using Eigen::MatrixXd;
using Eigen::VectorXd;
using support::Random;

TEST_CASE("principal axes beat every other basis of their rank, and energies add up") {
  Random random(5);
  const Eigen::MatrixXd rows = support::decaying_rows(random, 500, 32, 0.1);
  const auto axes = calibrate::principal_axes(rows.transpose() * rows);
  for (const int rank : {1, 5, 31, 32}) {
    const Eigen::MatrixXd best = axes.vectors.leftCols(rank);
    const double residual = diagnostics::residual_energy_ratio(rows, best);
    CHECK(residual ==
          doctest::Approx(axes.values.tail(32 - rank).sum() / axes.values.sum()).epsilon(1e-9));
    for (int other = 0; other < 20; ++other)
      CHECK(residual <= diagnostics::residual_energy_ratio(
                            rows, support::random_orthonormal(random, 32, rank)) +
                            1e-12);
  }
  const int rank = calibrate::rank_by_energy(axes.values, 0.9);
  CHECK(axes.values.head(rank).sum() >= 0.9 * axes.values.sum());
  CHECK(axes.values.head(rank - 1).sum() < 0.9 * axes.values.sum());
  CHECK(calibrate::rank_by_energy(axes.values, 1.0) == 32);
  CHECK_THROWS_WITH_AS(calibrate::rank_by_energy(axes.values, 1.5),
                       "energy share: in (0, 1], given 1.5", ValueError);
  CHECK(calibrate::rank_by_ratio(128, 0.6) == 77);
  CHECK_THROWS_AS(calibrate::rank_by_ratio(128, 0.0), ValueError);
  const int ranks[] = {3, 9, 4};
  CHECK(calibrate::max_over_heads(ranks) == 9);
}

TEST_CASE(
    "principal axes lose least: against random subspaces and against every small turn of their "
    "own") {
  Random random(17);
  for (int round = 0; round < 10; ++round) {
    const int dim = std::uniform_int_distribution<int>(2, 30)(random),
              rank = std::uniform_int_distribution<int>(1, dim - 1)(random);
    const MatrixXd rows = support::decaying_rows(random, 200, dim, 0.2);
    const auto axes = calibrate::principal_axes(rows.transpose() * rows);
    const MatrixXd best = axes.vectors.leftCols(rank);
    const double missed = diagnostics::residual_energy_ratio(rows, best);
    CHECK(missed ==
          doctest::Approx(axes.values.tail(dim - rank).sum() / axes.values.sum()).epsilon(1e-9));
    CHECK(missed ==
          doctest::Approx(1.0 - diagnostics::energy_curve(axes.values)[rank - 1]).epsilon(1e-9));
    for (int other = 0; other < 20; ++other) {
      CHECK(missed <= diagnostics::residual_energy_ratio(
                          rows, support::random_orthonormal(random, dim, rank)) +
                          1e-13);
      const MatrixXd rotated =
          linalg::orthonormal_columns(best + 0.05 * support::gaussian(random, dim, rank));
      CHECK(missed <= diagnostics::residual_energy_ratio(rows, rotated) + 1e-13);
    }
  }
}

}  // namespace moments_tests
