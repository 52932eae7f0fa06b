// SPDX-License-Identifier: Apache-2.0
// TurboQuant: its levels against numerical integrals, its rows against the paper's formulas in f64.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "lowrankkv/presets.hpp"
#include "support/random_layer.hpp"

namespace rotated_levels_tests {

using namespace lowrankkv;

namespace {

/// The mean of t over [low, high] under the density (1 - t^2)^((dim - 3) / 2), by the midpoint
/// rule.
double mean_between(int dim, double low, double high) {
  constexpr int steps = 20000;
  double sum = 0.0, weighted = 0.0;
  for (int i = 0; i < steps; ++i) {
    const double t = low + (high - low) * (i + 0.5) / steps;
    const double density = std::pow(1.0 - t * t, 0.5 * (dim - 3));
    sum += density;
    weighted += density * t;
  }
  return weighted / sum;
}

/// Checks a stored row against the paper, in f64: rotated and divided by the norm of x as f16 holds
/// it, each coordinate is a level, and no level is nearer to that of x. Maps in f16 move
/// coordinates by less than `kMoved`.
void check_row(const Eigen::MatrixXd& rotation, const std::vector<float>& levels,
               const Eigen::VectorXd& x, const Eigen::VectorXd& stored) {
  constexpr double kMoved = 2e-3;
  const double norm = static_cast<double>(to_float(to_half(static_cast<float>(x.norm()))));
  const Eigen::VectorXd given = rotation.transpose() * x / norm;
  const Eigen::VectorXd found = rotation.transpose() * stored / norm;
  const auto nearest = [&](double y) {
    double best = 1e300;
    for (const float level : levels)
      best = std::abs(static_cast<double>(level) - y) < std::abs(best - y)
                 ? static_cast<double>(level)
                 : best;
    return best;
  };
  for (Eigen::Index i = 0; i < x.size(); ++i) {
    const double level = nearest(found[i]);
    REQUIRE(std::abs(level - found[i]) < kMoved);
    REQUIRE(std::abs(level - given[i]) <= std::abs(nearest(given[i]) - given[i]) + kMoved);
  }
}

}  // namespace

TEST_CASE("levels are their cells' means, and those of a Gaussian in many dimensions") {
  for (const int dim : {2, 3, 40, 64, 128}) {
    for (int bits = 1; bits <= 5; ++bits) {
      const std::vector<float> levels = sphere_levels(dim, bits);
      REQUIRE(levels.size() == std::size_t{1} << bits);
      for (std::size_t i = 0; i < levels.size(); ++i) {
        const auto edge = [&](std::size_t right) {
          return 0.5 *
                 (static_cast<double>(levels[right - 1]) + static_cast<double>(levels[right]));
        };
        if (dim == 2 && (i == 0 || i + 1 == levels.size())) continue;  // the density has a pole
        const double mean =
            mean_between(dim, i == 0 ? -1.0 : edge(i), i + 1 == levels.size() ? 1.0 : edge(i + 1));
        REQUIRE(static_cast<double>(levels[i]) == doctest::Approx(mean).epsilon(2e-4));
        REQUIRE(levels[i] == -levels[levels.size() - 1 - i]);
      }
    }
  }
  // Max (1960), table I.
  const std::vector<double> gaussian{0.1284, 0.3881, 0.6568, 0.9424,
                                     1.2562, 1.6181, 2.0690, 2.7326};
  const std::vector<float> levels = sphere_levels(4096, 4);
  for (std::size_t i = 0; i < 8; ++i)
    CHECK(64.0 * static_cast<double>(levels[8 + i]) == doctest::Approx(gaussian[i]).epsilon(2e-3));
  CHECK_THROWS_WITH_AS(sphere_levels(1, 2), "sphere_levels: dim at least 2, given 1", ShapeError);
  CHECK_THROWS_AS(sphere_levels(64, 0), ValueError);
}

TEST_CASE("the rotation is orthonormal, fixed by its seed, and Hadamard's up to signs at 64") {
  for (const int dim : {40, 64, 96}) {
    const Eigen::MatrixXd r = support::from_row_major(random_rotation(17, dim), dim, dim);
    CHECK((r * r.transpose() - Eigen::MatrixXd::Identity(dim, dim)).cwiseAbs().maxCoeff() < 1e-5);
    if (dim == 64) CHECK((r.cwiseAbs().array() - 0.125).abs().maxCoeff() == 0.0);
    CHECK(random_rotation(17, dim) == random_rotation(17, dim));
    CHECK(random_rotation(17, dim) != random_rotation(18, dim));
  }
}

TEST_CASE("stored rows are the paper's, and lose what it says") {
  support::Random random(1);
  for (const int dim : {40, 64, 96}) {
    const int n = 300;
    const CacheConfig config{.shape = {2, 2, dim}, .max_tokens = 512};
    const auto k = support::random_rows(random, n, 2, dim, 0.5),
               v = support::random_rows(random, n, 2, dim);
    for (const int bits : {2, 3, 4}) {
      TurboQuant<> cache(config, {}, {.quantizer = {.bits = bits}});
      cache.create(0);
      cache.ingest(0, {k.data(), n, 2, dim}, {v.data(), n, 2, dim});
      std::vector<float> k_stored(k.size()), v_stored(v.size());
      cache.reconstruct(0, 0, {k_stored.data(), n, 2, dim}, {v_stored.data(), n, 2, dim});
      const Eigen::MatrixXd rotation = support::from_row_major(random_rotation(17, dim), dim, dim);
      const std::vector<float> levels = sphere_levels(dim, bits);
      double lost = 0.0, all = 0.0;
      for (const auto& [rows, stored] : {std::pair{&k, &k_stored}, {&v, &v_stored}}) {
        for (int row = 0; row < 2 * n; ++row) {
          Eigen::VectorXd x(dim), x_stored(dim);
          for (int i = 0; i < dim; ++i) {
            const auto at = static_cast<std::size_t>(row * dim + i);
            x[i] = static_cast<double>(round_to(DType::f16, (*rows)[at]));
            x_stored[i] = static_cast<double>((*stored)[at]);
          }
          lost += (x - x_stored).squaredNorm();
          all += x.squaredNorm();
          check_row(rotation, levels, x, x_stored);
        }
      }
      const double theory = bits == 2 ? 0.1175 : bits == 3 ? 0.03454 : 0.009497;  // Max (1960)
      CHECK(lost / all == doctest::Approx(theory).epsilon(0.08));
      CHECK(cache.memory(0).coefficient_bytes ==
            static_cast<std::size_t>(n * 2 * 2 * (dim * bits + 16)) / 8);
    }
  }
}

TEST_CASE("parameters out of range, and rows without a direction") {
  const CacheConfig config{.shape = {1, 1, 64}, .max_tokens = 64};
  CHECK_THROWS_WITH_AS(TurboQuant<>(config, {}, {.quantizer = {.bits = 9}}),
                       "RotatedLevels: bits are 1 to 8, given 9", ValueError);
  CHECK_THROWS_WITH_AS(TurboQuant<>({.shape = {1, 1, 1}, .max_tokens = 64}),
                       "RotatedLevels: rank 1, a direction needs 2 channels at least", ShapeError);
  TurboQuant<> cache(config);
  const std::vector<float> zeros(64 * 40, 0.0F);
  cache.create(0);
  cache.ingest(0, {zeros.data(), 40, 1, 64}, {zeros.data(), 40, 1, 64});
  std::vector<float> k(zeros.size(), 1.0F), v(zeros.size(), 1.0F);
  cache.reconstruct(0, 0, {k.data(), 40, 1, 64}, {v.data(), 40, 1, 64});
  CHECK(k == zeros);
  CHECK(v == zeros);
}

TEST_CASE("a saved sequence needs the same seed") {
  const CacheConfig config{.shape = {1, 1, 64}, .max_tokens = 64};
  support::Random random(2);
  const auto k = support::random_rows(random, 40, 1, 64);
  TurboQuant<> cache(config), same(config), other(config, {}, {.quantizer = {.seed = 18}});
  cache.create(0);
  cache.ingest(0, {k.data(), 40, 1, 64}, {k.data(), 40, 1, 64});
  std::vector<std::byte> saved(cache.save_bytes(0));
  cache.save(0, saved);
  CHECK_THROWS_AS(other.load(0, saved), Error);
  same.load(0, saved);
  std::vector<float> first(k.size()), second(k.size()), values(k.size());
  cache.reconstruct(0, 0, {first.data(), 40, 1, 64}, {values.data(), 40, 1, 64});
  same.reconstruct(0, 0, {second.data(), 40, 1, 64}, {values.data(), 40, 1, 64});
  CHECK(first == second);
}

}  // namespace rotated_levels_tests
