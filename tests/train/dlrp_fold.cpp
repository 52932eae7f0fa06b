// SPDX-License-Identifier: Apache-2.0
// Algorithm 3: folded maps and folded weights are the chains, in either geometry. Bounds are those
// of rounding: a product of matrices is off by at most the sum of its inner extents times 2^-53
// times the product of the factors' Frobenius norms.
#include "lowrankkv/train/dlrp_fold.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "lowrankkv/presets.hpp"
#include "support/random_projectors.hpp"

namespace dlrp_fold_tests {

using namespace lowrankkv;
using Eigen::MatrixXd;
using Eigen::RowVectorXd;
using Eigen::VectorXd;
using support::Random;
using support::uniform;
using train::DlrpGeometry;
using train::FoldedWidth;
using train::Projection;

std::span<const MatrixXd> chain_of(const train::DeepProjectors& projectors, int layer,
                                   Projection projection, int head) {
  return projectors.chain(projectors.chain_index({layer, projection, head}));
}

/// Rows times a chain, factor by factor.
MatrixXd through(MatrixXd rows, std::span<const MatrixXd> chain) {
  for (const MatrixXd& factor : chain) rows = (rows * factor).eval();
  return rows;
}

/// Twice the largest rounding of left chain right, whichever way it is multiplied.
double rounding(double left, std::span<const MatrixXd> chain, double right, Eigen::Index others) {
  double norms = left * right;
  Eigen::Index inner = others;
  for (const MatrixXd& factor : chain) {
    norms *= factor.norm();
    inner += factor.rows() + factor.cols();
  }
  return static_cast<double>(inner) * std::numeric_limits<double>::epsilon() * norms;
}

TEST_CASE("after RoPE a folded projector is the chain, up to the rounding of its maps to f32") {
  Random random(480);
  for (int round = 0; round < 40; ++round) {
    auto projectors = support::random_projectors(random, DlrpGeometry::after_rope);
    if (round % 4 != 0)
      projectors =
          train::low_rank_projectors(projectors, support::random_ranks(random, projectors));
    const int dim = projectors.shape.head_dim;
    const int layer = uniform(random, 0, projectors.num_layers - 1);
    const LayerBasis basis = train::projector_basis(projectors, layer);
    validate(Projector{}, basis, projectors.shape);
    for (int head = 0; head < projectors.shape.num_kv_heads; ++head) {
      const HeadBasis& maps = basis.heads[static_cast<std::size_t>(head)];
      const auto& own = projectors.head_ranks(layer, head);
      REQUIRE(maps.key_rank == own.qk);
      REQUIRE(maps.value_rank == own.vo);
      const auto is_chain = [&](const std::vector<float>& map, Projection projection, int rows,
                                int cols) {
        const auto chain = chain_of(projectors, layer, projection, head);
        const MatrixXd folded = calibrate::fold(chain);
        const MatrixXd x = support::gaussian(random, 5, rows);
        CHECK((x * folded - through(x, chain)).norm() <= rounding(x.norm(), chain, 1.0, rows));
        CHECK(support::from_row_major(map, rows, cols) == folded.cast<float>().cast<double>());
      };
      is_chain(maps.query_down, Projection::query, dim, own.qk);
      is_chain(maps.key_down, Projection::key, dim, own.qk);
      is_chain(maps.value_down, Projection::value, dim, own.vo);
      is_chain(maps.output_up, Projection::output, own.vo, dim);
    }
  }
}

/// A layer's weights, with biases now and then.
train::AttentionWeights random_weights(Random& random, const CacheShape& shape, int hidden,
                                       bool biases) {
  const int queries = shape.num_qo_heads * shape.head_dim;
  const int keys = shape.num_kv_heads * shape.head_dim;
  train::AttentionWeights weights;
  weights.query = support::gaussian(random, queries, hidden);
  weights.key = support::gaussian(random, keys, hidden);
  weights.value = support::gaussian(random, keys, hidden);
  weights.output = support::gaussian(random, hidden, queries);
  if (biases) {
    weights.query_bias = support::gaussian(random, queries, 1);
    weights.key_bias = support::gaussian(random, keys, 1);
    weights.value_bias = support::gaussian(random, keys, 1);
  }
  return weights;
}

MatrixXd project(const MatrixXd& x, const MatrixXd& weight, const VectorXd& bias) {
  MatrixXd y = x * weight.transpose();
  if (bias.size() != 0) y.rowwise() += bias.transpose();
  return y;
}

TEST_CASE("before RoPE folded weights are the chains, a query head each, at either width") {
  Random random(481);
  for (int round = 0; round < 40; ++round) {
    auto projectors = support::random_projectors(random, DlrpGeometry::before_rope);
    if (round % 4 != 0)
      projectors =
          train::low_rank_projectors(projectors, support::random_ranks(random, projectors));
    const CacheShape& shape = projectors.shape;
    const int dim = shape.head_dim, hidden = uniform(random, 1, 12);
    const int layer = uniform(random, 0, projectors.num_layers - 1);
    const auto weights = random_weights(random, shape, hidden, round % 2 == 0);
    const MatrixXd x = support::gaussian(random, 6, hidden);
    const auto narrow = train::folded_weights(projectors, layer, weights, FoldedWidth::rank);
    const auto wide = train::folded_weights(projectors, layer, weights, FoldedWidth::head_dim);
    CHECK(wide.query.rows() == shape.num_qo_heads * dim);
    CHECK(wide.output.cols() == shape.num_qo_heads * dim);
    const auto is_chain = [&](Projection projection, const MatrixXd& plain, const MatrixXd& rows,
                              const MatrixXd& padded_rows, double size) {
      Eigen::Index at = 0;
      for (int head = 0; head < projectors.num_maps(projection); ++head) {
        const auto chain = chain_of(projectors, layer, projection, head);
        const MatrixXd expected = through(plain.middleCols(head * dim, dim), chain);
        const double most = rounding(size, chain, 1.0, hidden + dim + 2);
        CHECK((rows.middleCols(at, expected.cols()) - expected).norm() <= most);
        at += expected.cols();
        // At head_dim channels: the same in their places, zeros elsewhere.
        std::vector<int> channels;
        const int kv_head = projectors.kv_head({layer, projection, head});
        if (projection == Projection::value) {
          for (int i = 0; i < expected.cols(); ++i) channels.push_back(i);
        } else {
          channels = train::padded_channels(projectors, layer, kv_head);
        }
        MatrixXd padded = MatrixXd::Zero(expected.rows(), dim);
        for (std::size_t i = 0; i < channels.size(); ++i)
          padded.col(channels[i]) = expected.col(static_cast<Eigen::Index>(i));
        const MatrixXd own = padded_rows.middleCols(head * dim, dim);
        CHECK((own - padded).norm() <= most);
        CHECK((own.array() != 0.0).cast<int>().sum() <= (padded.array() != 0.0).cast<int>().sum());
      }
      CHECK(at == rows.cols());
    };
    const auto check = [&](Projection projection, MatrixXd train::AttentionWeights::*weight,
                           VectorXd train::AttentionWeights::*bias) {
      is_chain(projection, project(x, weights.*weight, weights.*bias),
               project(x, narrow.*weight, narrow.*bias), project(x, wide.*weight, wide.*bias),
               x.norm() * (weights.*weight).norm() + std::sqrt(6.0) * (weights.*bias).norm());
    };
    check(Projection::query, &train::AttentionWeights::query, &train::AttentionWeights::query_bias);
    check(Projection::key, &train::AttentionWeights::key, &train::AttentionWeights::key_bias);
    check(Projection::value, &train::AttentionWeights::value, &train::AttentionWeights::value_bias);
    // Outputs: a latent z of r_vo channels goes through D_O, then through W_O.
    Eigen::Index at = 0;
    for (int head = 0; head < shape.num_qo_heads; ++head) {
      const auto chain = chain_of(projectors, layer, Projection::output, head);
      const Eigen::Index rank = chain.front().rows();
      const MatrixXd z = support::gaussian(random, 6, rank);
      const MatrixXd w = weights.output.middleCols(head * dim, dim).transpose();
      const MatrixXd expected = through(z, chain) * w;
      const double most = rounding(z.norm(), chain, w.norm(), dim);
      CHECK((z * narrow.output.middleCols(at, rank).transpose() - expected).norm() <= most);
      CHECK((z * wide.output.middleCols(head * dim, rank).transpose() - expected).norm() <= most);
      CHECK(wide.output.middleCols(head * dim + rank, dim - rank).isZero(0.0));
      at += rank;
    }
    CHECK(at == narrow.output.cols());
  }
}

/// A row rotated to `position`, pair p at frequencies[p].
RowVectorXd rotated(RowVectorXd row, const std::vector<double>& frequencies, double position,
                    RopePairing pairing) {
  const auto half = static_cast<Eigen::Index>(frequencies.size());
  for (Eigen::Index p = 0; p < half; ++p) {
    const double angle = position * frequencies[static_cast<std::size_t>(p)];
    const auto first = pairing == RopePairing::half_split ? p : 2 * p;
    const auto second = pairing == RopePairing::half_split ? p + half : 2 * p + 1;
    const double a = row[first], b = row[second];
    row[first] = a * std::cos(angle) - b * std::sin(angle);
    row[second] = b * std::cos(angle) + a * std::sin(angle);
  }
  return row;
}

/// Causal attention of one head, rows at positions 0, 1, ...
MatrixXd attention(const MatrixXd& q, const MatrixXd& k, const MatrixXd& v, double scale) {
  MatrixXd out(q.rows(), v.cols());
  for (Eigen::Index i = 0; i < q.rows(); ++i) {
    VectorXd weights = scale * (k.topRows(i + 1) * q.row(i).transpose());
    weights = (weights.array() - weights.maxCoeff()).exp();
    out.row(i) = (weights / weights.sum()).transpose() * v.topRows(i + 1);
  }
  return out;
}

MatrixXd rotated_rows(const MatrixXd& rows, const std::vector<double>& frequencies,
                      RopePairing pairing) {
  MatrixXd result(rows.rows(), rows.cols());
  for (Eigen::Index i = 0; i < rows.rows(); ++i)
    result.row(i) = rotated(rows.row(i), frequencies, static_cast<double>(i), pairing);
  return result;
}

/// The layer as train/deep_projectors.hpp has it, chains factor by factor.
MatrixXd layer_of_chains(const train::DeepProjectors& projectors, int layer,
                         const train::AttentionWeights& weights, const MatrixXd& x,
                         const std::vector<double>& frequencies) {
  const int dim = projectors.shape.head_dim;
  MatrixXd out = MatrixXd::Zero(x.rows(), weights.output.rows());
  for (int h = 0; h < projectors.shape.num_qo_heads; ++h) {
    const int g = h / projectors.shape.group_size();
    std::vector<double> kept;
    for (const int pair : projectors.head_ranks(layer, g).pairs)
      kept.push_back(frequencies[static_cast<std::size_t>(pair)]);
    const auto rows = [&](Projection projection, const MatrixXd& weight, int head) {
      return through(x * weight.middleRows(head * dim, dim).transpose(),
                     chain_of(projectors, layer, projection, head));
    };
    const MatrixXd q =
        rotated_rows(rows(Projection::query, weights.query, h), kept, projectors.options.pairing);
    const MatrixXd k =
        rotated_rows(rows(Projection::key, weights.key, g), kept, projectors.options.pairing);
    const MatrixXd z =
        attention(q, k, rows(Projection::value, weights.value, g), 1.0 / std::sqrt(dim));
    out += through(z, chain_of(projectors, layer, Projection::output, h)) *
           weights.output.middleCols(h * dim, dim).transpose();
  }
  return out;
}

/// The rows [n, heads, head_dim] that an engine with folded weights gives its cache, in f32.
std::vector<float> padded_rows(const train::DeepProjectors& projectors, const MatrixXd& projected,
                               const std::vector<double>& frequencies) {
  const int dim = projectors.shape.head_dim;
  MatrixXd rows = projected;
  for (Eigen::Index at = 0; !frequencies.empty() && at < rows.cols(); at += dim)
    rows.middleCols(at, dim) =
        rotated_rows(rows.middleCols(at, dim), frequencies, projectors.options.pairing);
  return support::row_major(rows);
}

TEST_CASE("before RoPE a cache of padded rows is the chains' layer, prompt and decoded token") {
  Random random(482);
  for (int round = 0; round < 8; ++round) {
    auto projectors = support::random_projectors(random, DlrpGeometry::before_rope, 0.15);
    projectors = train::low_rank_projectors(projectors, support::random_ranks(random, projectors));
    const CacheShape& shape = projectors.shape;
    const int dim = shape.head_dim, hidden = uniform(random, 4, 12), n = uniform(random, 3, 70);
    std::vector<double> frequencies = rope_frequencies(dim, 100.0);
    auto weights = random_weights(random, shape, hidden, false);
    for (MatrixXd* weight : {&weights.query, &weights.key, &weights.value, &weights.output})
      *weight *= 0.3;
    const MatrixXd x = support::gaussian(random, n + 1, hidden);
    const MatrixXd expected = layer_of_chains(projectors, 0, weights, x, frequencies);
    const auto folded = train::folded_weights(projectors, 0, weights, FoldedWidth::head_dim);
    const auto q = padded_rows(projectors, x * folded.query.transpose(), frequencies);
    const auto k = padded_rows(projectors, x * folded.key.transpose(), frequencies);
    const auto v = padded_rows(projectors, x * folded.value.transpose(), {});
    CacheConfig config;
    config.shape = shape;
    config.full_type = config.epoch_type = DType::f32;
    Dlrp<>::PolicySet policies;
    policies.quantizer.type = DType::f32;
    Dlrp<> cache(config, train::padded_basis(projectors, 0), policies);
    cache.create(0);
    std::vector<float> out(q.size());
    const auto queries = static_cast<std::size_t>(shape.num_qo_heads * dim);
    const auto keys = static_cast<std::size_t>(shape.num_kv_heads * dim);
    cache.prefill(0, {q.data(), n, shape.num_qo_heads, dim}, {k.data(), n, shape.num_kv_heads, dim},
                  {v.data(), n, shape.num_kv_heads, dim}, {out.data(), n, shape.num_qo_heads, dim});
    const auto last = static_cast<std::size_t>(n);
    cache.append(0, {k.data() + last * keys, 1, shape.num_kv_heads, dim},
                 {v.data() + last * keys, 1, shape.num_kv_heads, dim});
    cache.attend(0, {q.data() + last * queries, 1, shape.num_qo_heads, dim},
                 {out.data() + last * queries, 1, shape.num_qo_heads, dim});
    const MatrixXd got =
        support::from_row_major(out, n + 1, static_cast<int>(queries)) * folded.output.transpose();
    CHECK((got - expected).rowwise().norm().maxCoeff() <=
          1e-5 * expected.rowwise().norm().maxCoeff());
  }
}

TEST_CASE("after RoPE a cache of folded maps has the chains' logits and outputs") {
  Random random(483);
  for (int round = 0; round < 8; ++round) {
    auto projectors = support::random_projectors(random, DlrpGeometry::after_rope, 0.15);
    projectors = train::low_rank_projectors(projectors, support::random_ranks(random, projectors));
    const CacheShape& shape = projectors.shape;
    const int dim = shape.head_dim, n = uniform(random, 3, 70);
    const MatrixXd q = support::gaussian(random, 1, shape.num_qo_heads * dim),
                   k = support::gaussian(random, n + 1, shape.num_kv_heads * dim),
                   v = support::gaussian(random, n + 1, shape.num_kv_heads * dim);
    CacheConfig config;
    config.shape = shape;
    config.full_type = config.epoch_type = DType::f32;
    Dlrp<>::PolicySet policies;
    policies.quantizer.type = DType::f32;
    Dlrp<> cache(config, train::projector_basis(projectors, 0), policies);
    cache.create(0);
    const auto keys = support::row_major(k), values = support::row_major(v),
               queries = support::row_major(q);
    const auto at = static_cast<std::size_t>(n * shape.num_kv_heads * dim);
    const std::vector<float> prompt(static_cast<std::size_t>(n * shape.num_qo_heads * dim));
    std::vector<float> unused(prompt.size()), out(queries.size());
    cache.prefill(
        0, {prompt.data(), n, shape.num_qo_heads, dim}, {keys.data(), n, shape.num_kv_heads, dim},
        {values.data(), n, shape.num_kv_heads, dim}, {unused.data(), n, shape.num_qo_heads, dim});
    cache.append(0, {keys.data() + at, 1, shape.num_kv_heads, dim},
                 {values.data() + at, 1, shape.num_kv_heads, dim});
    cache.attend(0, {queries.data(), 1, shape.num_qo_heads, dim},
                 {out.data(), 1, shape.num_qo_heads, dim});
    for (int h = 0; h < shape.num_qo_heads; ++h) {
      const int g = h / shape.group_size();
      const MatrixXd own_q = q.middleCols(h * dim, dim), own_k = k.middleCols(g * dim, dim),
                     own_v = v.middleCols(g * dim, dim);
      // The prompt is compressed; the last row waits for its flush, at full rank.
      VectorXd logits(n + 1);
      logits.head(n) = through(own_k.topRows(n), chain_of(projectors, 0, Projection::key, g)) *
                       through(own_q, chain_of(projectors, 0, Projection::query, g)).transpose();
      logits[n] = own_k.row(n).dot(own_q.row(0));
      logits /= std::sqrt(dim);
      const VectorXd weights = (logits.array() - logits.maxCoeff()).exp();
      const RowVectorXd latent =
          weights.head(n).transpose() *
          through(own_v.topRows(n), chain_of(projectors, 0, Projection::value, g));
      const RowVectorXd expected =
          (through(latent, chain_of(projectors, 0, Projection::output, g)) +
           weights[n] * own_v.row(n)) /
          weights.sum();
      const MatrixXd got =
          support::from_row_major(out, 1, shape.num_qo_heads * dim).middleCols(h * dim, dim);
      CHECK((got - expected).norm() <= 1e-5 * own_v.rowwise().norm().maxCoeff());
    }
  }
}

TEST_CASE("maps of one geometry do not pass for the other's, and weights must be the layer's") {
  train::DlrpOptions options;
  options.hidden = 4;
  const CacheShape shape{4, 2, 4};
  const auto before = train::identity_projectors(shape, 1, options);
  options.geometry = DlrpGeometry::after_rope;
  const auto after = train::identity_projectors(shape, 1, options);
  Random random(484);
  const auto weights = random_weights(random, shape, 3, true);
  CHECK_THROWS_WITH_AS(train::projector_basis(before, 0),
                       "projector_basis: maps are before RoPE, with 4 query maps for 2 KV heads; "
                       "maps after RoPE, one a KV head, are needed",
                       StateError);
  CHECK_THROWS_WITH_AS(
      train::folded_weights(after, 0, weights, FoldedWidth::rank),
      "folded_weights: maps are after RoPE, with 2 query maps for 2 KV heads; maps "
      "before RoPE are needed",
      StateError);
  CHECK_THROWS_AS(train::padded_basis(after, 0), StateError);
  CHECK_THROWS_WITH_AS(train::padded_basis(before, 1), "layer: 1 of 1", ShapeError);
  CHECK_THROWS_WITH_AS(train::projector_basis(after, -1), "layer: -1 of 1", ShapeError);
  CHECK_THROWS_WITH_AS(train::folded_weights(before, 1, weights, FoldedWidth::rank),
                       "layer: 1 of 1", ShapeError);
  const auto refused = [&](auto&& change) {
    auto other = weights;
    change(other);
    train::folded_weights(before, 0, other, FoldedWidth::rank);
  };
  CHECK_THROWS_WITH_AS(refused([](auto& w) { w.query = MatrixXd::Ones(15, 3); }),
                       "query weight: rows 15, heads have 16", ShapeError);
  CHECK_THROWS_WITH_AS(refused([](auto& w) { w.key = MatrixXd::Ones(16, 3); }),
                       "key weight: rows 16, heads have 8", ShapeError);
  CHECK_THROWS_WITH_AS(refused([](auto& w) { w.value = MatrixXd::Ones(8, 4); }),
                       "hidden_size: query 3, value 4", ShapeError);
  CHECK_THROWS_WITH_AS(refused([](auto& w) { w.output = MatrixXd::Ones(3, 8); }),
                       "output weight: columns 8, heads have 16", ShapeError);
  CHECK_THROWS_WITH_AS(refused([](auto& w) { w.key_bias = VectorXd::Ones(3); }),
                       "key bias: numbers 3, rows 8", ShapeError);
  // Untrained chains change nothing.
  const auto same = train::folded_weights(before, 0, weights, FoldedWidth::rank);
  CHECK(same.query == weights.query);
  CHECK(same.output == weights.output);
  CHECK(same.value_bias == weights.value_bias);
}

}  // namespace dlrp_fold_tests
