// SPDX-License-Identifier: Apache-2.0
// Principal axes, Oja, and what measures subspaces and spectra, against what is known of them.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "../support/random_layer.hpp"
#include "lowrankkv/calibrate/moments.hpp"
#include "lowrankkv/cpu/updater/oja.hpp"
#include "lowrankkv/diagnostics/residual_energy.hpp"
#include "lowrankkv/diagnostics/spectra.hpp"
#include "lowrankkv/diagnostics/subspace_overlap.hpp"

using namespace lowrankkv;
using Eigen::MatrixXd;
using Eigen::VectorXd;
using support::Random;

namespace {

MatrixXd decaying(Random& random, int n, int dim, double decay) {
  VectorXd scale(dim);
  for (int i = 0; i < dim; ++i) scale[i] = std::exp(-decay * i);
  return support::gaussian(random, n, dim) * scale.asDiagonal() *
         support::random_orthonormal(random, dim, dim).transpose();
}

}  // namespace

TEST_CASE(
    "principal axes lose least: against random subspaces and against every small turn of their "
    "own") {
  Random random(17);
  for (int round = 0; round < 10; ++round) {
    const int dim = std::uniform_int_distribution<int>(2, 30)(random),
              rank = std::uniform_int_distribution<int>(1, dim - 1)(random);
    const MatrixXd rows = decaying(random, 200, dim, 0.2);
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
          cpu::orthonormal_columns(best + 0.05 * support::gaussian(random, dim, rank));
      CHECK(missed <= diagnostics::residual_energy_ratio(rows, rotated) + 1e-13);
    }
  }
}

TEST_CASE("Oja on a stationary stream reaches the top subspace, closer with smaller last steps") {
  Random random(18);
  const int dim = 24, rank = 5;
  const MatrixXd axes = support::random_orthonormal(random, dim, dim);
  VectorXd scale = VectorXd::Constant(dim, 0.5);
  scale.head(rank).setConstant(2.0);
  const auto batch = [&](int n) -> MatrixXd {
    return support::gaussian(random, n, dim) * scale.asDiagonal() * axes.transpose();
  };
  const MatrixXd start = support::random_orthonormal(random, dim, rank);
  const auto angle = [&](const MatrixXd& basis) {
    return diagnostics::principal_angles(basis, axes.leftCols(rank)).maxCoeff();
  };
  MatrixXd constant = start, falling = start;
  for (int step = 0; step < 600; ++step) {
    const MatrixXd rows = batch(16);
    constant = cpu::oja_update(rows, constant, 0.2);
    falling = cpu::oja_update(rows, falling, 0.5 / (1.0 + 0.05 * step));
  }
  CHECK(angle(start) > 0.8);
  CHECK(angle(constant) < 0.25);  // a fixed rate leaves noise of the order of sqrt(rate)
  CHECK(angle(falling) < 0.08);
  CHECK(angle(falling) < angle(constant));
  MESSAGE("largest angle: ", angle(start), " at the start, ", angle(constant), " at a fixed rate, ",
          angle(falling), " at a falling one");
}

TEST_CASE("Oja follows a subspace that turns; a fixed basis is left behind") {
  Random random(19);
  const int dim = 20, rank = 3;
  const MatrixXd axes = support::random_orthonormal(random, dim, 2 * rank);
  // A quarter turn of all of the plane, in 400 steps.
  const auto subspace = [&](double turn) -> MatrixXd {
    return std::cos(turn) * axes.leftCols(rank) + std::sin(turn) * axes.rightCols(rank);
  };
  MatrixXd basis = subspace(0.0);
  double worst = 1.0;
  for (int step = 1; step <= 400; ++step) {
    const MatrixXd now = subspace(0.5 * std::numbers::pi * step / 400.0);
    const MatrixXd rows = 3.0 * support::gaussian(random, 16, rank) * now.transpose() +
                          0.3 * support::gaussian(random, 16, dim);
    basis = cpu::oja_update(rows, basis, 0.2);
    worst = std::min(worst, diagnostics::subspace_overlap(basis, now));
  }
  CHECK(worst > 0.97);
  CHECK(diagnostics::subspace_overlap(subspace(0.0), subspace(0.5 * std::numbers::pi)) < 1e-12);
  MESSAGE("smallest overlap on the way: ", worst);
}

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
