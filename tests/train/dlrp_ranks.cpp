// SPDX-License-Identifier: Apache-2.0
// Ranks by energy: the larger of a pair, the largest of a layer, and thresholds for a rate.
#include "lowrankkv/train/dlrp_ranks.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "support/random_projectors.hpp"

namespace dlrp_ranks_tests {

using namespace lowrankkv;
using Eigen::MatrixXd;
using Eigen::VectorXd;
using support::Random;
using train::DlrpGeometry;
using train::Projection;
using train::RankScope;

/// The rank as the paper says it, from the singular values of a product.
int rank_of(const MatrixXd& product, double energy) {
  const VectorXd squares = Eigen::JacobiSVD<MatrixXd>(product).singularValues().cwiseAbs2();
  double sum = 0.0;
  for (int rank = 1; rank <= squares.size(); ++rank) {
    sum += squares[rank - 1];
    if (sum >= energy * squares.sum()) return rank;
  }
  return static_cast<int>(squares.size());
}

TEST_CASE("r_qk and r_vo are the larger ranks of their pairs, of a head or of a layer") {
  Random random(450);
  for (int round = 0; round < 60; ++round) {
    const auto geometry = round % 2 == 0 ? DlrpGeometry::before_rope : DlrpGeometry::after_rope;
    const auto projectors = support::random_projectors(random, geometry, 0.5);
    const double energy = std::uniform_real_distribution<double>(0.2, 0.99)(random);
    const auto spectra = train::chain_spectra(projectors);
    const auto of_heads = train::select_ranks(projectors, spectra, energy, RankScope::kv_head);
    const auto of_layers = train::select_ranks(projectors, spectra, energy);
    const auto products = train::fold_chains(projectors);
    for (int layer = 0; layer < projectors.num_layers; ++layer) {
      int layer_qk = 0, layer_vo = 0;
      for (int head = 0; head < projectors.shape.num_kv_heads; ++head) {
        const int group = projectors.num_maps(Projection::query) / projectors.shape.num_kv_heads;
        const auto largest = [&](Projection own, Projection shared) {
          int rank = 0;
          for (int i = 0; i < group; ++i)
            rank = std::max(rank, rank_of(products[static_cast<std::size_t>(projectors.chain_index(
                                              {layer, own, head * group + i}))],
                                          energy));
          return std::max(
              rank,
              rank_of(
                  products[static_cast<std::size_t>(projectors.chain_index({layer, shared, head}))],
                  energy));
        };
        int qk = largest(Projection::query, Projection::key);
        if (geometry == DlrpGeometry::before_rope) qk = (qk + 1) / 2 * 2;
        const int vo = largest(Projection::output, Projection::value);
        const auto at = static_cast<std::size_t>(layer * projectors.shape.num_kv_heads + head);
        CHECK(of_heads[at].qk == qk);
        CHECK(of_heads[at].vo == vo);
        layer_qk = std::max(layer_qk, qk);
        layer_vo = std::max(layer_vo, vo);
      }
      for (int head = 0; head < projectors.shape.num_kv_heads; ++head) {
        const auto at = static_cast<std::size_t>(layer * projectors.shape.num_kv_heads + head);
        CHECK(of_layers[at].qk == layer_qk);
        CHECK(of_layers[at].vo == layer_vo);
      }
    }
  }
}

TEST_CASE("a threshold for a compression rate is the largest that reaches it") {
  Random random(451);
  int reached = 0;
  for (int round = 0; round < 30; ++round) {
    const auto geometry = round % 2 == 0 ? DlrpGeometry::before_rope : DlrpGeometry::after_rope;
    const auto scope = round % 3 == 0 ? RankScope::kv_head : RankScope::layer;
    const auto projectors = support::random_projectors(random, geometry, 0.5);
    const auto spectra = train::chain_spectra(projectors);
    const auto rate_at = [&](double energy) {
      return train::compression_rate(train::select_ranks(projectors, spectra, energy, scope),
                                     projectors.shape.head_dim);
    };
    const double most = rate_at(1e-12);
    for (const double rate : {0.0, 0.1, 0.25, 0.5}) {
      if (rate > most) continue;
      const double energy = train::energy_for_compression(projectors, spectra, rate, scope);
      CHECK(rate_at(energy) >= rate);
      if (energy < 1.0) CHECK(rate_at(std::min(1.0, energy * (1 + 1e-12))) < rate);
      ++reached;
    }
  }
  CHECK(reached > 60);
  CHECK(train::compression_rate({{4, 2, {}}, {8, 2, {}}}, 8) == 0.5);
}

TEST_CASE("thresholds, rates and spectra that cannot be are refused with both values") {
  train::DlrpOptions options;
  options.hidden = 4;
  const auto projectors = train::identity_projectors({2, 1, 4}, 1, options);
  const auto spectra = train::chain_spectra(projectors);
  CHECK_THROWS_WITH_AS(train::select_ranks(projectors, spectra, 1.5),
                       "energy share: in (0, 1], given 1.5", ValueError);
  CHECK_THROWS_WITH_AS(train::select_ranks(projectors, {spectra[0]}, 0.5),
                       "spectra: chains 6, given 1", ShapeError);
  CHECK_THROWS_WITH_AS(train::energy_for_compression(projectors, spectra, 0.7),
                       "compression rate: 0.7, ranks by energy save 0 to 0.625", ValueError);
  CHECK_THROWS_WITH_AS(train::energy_for_compression(projectors, spectra, -0.1),
                       "compression rate: -0.1, ranks by energy save 0 to 0.625", ValueError);
  CHECK_THROWS_WITH_AS(train::compression_rate({}, 8),
                       "compression rate: heads 0, head_dim 8; both must be at least 1",
                       ShapeError);
  // An identity keeps every rank until e falls below its share.
  CHECK(train::select_ranks(projectors, spectra, 1.0)[0].qk == 4);
  CHECK(train::select_ranks(projectors, spectra, 0.75)[0].vo == 3);
}

}  // namespace dlrp_ranks_tests
