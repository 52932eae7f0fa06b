// SPDX-License-Identifier: Apache-2.0
// Error certificates: bounds that are never violated, and attained.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "lowrankkv/diagnostics/certificate.hpp"
#include "support/random_layer.hpp"

namespace certificate_tests {

using namespace lowrankkv;
using namespace lowrankkv::diagnostics;
using Eigen::MatrixXd;
using Eigen::VectorXd;
using support::Random;

namespace {

constexpr double inf = std::numeric_limits<double>::infinity();

int uniform(Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

VectorXd softmax(const VectorXd& logits) {
  const VectorXd weights = (logits.array() - logits.maxCoeff()).exp();
  return weights / weights.sum();
}

}  // namespace

TEST_CASE("certificates are never violated: keys and values cut to a subspace") {
  Random random(31);
  double best_logit = 0.0, best_softmax = 0.0, best_output = 0.0;
  for (int round = 0; round < 3000; ++round) {
    const int n = uniform(random, 1, 40), dim = uniform(random, 1, 16),
              rank = uniform(random, 1, dim);
    const double size = std::exp(std::uniform_real_distribution<double>(-3.0, 3.0)(random)),
                 scale = 1.0 / std::sqrt(dim);
    const MatrixXd keys = size * support::gaussian(random, n, dim),
                   values = support::gaussian(random, n, dim);
    const MatrixXd u = support::random_orthonormal(random, dim, rank),
                   w = support::random_orthonormal(random, dim, uniform(random, 1, dim));
    const MatrixXd keys_hat = keys * u * u.transpose(), values_hat = values * w * w.transpose();
    const VectorXd query = support::gaussian(random, dim, 1);
    const VectorXd logits = scale * keys * query, logits_hat = scale * keys_hat * query;
    const double delta = (logits - logits_hat).cwiseAbs().maxCoeff();
    const double bound =
        logit_error_bound(query.norm(), (keys - keys_hat).rowwise().norm().maxCoeff(), scale);
    CHECK(delta <= bound * (1 + 1e-12) + 1e-13);
    const VectorXd alpha = softmax(logits), alpha_hat = softmax(logits_hat);
    const double moved = (alpha - alpha_hat).lpNorm<1>();
    CHECK(moved <= softmax_error_bound(delta) + 1e-14);
    CHECK(softmax_error_bound(delta) <= softmax_error_bound(bound) + 1e-13);
    CHECK(softmax_error_bound(bound) <= softmax_error_bound_printed(bound) * (1 + 1e-15));
    const double error = (values.transpose() * alpha - values_hat.transpose() * alpha_hat).norm();
    const double residual = (values - values_hat).rowwise().norm().maxCoeff();
    const double plain = output_error_bound(softmax_error_bound(bound),
                                            values.rowwise().norm().maxCoeff(), residual);
    const VectorXd centre = values.colwise().mean();
    const double centred = output_error_bound(
        softmax_error_bound(bound),
        (values.rowwise() - centre.transpose()).rowwise().norm().maxCoeff(), residual);
    CHECK(error <= plain + 1e-13);
    CHECK(error <= centred + 1e-13);
    if (bound > 1e-6) best_logit = std::max(best_logit, delta / bound);
    if (delta > 1e-6 && delta < 1.0)
      best_softmax = std::max(best_softmax, moved / softmax_error_bound(delta));
    // Where the weights' part of the bound is the larger one; a lone residual is attained
    // trivially.
    if (residual < 0.5 * plain) best_output = std::max(best_output, error / plain);
  }
  CHECK(best_logit > 0.9);
  CHECK(best_softmax > 0.7);
  CHECK(best_output > 0.5);
  MESSAGE("largest error / bound: logits ", best_logit, ", weights ", best_softmax, ", output ",
          best_output);
}

TEST_CASE("certificates are never violated: logit errors chosen to do harm") {
  Random random(32);
  double tightest = 0.0;
  for (int round = 0; round < 5000; ++round) {
    const int n = uniform(random, 2, 12);
    const double delta = std::exp(std::uniform_real_distribution<double>(-8.0, 3.0)(random));
    const VectorXd logits =
        std::uniform_real_distribution<double>(0.0, 6.0)(random) * support::gaussian(random, n, 1);
    VectorXd moved = logits;
    for (int i = 0; i < n; ++i) moved[i] += uniform(random, 0, 1) == 0 ? delta : -delta;
    const double error = (softmax(logits) - softmax(moved)).lpNorm<1>();
    CHECK(error <= softmax_error_bound(delta) * (1 + 1e-9) + 1e-14);
    tightest = std::max(tightest, error / softmax_error_bound(delta));
  }
  CHECK(tightest > 0.95);
  MESSAGE("largest ||alpha - alpha^||_1 / bound: ", tightest);
}

TEST_CASE("two tokens attain every certificate at once") {
  for (const double delta : {1e-6, 0.01, 0.5, 1.0, 3.0, 12.0}) {
    // One channel. Keys -+ delta / 2 under the query 1 decode to +- delta / 2: each logit is off by
    // delta.
    const VectorXd keys = (VectorXd(2) << -0.5 * delta, 0.5 * delta).finished(), keys_hat = -keys;
    const double bound = logit_error_bound(1.0, (keys - keys_hat).cwiseAbs().maxCoeff(), 1.0);
    CHECK(bound == doctest::Approx(delta).epsilon(1e-14));
    const VectorXd alpha = softmax(keys), alpha_hat = softmax(keys_hat);
    const double weights = softmax_error_bound(bound);
    CHECK((alpha - alpha_hat).lpNorm<1>() == doctest::Approx(weights).epsilon(1e-9));
    // Values 3 and 5: around their centre 4 they are +- 1, and the decoded ones are off by 0.25 in
    // the same direction.
    const VectorXd values = (VectorXd(2) << 3.0, 5.0).finished(),
                   values_hat = values.array() - 0.25;
    const double error = std::abs(values.dot(alpha) - values_hat.dot(alpha_hat));
    CHECK(error == doctest::Approx(output_error_bound(weights, 1.0, 0.25)).epsilon(1e-9));
    CHECK(error < output_error_bound(weights, 5.0, 0.25));
  }
}

TEST_CASE("certificates at their limits") {
  CHECK(softmax_error_bound(0.0) == 0.0);
  CHECK(softmax_error_bound(inf) == 2.0);
  CHECK(softmax_error_bound(1e-9) == doctest::Approx(1e-9));
  CHECK(softmax_error_bound_printed(1e-9) == doctest::Approx(1e-9));
  CHECK(softmax_error_bound_printed(1.76) < 2.0);
  CHECK(softmax_error_bound_printed(1.77) > 2.0);
  CHECK(logit_error_bound(2.0, 3.0, -0.5) == 3.0);
  CHECK(logit_error_bound(inf, 0.0, 1.0) == 0.0);
  CHECK(output_error_bound(0.0, inf, 0.5) == 0.5);
  CHECK(output_error_bound(0.5, 4.0, 0.25) == 2.25);
  CHECK_THROWS_WITH_AS(softmax_error_bound(-1.0), "certificate: delta is -1, at least 0 expected",
                       ValueError);
  CHECK_THROWS_AS(softmax_error_bound_printed(std::nan("")), ValueError);
  CHECK_THROWS_WITH_AS(logit_error_bound(1.0, -2.0, 1.0),
                       "certificate: max_key_residual is -2, at least 0 expected", ValueError);
  CHECK_THROWS_AS(logit_error_bound(-1.0, 2.0, 1.0), ValueError);
  CHECK_THROWS_AS(logit_error_bound(1.0, 2.0, inf), ValueError);
  CHECK_THROWS_AS(output_error_bound(-1.0, 1.0, 1.0), ValueError);
  CHECK_THROWS_AS(output_error_bound(1.0, std::nan(""), 1.0), ValueError);
  CHECK_THROWS_AS(output_error_bound(1.0, 1.0, -1.0), ValueError);
}

TEST_CASE(
    "the bound that knows every token's residual is never violated, is attained, and is the "
    "sharper one where few tokens err") {
  Random random(37);
  double best = 0.0;
  int sharper = 0;
  for (int round = 0; round < 5000; ++round) {
    const int n = uniform(random, 2, 30);
    const VectorXd logits_hat = 2.0 * support::gaussian(random, n, 1);
    VectorXd limits = support::gaussian(random, n, 1).cwiseAbs() * std::exp(uniform(random, -4, 1));
    for (int i = 0; i < n; ++i) {
      if (uniform(random, 0, 2) > 0) limits[i] = 0.0;
    }
    const VectorXd alpha_hat = softmax(logits_hat);
    const double growth = alpha_hat.dot((limits.array().exp() - 1.0).matrix()),
                 decay = alpha_hat.dot((1.0 - (-limits.array()).exp()).matrix());
    const double bound = weighted_softmax_error_bound(growth, decay);
    for (int attempt = 0; attempt < 4; ++attempt) {
      VectorXd logits = logits_hat;
      for (int i = 0; i < n; ++i)
        logits[i] += limits[i] * (uniform(random, 0, 1) == 0 ? 1.0 : attempt == 0 ? 1.0 : -1.0);
      const double moved = (softmax(logits) - alpha_hat).lpNorm<1>();
      REQUIRE(moved <= bound + 1e-12);
      if (bound > 1e-6) best = std::max(best, moved / bound);
    }
    if (bound < softmax_error_bound(limits.maxCoeff())) ++sharper;
  }
  CHECK(best > 0.95);
  CHECK(sharper > 2000);
  MESSAGE("largest change of the weights / bound ", best, ", sharper than the plain bound in ",
          sharper, " of 5000");
  CHECK(weighted_softmax_error_bound(0.0, 0.0) == 0.0);
  CHECK(weighted_softmax_error_bound(1.5e308, 0.5) == 2.0);  // twice that is no number
  CHECK(weighted_softmax_error_bound(inf, 1.0) == 2.0);
  CHECK(weighted_softmax_error_bound(1e-9, 1.0) == doctest::Approx(2.0));
  CHECK_THROWS_AS(weighted_softmax_error_bound(-1.0, 0.0), ValueError);
  CHECK_THROWS_AS(weighted_softmax_error_bound(0.0, std::nan("")), ValueError);
}

}  // namespace certificate_tests
