// SPDX-License-Identifier: Apache-2.0
// Moments of a layer, and the bases that follow from them.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "lowrankkv/calibrate/bundle.hpp"
#include "lowrankkv/calibrate/choose_rank.hpp"
#include "lowrankkv/calibrate/layer_moments.hpp"
#include "lowrankkv/diagnostics/subspace_overlap.hpp"
#include "support/matrices.hpp"
#include "support/rope.hpp"

namespace layer_moments_tests {

using namespace lowrankkv;
using support::pre_rope;
using support::Random;
using support::rotate_rows;

TEST_CASE(
    "calibrated maps: streaming equals at once, [Q; K] is stacked by rows, query-aware keys have "
    "the smallest logit error") {
  Random random(6);
  const CacheShape shape{4, 2, 24};
  const int n = 400;
  const auto mix = [&](int heads) {
    std::vector<float> rows;
    std::vector<Eigen::MatrixXd> per_head;
    for (int h = 0; h < heads; ++h) per_head.push_back(support::decaying_rows(random, n, 24, 0.15));
    for (int t = 0; t < n; ++t) {
      for (int h = 0; h < heads; ++h) {
        for (int i = 0; i < 24; ++i)
          rows.push_back(static_cast<float>(per_head[static_cast<std::size_t>(h)](t, i)));
      }
    }
    return rows;
  };
  const auto q = mix(4), k = mix(2), v = mix(2);
  calibrate::LayerMoments whole(shape), pieces(shape);
  whole.add({q.data(), n, 4, 24}, {k.data(), n, 2, 24}, {v.data(), n, 2, 24});
  for (int at = 0; at < n; at += 37) {
    const int count = std::min(37, n - at);
    pieces.add(QueryView(q.data(), n, 4, 24).tokens(at, count),
               KeyView(k.data(), n, 2, 24).tokens(at, count),
               ValueView(v.data(), n, 2, 24).tokens(at, count));
  }
  CHECK((whole.head(1).key.second - pieces.head(1).key.second).norm() <
        1e-9 * whole.head(1).key.second.norm());
  CHECK(whole.head(0).query.count == 2 * n);

  const auto rows_of = [&](const std::vector<float>& rows, int heads, int head) {
    Eigen::MatrixXd matrix(n, 24);
    for (int t = 0; t < n; ++t) matrix.row(t) = support::row_of(rows, t, heads, head, 24);
    return matrix;
  };
  const Eigen::MatrixXd keys = rows_of(k, 2, 1);
  Eigen::MatrixXd queries(2 * n, 24);
  queries << rows_of(q, 4, 2), rows_of(q, 4, 3);
  const auto logit_error = [&](const LayerBasis& basis) {
    const HeadBasis& head = basis.heads[1];
    const Eigen::MatrixXd down = support::from_row_major(head.key_down, 24, head.key_rank);
    const Eigen::MatrixXd up = head.query_down.empty()
                                   ? down
                                   : support::from_row_major(head.query_down, 24, head.key_rank);
    return (queries * (keys - keys * down * up.transpose()).transpose()).squaredNorm();
  };
  calibrate::BasisOptions options{.key_ratio = 0.4, .value_ratio = 0.4};
  options.policy.centred = false;
  const double plain = logit_error(whole.basis(options));
  options.key_source = calibrate::KeySource::queries_and_keys;
  const LayerBasis stacked = whole.basis(options);
  options.policy.key_metric = KeyMetric::query_aware;
  const LayerBasis aware = whole.basis(options);
  validate(options.policy, aware, shape);
  CHECK(logit_error(aware) < plain);
  CHECK(logit_error(aware) < logit_error(stacked));

  const LayerBasis by_energy = whole.basis({.key_energy = 0.95, .value_energy = 0.8});
  int largest = 0;
  for (int head = 0; head < 2; ++head)
    largest =
        std::max(largest, calibrate::rank_by_energy(whole.key_spectrum(head, {}).values, 0.95));
  CHECK(by_energy.heads[0].key_rank == largest);
  CHECK(by_energy.heads[1].key_rank == largest);
  CHECK(by_energy.heads[0].value_rank < largest);

  Eigen::MatrixXd rows(3 * n, 24);
  rows << queries, keys;
  const Eigen::MatrixXd expected =
      calibrate::principal_axes(rows.transpose() * rows).vectors.leftCols(10);
  CHECK(diagnostics::subspace_overlap(
            expected, support::from_row_major(stacked.heads[1].key_down, 24, 10)) > 1.0 - 1e-6);

  const std::string path = "moments_test.safetensors";
  calibrate::save_moments(path, {whole, pieces}, {{"source", "random"}});
  const auto loaded = calibrate::load_moments(path, shape, 2);
  CHECK(loaded[0].head(1).key.second == whole.head(1).key.second);
  CHECK(loaded[1].head(0).value.first == pieces.head(0).value.first);
  CHECK_THROWS_WITH_AS(calibrate::load_moments(path, shape, 3), "num_layers: bundle 2, model 3",
                       ShapeError);
  CHECK_THROWS_WITH_AS(calibrate::load_moments(path, {4, 2, 32}, 2),
                       "head_dim: bundle 24, model 32", ShapeError);
  std::remove(path.c_str());
  CHECK_THROWS_AS(calibrate::load_moments(path, shape, 2), FormatError);
}

TEST_CASE("bases describe rows around their mean") {
  Random random(7);
  const CacheShape shape{1, 1, 16};
  std::vector<float> rows = support::random_rows(random, 300, 1, 16, 5.0);
  calibrate::LayerMoments moments(shape);
  moments.add({rows.data(), 300, 1, 16}, {rows.data(), 300, 1, 16}, {rows.data(), 300, 1, 16});
  const LayerBasis basis = moments.basis({.key_ratio = 0.5, .value_ratio = 0.5});
  validate(PerHead{}, basis, shape);
  const LayerBasis paper =
      moments.basis({.key_ratio = 0.5, .value_ratio = 0.5, .policy = {.centred = false}});
  validate({.centred = false}, paper, shape);
  CHECK_THROWS_WITH_AS(validate({.centred = false}, basis, shape),
                       "basis: key_mean has 16 elements, expected 0", ShapeError);
  for (int i = 0; i < 16; ++i)
    CHECK(basis.heads[0].key_mean[static_cast<std::size_t>(i)] ==
          doctest::Approx(moments.head(0).key.mean()[i]));
  // The mean's direction is no longer the first axis.
  const Eigen::MatrixXd down = support::from_row_major(basis.heads[0].key_down, 16, 8);
  CHECK(std::abs(down.col(0).dot(moments.head(0).key.mean().normalized())) < 0.9);
}

TEST_CASE("means are subtracted from where they have their share of the energy") {
  Random random(8);
  const CacheShape shape{1, 1, 16};
  const std::vector<float> rows = support::random_rows(random, 300, 1, 16, 0.3);
  calibrate::LayerMoments moments(shape);
  moments.add({rows.data(), 300, 1, 16}, {rows.data(), 300, 1, 16}, {rows.data(), 300, 1, 16});
  const calibrate::Moments& keys = moments.head(0).key;
  const double share = keys.mean_share();
  CHECK(share == doctest::Approx(keys.mean().squaredNorm() / (keys.second.trace() / 300.0)));
  CHECK(share > 0.01);
  CHECK(share < 0.5);
  CHECK(calibrate::Moments(4).mean_share() == 0.0);  // no rows
  for (const bool aware : {false, true}) {
    calibrate::BasisOptions options;
    options.policy.key_metric = aware ? KeyMetric::query_aware : KeyMetric::plain;
    const Eigen::MatrixXd root = calibrate::metric_root(moments.head(0).query.second).root;
    const double of_keys = aware ? keys.mean_share(root) : share;
    if (aware) {
      const Eigen::VectorXd mean = root * keys.mean();
      CHECK(of_keys ==
            doctest::Approx(mean.squaredNorm() / ((root * keys.second * root).trace() / 300.0)));
    }
    options.mean_share = 1.01 * of_keys;
    CHECK(moments.basis(options).heads[0].key_mean.empty());
    CHECK(moments.basis(options).heads[0].key_down == [&] {
      calibrate::BasisOptions paper = options;
      paper.policy.centred = false;
      return moments.basis(paper).heads[0].key_down;
    }());
    options.mean_share = 0.99 * of_keys;
    CHECK(moments.basis(options).heads[0].key_mean.size() == 16);
  }
  calibrate::BasisOptions options;
  options.mean_share = 1.01 * share;
  CHECK(moments.basis(options).heads[0].value_mean.empty());
  options.mean_share = 0.99 * share;
  CHECK(moments.basis(options).heads[0].value_mean.size() == 16);
}

TEST_CASE(
    "queries' moments for pre-RoPE keys are those at all distances, so a fast pair has no "
    "preferred direction") {
  Random random(10);
  constexpr int dim = 4, n = 4000;
  const CacheShape shape{1, 1, dim};
  RopeConfig rope = pre_rope();
  rope.frequencies = {
      1.0, 1e-6};  // pairs (0, 2) and (1, 3): one rotates with every token, one hardly at all
  std::vector<float> q(n * dim, 0.0F), zero(n * dim, 0.0F);
  for (int token = 0; token < n; ++token)
    q[static_cast<std::size_t>(token * dim)] = q[static_cast<std::size_t>(token * dim + 1)] =
        1.0F;  // always (1, 1, 0, 0) before rotation
  const auto rotated_queries = rotate_rows(q, 1, dim, rope);
  calibrate::LayerMoments moments(shape, rope);
  moments.add({rotated_queries.data(), n, 1, dim}, {zero.data(), n, 1, dim},
              {zero.data(), n, 1, dim});
  const Eigen::MatrixXd mean = moments.head(0).query.second / n;
  CHECK(mean(0, 0) == doctest::Approx(0.5).epsilon(0.03));
  CHECK(mean(2, 2) == doctest::Approx(0.5).epsilon(0.03));
  CHECK(std::abs(mean(0, 2)) < 0.02);
  CHECK(mean(1, 1) > 0.99);
  CHECK(mean(3, 3) < 0.01);
}

}  // namespace layer_moments_tests
