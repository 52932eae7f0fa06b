// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cstdio>
#include <limits>

#include "../support/random_layer.hpp"
#include "lowrankkv/calibrate/bundle.hpp"
#include "lowrankkv/calibrate/choose_rank.hpp"
#include "lowrankkv/calibrate/layer_moments.hpp"
#include "lowrankkv/cpu/snapkv_scores.hpp"
#include "lowrankkv/cpu/top_rows.hpp"
#include "lowrankkv/cpu/updater/oja.hpp"
#include "lowrankkv/diagnostics/residual_energy.hpp"
#include "lowrankkv/diagnostics/subspace_overlap.hpp"

using namespace lowrankkv;
using support::Random;

namespace {
Eigen::MatrixXd spread_rows(Random& random, int n, int dim, double decay) {
  const Eigen::MatrixXd axes = support::random_orthonormal(random, dim, dim);
  Eigen::VectorXd scale(dim);
  for (int i = 0; i < dim; ++i) scale[i] = std::exp(-decay * i);
  return support::gaussian(random, n, dim) * scale.asDiagonal() * axes.transpose();
}
}  // namespace

TEST_CASE("the default Oja step never raises the residual energy of its batch, for any rate") {
  Random random(1);
  for (int round = 0; round < 120; ++round) {
    const int dim = std::uniform_int_distribution<int>(2, 96)(random);
    const int rank = std::uniform_int_distribution<int>(1, dim)(random);
    const Eigen::MatrixXd rows =
        20.0 * spread_rows(random, std::uniform_int_distribution<int>(1, 300)(random), dim, 0.05);
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
  Eigen::MatrixXd rows = spread_rows(random, 410, 128, 0.02);
  rows *= 20.0 / std::sqrt(rows.squaredNorm() / 410.0);  // E||k||^2 = 400
  const Eigen::MatrixXd other = spread_rows(random, 400, 128, 0.02);
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
  const Eigen::MatrixXd rows = spread_rows(random, 2000, 24, 0.3);
  const Eigen::MatrixXd best =
      calibrate::principal_axes(rows.transpose() * rows).vectors.leftCols(6);
  Eigen::MatrixXd basis = support::random_orthonormal(random, 24, 6);
  CHECK(diagnostics::subspace_overlap(basis, best) < 0.7);
  for (int step = 0; step < 200; ++step)
    basis = cpu::oja_update(rows.middleRows(step * 10, 10), basis, 0.3);
  CHECK(diagnostics::subspace_overlap(basis, best) > 0.95);
}

TEST_CASE("principal axes beat every other basis of their rank, and energies add up") {
  Random random(5);
  const Eigen::MatrixXd rows = spread_rows(random, 500, 32, 0.1);
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
    "calibrated maps: streaming equals at once, [Q; K] is stacked by rows, query-aware keys have "
    "the smallest logit error") {
  Random random(6);
  const CacheShape shape{4, 2, 24};
  const int n = 400;
  const auto mix = [&](int heads) {
    std::vector<float> rows;
    std::vector<Eigen::MatrixXd> per_head;
    for (int h = 0; h < heads; ++h) per_head.push_back(spread_rows(random, n, 24, 0.15));
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

TEST_CASE("centred bases describe rows around their mean") {
  Random random(7);
  const CacheShape shape{1, 1, 16};
  std::vector<float> rows = support::random_rows(random, 300, 1, 16, 5.0);
  calibrate::LayerMoments moments(shape);
  moments.add({rows.data(), 300, 1, 16}, {rows.data(), 300, 1, 16}, {rows.data(), 300, 1, 16});
  const LayerBasis basis =
      moments.basis({.key_ratio = 0.5, .value_ratio = 0.5, .policy = {.centred = true}});
  validate({.centred = true}, basis, shape);
  for (int i = 0; i < 16; ++i)
    CHECK(basis.heads[0].key_mean[static_cast<std::size_t>(i)] ==
          doctest::Approx(moments.head(0).key.mean()[i]));
  // The mean's direction is no longer the first axis.
  const Eigen::MatrixXd down = support::from_row_major(basis.heads[0].key_down, 16, 8);
  CHECK(std::abs(down.col(0).dot(moments.head(0).key.mean().normalized())) < 0.9);
}

TEST_CASE(
    "SnapKV scores are the attention that the last queries pay, causal, summed over the group") {
  Random random(8);
  const int n = 50, window = 6, group = 3, dim = 8;
  const auto keys = support::random_rows(random, n, 1, dim),
             queries = support::random_rows(random, window * group, 1, dim);
  const auto scores = cpu::snapkv_scores({queries.data(), window * group, dim}, group,
                                         {keys.data(), n, dim}, 0.35F);
  std::vector<double> expected(n, 0.0);
  for (int row = 0; row < window * group; ++row) {
    const int visible = n - window + row / group + 1;
    Eigen::VectorXd logits(visible);
    for (int t = 0; t < visible; ++t)
      logits[t] =
          0.35 * support::row_of(keys, t, 1, 0, dim).dot(support::row_of(queries, row, 1, 0, dim));
    const Eigen::VectorXd weights = (logits.array() - logits.maxCoeff()).exp();
    for (int t = 0; t < visible; ++t)
      expected[static_cast<std::size_t>(t)] += weights[t] / weights.sum();
  }
  for (int t = 0; t < n; ++t)
    CHECK(scores[static_cast<std::size_t>(t)] ==
          doctest::Approx(expected[static_cast<std::size_t>(t)]).epsilon(1e-4));
  CHECK(cpu::top_rows(std::vector<float>{1.0F, 5.0F, 5.0F, 0.5F}, 2) ==
        std::vector<std::int64_t>{1, 2});
  CHECK(cpu::top_rows(std::vector<float>{1.0F, 5.0F, 5.0F, 0.5F}, 99).size() == 4);
  CHECK_THROWS_WITH_AS(
      cpu::snapkv_scores({queries.data(), 18, dim}, 3, {keys.data(), 4, dim}, 1.0F),
      "snapkv_scores: 6 queries, 4 keys", ShapeError);
}

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
