// SPDX-License-Identifier: Apache-2.0
// Overlap of subspaces and residual energy at their limits.
#include <doctest/doctest.h>

#include "lowrankkv/diagnostics/residual_energy.hpp"
#include "lowrankkv/diagnostics/subspace_overlap.hpp"
#include "support/random_layer.hpp"

namespace subspace_overlap_tests {

using namespace lowrankkv;
using support::Random;

TEST_CASE("diagnostics know their limits") {
  Random random(9);
  const Eigen::MatrixXd a = support::random_orthonormal(random, 20, 20);
  CHECK(diagnostics::subspace_overlap(a.leftCols(7), a.leftCols(7)) == doctest::Approx(1.0));
  CHECK(diagnostics::subspace_overlap(a.leftCols(7), a.rightCols(7)) ==
        doctest::Approx(0.0).epsilon(1e-9));
  CHECK(diagnostics::residual_energy_ratio(a.transpose(), a.leftCols(5)) == doctest::Approx(0.75));
  CHECK(diagnostics::residual_energy_ratio(Eigen::MatrixXd::Zero(3, 20), a.leftCols(5)) == 0.0);
  CHECK_THROWS_WITH_AS(diagnostics::subspace_overlap(a.leftCols(7), a.leftCols(6)),
                       "rank: first 7, second 6", ShapeError);
}

}  // namespace subspace_overlap_tests
