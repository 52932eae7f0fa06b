// SPDX-License-Identifier: Apache-2.0
// Low-rank projectors: shapes of eq. 10, and what their start keeps of the trained ones.
#include "lowrankkv/train/low_rank_projectors.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "support/random_projectors.hpp"

namespace low_rank_projectors_tests {

using namespace lowrankkv;
using Eigen::MatrixXd;
using Eigen::VectorXd;
using support::Random;
using train::DlrpGeometry;
using train::LowRankStart;
using train::Projection;

MatrixXd product_of(const train::DeepProjectors& projectors, int layer, Projection projection,
                    int head) {
  return calibrate::fold(projectors.chain(projectors.chain_index({layer, projection, head})));
}

/// The distance from `matrix` to the nearest of a rank: the root of the other sigma^2.
double rest_behind(const MatrixXd& matrix, int rank) {
  const VectorXd sigma = Eigen::JacobiSVD<MatrixXd>(matrix).singularValues();
  return sigma.tail(std::max<Eigen::Index>(0, sigma.size() - rank)).norm();
}

/// The outputs of a group side by side.
MatrixXd outputs_of(const train::DeepProjectors& projectors, int layer, int kv_head, int rows) {
  const int dim = projectors.shape.head_dim;
  const int group = projectors.num_maps(Projection::output) / projectors.shape.num_kv_heads;
  MatrixXd outputs(rows, group * dim);
  for (int i = 0; i < group; ++i)
    outputs.middleCols(i * dim, dim) =
        product_of(projectors, layer, Projection::output, kv_head * group + i);
  return outputs;
}

TEST_CASE("maps that meet without RoPE between them come as close as their rank allows") {
  Random random(460);
  for (int round = 0; round < 40; ++round) {
    const auto geometry = round % 2 == 0 ? DlrpGeometry::before_rope : DlrpGeometry::after_rope;
    const auto trained = support::random_projectors(random, geometry, 0.5);
    const int dim = trained.shape.head_dim;
    const auto cut = train::low_rank_projectors(trained, support::random_ranks(random, trained));
    train::check_projectors(cut);
    CHECK(cut.options == trained.options);
    for (int layer = 0; layer < cut.num_layers; ++layer) {
      for (int head = 0; head < cut.shape.num_kv_heads; ++head) {
        const int vo = cut.head_ranks(layer, head).vo, qk = cut.head_ranks(layer, head).qk;
        const MatrixXd whole = product_of(trained, layer, Projection::value, head) *
                               outputs_of(trained, layer, head, dim);
        const MatrixXd near =
            product_of(cut, layer, Projection::value, head) * outputs_of(cut, layer, head, vo);
        CHECK(std::abs((whole - near).norm() - rest_behind(whole, vo)) <= 1e-11 * whole.norm());
        if (geometry == DlrpGeometry::before_rope) continue;
        const MatrixXd logits = product_of(trained, layer, Projection::query, head) *
                                product_of(trained, layer, Projection::key, head).transpose();
        const MatrixXd near_logits = product_of(cut, layer, Projection::query, head) *
                                     product_of(cut, layer, Projection::key, head).transpose();
        CHECK(std::abs((logits - near_logits).norm() - rest_behind(logits, qk)) <=
              1e-11 * logits.norm());
      }
    }
  }
}

TEST_CASE("before RoPE whole pairs of channels stay, those with the most energy in the logits") {
  Random random(461);
  for (int round = 0; round < 40; ++round) {
    const auto trained = support::random_projectors(random, DlrpGeometry::before_rope, 0.5);
    const int dim = trained.shape.head_dim, group = trained.shape.group_size();
    const auto cut = train::low_rank_projectors(trained, support::random_ranks(random, trained));
    const auto channels_of = [&](int pair) {
      return trained.options.pairing == RopePairing::interleaved
                 ? std::vector<int>{2 * pair, 2 * pair + 1}
                 : std::vector<int>{pair, pair + dim / 2};
    };
    for (int layer = 0; layer < cut.num_layers; ++layer) {
      for (int head = 0; head < cut.shape.num_kv_heads; ++head) {
        const auto& own = cut.head_ranks(layer, head);
        std::vector<double> energy(static_cast<std::size_t>(dim / 2));
        const MatrixXd key = product_of(trained, layer, Projection::key, head);
        for (int pair = 0; pair < dim / 2; ++pair) {
          double of_key = 0.0, of_query = 0.0;
          for (const int channel : channels_of(pair)) {
            of_key += key.col(channel).squaredNorm();
            for (int i = 0; i < group; ++i)
              of_query += product_of(trained, layer, Projection::query, head * group + i)
                              .col(channel)
                              .squaredNorm();
          }
          energy[static_cast<std::size_t>(pair)] = of_key * of_query;
        }
        REQUIRE(own.pairs.size() == static_cast<std::size_t>(own.qk / 2));
        double least = HUGE_VAL;
        for (const int pair : own.pairs) least = std::min(least, energy[std::size_t(pair)]);
        for (int pair = 0; pair < dim / 2; ++pair) {
          if (std::find(own.pairs.begin(), own.pairs.end(), pair) == own.pairs.end())
            CHECK(energy[static_cast<std::size_t>(pair)] <= least * (1 + 1e-12));
        }
        // Columns are the trained maps' own, in the order in which RoPE of qk channels pairs them.
        const MatrixXd narrow = product_of(cut, layer, Projection::key, head);
        for (int i = 0; i < own.qk / 2; ++i) {
          const auto channels = channels_of(own.pairs[static_cast<std::size_t>(i)]);
          const bool half_split = trained.options.pairing == RopePairing::half_split;
          const int first = half_split ? i : 2 * i,
                    second = half_split ? i + own.qk / 2 : 2 * i + 1;
          CHECK((narrow.col(first) - key.col(channels[0])).norm() <= 1e-12 * key.norm());
          CHECK((narrow.col(second) - key.col(channels[1])).norm() <= 1e-12 * key.norm());
        }
      }
    }
  }
  // Pairs that are given are kept.
  train::DlrpOptions options;
  options.hidden = 8;
  const auto trained = train::identity_projectors({2, 1, 8}, 1, options);
  const auto cut = train::low_rank_projectors(trained, {{4, 3, {1, 3}}});
  CHECK(cut.head_ranks(0, 0).pairs == std::vector<int>{1, 3});
  MatrixXd selection = MatrixXd::Zero(8, 4);
  selection(1, 0) = selection(3, 1) = selection(5, 2) = selection(7, 3) = 1.0;
  CHECK(product_of(cut, 0, Projection::query, 1) == selection);
}

TEST_CASE("an identity start keeps nothing of the factors, and full ranks keep all") {
  Random random(462);
  for (int round = 0; round < 20; ++round) {
    const auto geometry = round % 2 == 0 ? DlrpGeometry::before_rope : DlrpGeometry::after_rope;
    const auto trained = support::random_projectors(random, geometry);
    const auto identity = train::low_rank_projectors(
        trained, support::random_ranks(random, trained), LowRankStart::identity);
    train::check_projectors(identity);
    for (const MatrixXd& factor : identity.factors) {
      CHECK(factor.cwiseAbs2() == factor.cwiseAbs());  // zeros and ones
      CHECK((factor.colwise().sum().array() <= 1.0).all());
    }
    for (const MatrixXd& product : train::fold_chains(identity))
      CHECK(product.sum() == static_cast<double>(std::min(product.rows(), product.cols())));
    std::vector<train::HeadRanks> full(trained.ranks.size());
    for (auto& own : full) own.qk = own.vo = trained.shape.head_dim;
    const auto whole = train::low_rank_projectors(trained, full);
    if (geometry == DlrpGeometry::before_rope) CHECK(whole.ranks == trained.ranks);
    const int dim = trained.shape.head_dim;
    const MatrixXd values =
        product_of(trained, 0, Projection::value, 0) * outputs_of(trained, 0, 0, dim);
    CHECK(support::relative_distance(
              product_of(whole, 0, Projection::value, 0) * outputs_of(whole, 0, 0, dim), values) <
          1e-12);
  }
}

TEST_CASE("a cut of maps with fewer directions than its rank has zeros and no NaN") {
  Random random(463);
  const MatrixXd a = support::gaussian(random, 5, 2) * support::gaussian(random, 2, 6);
  const MatrixXd b = support::gaussian(random, 6, 4);
  const auto cut = train::balanced_cut(a, b, 5);
  CHECK(support::relative_distance(a * cut.left * cut.right * b, a * b) < 1e-12);
  CHECK(cut.left.rightCols(3) == MatrixXd::Zero(6, 3));
  CHECK(cut.right.bottomRows(3) == MatrixXd::Zero(3, 6));
  const auto nothing = train::balanced_cut(MatrixXd::Zero(3, 3), MatrixXd::Zero(3, 3), 2);
  CHECK(nothing.left == MatrixXd::Zero(3, 2));
  CHECK_THROWS_WITH_AS(train::balanced_cut(a, a, 2), "inner: left map 6, right map 5", ShapeError);
  CHECK_THROWS_WITH_AS(
      train::balanced_cut(1e200 * MatrixXd::Identity(2, 2), 1e200 * MatrixXd::Identity(2, 2), 1),
      "cut: the product's norm is inf, finite expected", ValueError);
  CHECK_THROWS_WITH_AS(train::balanced_cut(a, b, 7), "rank: 7, inner 6", ShapeError);
}

TEST_CASE("ranks that cannot be, and projectors that are cut already, are refused") {
  train::DlrpOptions options;
  options.hidden = 4;
  const auto trained = train::identity_projectors({2, 1, 4}, 1, options);
  using train::low_rank_projectors;
  CHECK_THROWS_WITH_AS(low_rank_projectors(trained, {}), "ranks: heads 1, given 0", ShapeError);
  CHECK_THROWS_WITH_AS(low_rank_projectors(trained, {{3, 2, {}}}), "rank: r_qk 3, even before RoPE",
                       ShapeError);
  CHECK_THROWS_WITH_AS(low_rank_projectors(trained, {{6, 2, {}}}), "rank: r_qk 6, head_dim 4",
                       ShapeError);
  CHECK_THROWS_WITH_AS(low_rank_projectors(trained, {{2, 5, {}}}), "rank: r_vo 5, head_dim 4",
                       ShapeError);
  const auto cut = low_rank_projectors(trained, {{2, 3, {}}});
  CHECK_THROWS_WITH_AS(low_rank_projectors(cut, {{2, 3, {}}}), "rank: trained r_qk 2, head_dim 4",
                       ShapeError);
}

}  // namespace low_rank_projectors_tests
