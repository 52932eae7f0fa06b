// SPDX-License-Identifier: Apache-2.0
// The projectors of a model: what each head has, in which order, and what is refused.
#include "lowrankkv/train/deep_projectors.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "support/random_projectors.hpp"

namespace deep_projectors_tests {

using namespace lowrankkv;
using Eigen::MatrixXd;
using support::Random;
using train::DlrpGeometry;
using train::Projection;

TEST_CASE("training starts from identities, a chain for each map of each head") {
  const train::DlrpOptions paper;
  CHECK(paper.num_factors == 2);
  CHECK(paper.hidden == 256);
  CHECK(paper.alpha == 0.01);
  CHECK(paper.geometry == DlrpGeometry::before_rope);
  Random random(430);
  for (int round = 0; round < 60; ++round) {
    const auto geometry = round % 2 == 0 ? DlrpGeometry::before_rope : DlrpGeometry::after_rope;
    const CacheShape shape = support::random_shape(random, geometry);
    train::DlrpOptions options;
    options.geometry = geometry;
    options.num_factors = support::uniform(random, 1, 3);
    options.hidden = shape.head_dim + support::uniform(random, 0, 3);
    const int layers = support::uniform(random, 1, 3);
    const auto projectors = train::identity_projectors(shape, layers, options);
    const int queries =
        geometry == DlrpGeometry::before_rope ? shape.num_qo_heads : shape.num_kv_heads;
    CHECK(projectors.num_maps(Projection::query) == queries);
    CHECK(projectors.num_maps(Projection::output) == queries);
    CHECK(projectors.num_maps(Projection::key) == shape.num_kv_heads);
    CHECK(projectors.num_maps(Projection::value) == shape.num_kv_heads);
    CHECK(projectors.num_chains() == layers * 2 * (queries + shape.num_kv_heads));
    for (const MatrixXd& product : train::fold_chains(projectors))
      CHECK(product == MatrixXd::Identity(shape.head_dim, shape.head_dim));
    int index = 0;
    for (int layer = 0; layer < layers; ++layer) {
      for (const auto projection :
           {Projection::query, Projection::key, Projection::value, Projection::output}) {
        for (int head = 0; head < projectors.num_maps(projection); ++head, ++index) {
          CHECK(projectors.chain_index({layer, projection, head}) == index);
          const auto place = projectors.place_of(index);
          CHECK(place.layer == layer);
          CHECK(place.projection == projection);
          CHECK(place.head == head);
          const bool of_queries = projectors.num_maps(projection) == shape.num_qo_heads &&
                                  queries != shape.num_kv_heads;
          CHECK(projectors.kv_head(place) == (of_queries ? head / shape.group_size() : head));
        }
      }
    }
    train::check_projectors(projectors);
  }
}

TEST_CASE("shapes, options and factors that cannot be are refused with both values") {
  const auto of = [](const CacheShape& shape, int layers, auto&& change) {
    train::DlrpOptions options;
    options.hidden = 8;
    change(options);
    return train::identity_projectors(shape, layers, options);
  };
  const auto nothing = [](train::DlrpOptions&) {};
  const CacheShape shape{4, 2, 6};
  CHECK_THROWS_WITH_AS(of({5, 2, 6}, 1, nothing),
                       "num_qo_heads 5 is not a multiple of num_kv_heads 2", ShapeError);
  CHECK_THROWS_WITH_AS(of(shape, 0, nothing), "num_layers: 0, at least 1 needed", ShapeError);
  CHECK_THROWS_WITH_AS(of(shape, 1, [](auto& options) { options.num_factors = 0; }),
                       "num_factors: 0, at least 1 needed", ShapeError);
  CHECK_THROWS_WITH_AS(of(shape, 1, [](auto& options) { options.hidden = 5; }),
                       "hidden: 5, below head_dim 6: a chain could not start as the identity",
                       ShapeError);
  CHECK_THROWS_WITH_AS(of(shape, 1, [](auto& options) { options.alpha = -1.0; }),
                       "alpha: finite and at least 0, given -1", ValueError);
  CHECK_THROWS_WITH_AS(of(shape, 1, [](auto& options) { options.alpha = std::nan(""); }),
                       "alpha: finite and at least 0, given nan", ValueError);
  CHECK_THROWS_WITH_AS(of({4, 2, 5}, 1, nothing),
                       "head_dim: 5 has no pairs of channels, which maps before RoPE need",
                       ShapeError);
  auto projectors = of(shape, 2, nothing);
  CHECK_THROWS_WITH_AS(static_cast<void>(projectors.chain_index({2, Projection::key, 0})),
                       "layer: 2 of 2", ShapeError);
  CHECK_THROWS_WITH_AS(static_cast<void>(projectors.chain_index({0, Projection::key, 2})),
                       "head: key 2 of 2", ShapeError);
  CHECK_THROWS_WITH_AS(static_cast<void>(projectors.place_of(24)), "chain: 24 of 24", ShapeError);
  const auto refused = [&](auto&& change) {
    auto copy = projectors;
    change(copy);
    train::check_projectors(copy);
  };
  CHECK_THROWS_WITH_AS(refused([](auto& p) { p.ranks.pop_back(); }), "ranks: heads 4, given 3",
                       ShapeError);
  CHECK_THROWS_WITH_AS(refused([](auto& p) { p.ranks[1].qk = 7; }), "rank: r_qk 7, head_dim 6",
                       ShapeError);
  CHECK_THROWS_WITH_AS(refused([](auto& p) { p.ranks[1].vo = 0; }), "rank: r_vo 0, head_dim 6",
                       ShapeError);
  CHECK_THROWS_WITH_AS(refused([](auto& p) { p.ranks[1].qk = 5; }),
                       "rank: r_qk 5, even before RoPE", ShapeError);
  CHECK_THROWS_WITH_AS(refused([](auto& p) { p.ranks[1].qk = 4; }), "pairs: 3 given, r_qk 4 has 2",
                       ShapeError);
  CHECK_THROWS_WITH_AS(refused([](auto& p) { p.ranks[1].pairs[2] = 1; }),
                       "pairs: entry 2 is 1, ascending below 3 expected", ShapeError);
  CHECK_THROWS_WITH_AS(refused([](auto& p) { p.factors.pop_back(); }),
                       "factors: chains have 48, given 47", ShapeError);
  CHECK_THROWS_WITH_AS(refused([](auto& p) { p.factors[25] = MatrixXd::Ones(8, 5); }),
                       "factor 1 of layer 1, query 0: [8, 5], expected [8, 6]", ShapeError);
  CHECK_THROWS_WITH_AS(refused([](auto& p) { p.factors[22](0, 0) = std::nan(""); }),
                       "factor 0 of layer 0, output 3: its norm is nan, finite expected",
                       ValueError);
  projectors.options.geometry = DlrpGeometry::after_rope;
  CHECK_THROWS_WITH_AS(train::check_projectors(projectors),
                       "pairs: 3 given, maps after RoPE have 0", ShapeError);
}

}  // namespace deep_projectors_tests
