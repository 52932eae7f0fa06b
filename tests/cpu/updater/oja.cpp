// SPDX-License-Identifier: Apache-2.0
// Oja's step: never worse for its batch, convergence, a subspace that rotates.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <random>

#include "lowrankkv/calibrate/moments.hpp"
#include "lowrankkv/cpu/updater/oja.hpp"
#include "lowrankkv/diagnostics/residual_energy.hpp"
#include "lowrankkv/diagnostics/spectra.hpp"
#include "lowrankkv/diagnostics/subspace_overlap.hpp"
#include "support/matrices.hpp"

namespace oja_tests {

using namespace lowrankkv;
using Eigen::MatrixXd;
using Eigen::VectorXd;
using support::Random;

TEST_CASE("the default Oja step never raises the residual energy of its batch, for any rate") {
  Random random(1);
  for (int round = 0; round < 120; ++round) {
    const int dim = std::uniform_int_distribution<int>(2, 96)(random);
    const int rank = std::uniform_int_distribution<int>(1, dim)(random);
    const Eigen::MatrixXd rows =
        20.0 * support::decaying_rows(random, std::uniform_int_distribution<int>(1, 300)(random),
                                      dim, 0.05);
    const Eigen::MatrixXd basis = support::random_orthonormal(random, dim, rank);
    const double before = diagnostics::residual_energy_ratio(rows, basis);
    for (const double rate :
         {1e-6, 0.01, 0.1, 1.0, 30.0, 1e6, 1e300, std::numeric_limits<double>::infinity()}) {
      const Eigen::MatrixXd moved = cpu::oja_update(rows, basis, rate);
      CHECK((moved.transpose() * moved - Eigen::MatrixXd::Identity(rank, rank))
                .cwiseAbs()
                .maxCoeff() < 1e-12);
      CHECK(diagnostics::residual_energy_ratio(rows, moved) <= before + 1e-12);
    }
    const Eigen::MatrixXd safe = cpu::oja_update(rows, basis, 1.0, OjaForm::printed_normalised);
    CHECK(diagnostics::residual_energy_ratio(rows, safe) <= before + 1e-12);
  }
}

TEST_CASE("the printed Oja step at the printed rate ruins a good basis on rows of realistic norm") {
  Random random(2);
  Eigen::MatrixXd rows = support::decaying_rows(random, 410, 128, 0.02);
  rows *= 20.0 / std::sqrt(rows.squaredNorm() / 410.0);  // E||k||^2 = 400
  const Eigen::MatrixXd other = support::decaying_rows(random, 400, 128, 0.02);
  Eigen::MatrixXd mixed(810, 128);
  mixed << rows, 10.0 * other;
  const Eigen::MatrixXd basis =
      calibrate::principal_axes(mixed.transpose() * mixed).vectors.leftCols(77);
  const double before = diagnostics::residual_energy_ratio(rows, basis);
  CHECK(diagnostics::residual_energy_ratio(
            rows, cpu::oja_update(rows, basis, 0.1, OjaForm::printed_raw)) > 2.0 * before);
  CHECK(diagnostics::residual_energy_ratio(rows, cpu::oja_update(rows, basis, 0.1)) < before);
}

TEST_CASE("an Oja step without energy or rate leaves the basis alone, and misfits are named") {
  Random random(3);
  const Eigen::MatrixXd basis = support::random_orthonormal(random, 16, 4);
  CHECK(cpu::oja_update(Eigen::MatrixXd::Zero(5, 16), basis, 0.1) == basis);
  CHECK(cpu::oja_update(Eigen::MatrixXd::Ones(5, 16), basis, 0.0) == basis);
  CHECK_THROWS_WITH_AS(cpu::oja_update(Eigen::MatrixXd::Ones(5, 8), basis, 0.1),
                       "head_dim: rows 8, basis 16", ShapeError);
}

TEST_CASE("Oja's steps converge to the top subspace of a stationary stream") {
  Random random(4);
  const Eigen::MatrixXd rows = support::decaying_rows(random, 2000, 24, 0.3);
  const Eigen::MatrixXd best =
      calibrate::principal_axes(rows.transpose() * rows).vectors.leftCols(6);
  Eigen::MatrixXd basis = support::random_orthonormal(random, 24, 6);
  CHECK(diagnostics::subspace_overlap(basis, best) < 0.7);
  for (int step = 0; step < 200; ++step)
    basis = cpu::oja_update(rows.middleRows(step * 10, 10), basis, 0.3);
  CHECK(diagnostics::subspace_overlap(basis, best) > 0.95);
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

}  // namespace oja_tests
