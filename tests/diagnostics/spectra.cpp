// SPDX-License-Identifier: Apache-2.0
// Principal angles, ranks and bounds of spectra, against what is known of them.
#include <doctest/doctest.h>

#include <cmath>
#include <numbers>

#include "lowrankkv/diagnostics/spectra.hpp"
#include "lowrankkv/diagnostics/subspace_overlap.hpp"
#include "support/random_layer.hpp"

namespace spectra_tests {

using namespace lowrankkv;
using Eigen::MatrixXd;
using Eigen::VectorXd;
using support::Random;

TEST_CASE("principal angles: known ones come back, from 1e-15 to a right angle") {
  Random random(20);
  const VectorXd known = (VectorXd(8) << 0.0, 1e-15, 1e-12, 1e-9, 1e-6, 0.3,
                          std::numbers::pi / 2 - 1e-10, std::numbers::pi / 2)
                             .finished();
  const MatrixXd axes = support::random_orthonormal(random, 40, 16);
  const MatrixXd first = axes.leftCols(8);
  const MatrixXd second = first * MatrixXd(known.array().cos().matrix().asDiagonal()) +
                          axes.rightCols(8) * MatrixXd(known.array().sin().matrix().asDiagonal());
  // Other bases of the same two subspaces.
  const MatrixXd rotated = second * support::random_orthonormal(random, 8, 8);
  for (const VectorXd& angles : {diagnostics::principal_angles(first, rotated),
                                 diagnostics::principal_angles(rotated, first)}) {
    REQUIRE(angles.size() == 8);
    for (int i = 0; i < 8; ++i) CHECK(std::abs(angles[i] - known[i]) < 3e-15);
  }
  // Of different dimension: a line and a plane that holds it, or does not.
  const VectorXd inside = diagnostics::principal_angles(axes.leftCols(3), axes.col(1));
  REQUIRE(inside.size() == 1);
  CHECK(inside[0] < 1e-15);
  CHECK(diagnostics::principal_angles(axes.col(7), axes.leftCols(3))[0] ==
        doctest::Approx(std::numbers::pi / 2));
  CHECK(diagnostics::principal_angles(axes.leftCols(0), axes.leftCols(3)).size() == 0);
  // Mean squared cosine: the other measure of the library.
  const MatrixXd other = support::random_orthonormal(random, 40, 8);
  const VectorXd angles = diagnostics::principal_angles(first, other);
  CHECK(angles.array().cos().square().mean() ==
        doctest::Approx(diagnostics::subspace_overlap(first, other)).epsilon(1e-12));
  CHECK_THROWS_WITH_AS(diagnostics::principal_angles(first, MatrixXd::Identity(30, 2)),
                       "head_dim: first 40, second 30", ShapeError);
  CHECK_THROWS_AS(diagnostics::principal_angles(first, MatrixXd::Constant(40, 2, std::nan(""))),
                  ValueError);
}

TEST_CASE("effective and stable ranks, energy curves and sketch bounds of known spectra") {
  using diagnostics::best_fd_bound, diagnostics::effective_rank, diagnostics::energy_curve,
      diagnostics::fd_bound, diagnostics::stable_rank;
  const VectorXd flat = VectorXd::Constant(7, 3.5), single = VectorXd::Unit(7, 0),
                 nothing = VectorXd::Zero(7);
  CHECK(effective_rank(flat) == doctest::Approx(7.0));
  CHECK(stable_rank(flat) == doctest::Approx(7.0));
  CHECK(effective_rank(single) == 1.0);
  CHECK(stable_rank(single) == 1.0);
  CHECK(effective_rank(nothing) == 0.0);
  CHECK(stable_rank(nothing) == 0.0);
  CHECK(stable_rank({}) == 0.0);
  const VectorXd two = (VectorXd(2) << 3.0, 1.0).finished();
  CHECK(effective_rank(two) == doctest::Approx(4.0 / std::pow(3.0, 0.75)));  // e^{ln 4 - 0.75 ln 3}
  CHECK(stable_rank(two) == doctest::Approx(4.0 / 3.0));
  CHECK(effective_rank(1e-200 * two) == doctest::Approx(effective_rank(two)));  // no unit
  const VectorXd spectrum = (VectorXd(5) << 8.0, 4.0, 2.0, 1.0, 1.0).finished();
  CHECK(stable_rank(spectrum) <= effective_rank(spectrum));
  CHECK(
      (energy_curve(spectrum) - (VectorXd(5) << 0.5, 0.75, 0.875, 0.9375, 1.0).finished()).norm() <
      1e-15);
  CHECK(energy_curve(nothing) == VectorXd::Ones(7));
  CHECK(fd_bound(spectrum, 4, 0) == 4.0);
  CHECK(fd_bound(spectrum, 4, 2) == 2.0);
  CHECK(fd_bound(spectrum, 4, 3) == 2.0);
  CHECK(fd_bound(spectrum, 9, 7) == 0.0);
  CHECK(best_fd_bound(spectrum, 4).bound == 2.0);
  CHECK(best_fd_bound(spectrum, 4).k == 2);
  CHECK(best_fd_bound(flat, 4).k == 0);
  CHECK_THROWS_WITH_AS(fd_bound(spectrum, 4, 4), "k: in [0, sketch_rows), given 4, sketch_rows 4",
                       ValueError);
  CHECK_THROWS_AS(best_fd_bound(spectrum, 0), ValueError);
  CHECK_THROWS_WITH_AS(effective_rank(-two),
                       "spectrum: entry 0 is -3, finite and at least 0 expected", ValueError);
  CHECK_THROWS_AS(stable_rank(VectorXd::Constant(2, std::nan(""))), ValueError);
  CHECK_THROWS_AS(energy_curve(VectorXd::Constant(2, HUGE_VAL)), ValueError);
}

}  // namespace spectra_tests
