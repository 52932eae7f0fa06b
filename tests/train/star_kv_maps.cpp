// SPDX-License-Identifier: Apache-2.0
// Hard truncation of STAR-KV's factors, a cache's maps of them, and the absorbed output projection.
#include "lowrankkv/train/star_kv_maps.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "lowrankkv/basis/joint_values.hpp"
#include "lowrankkv/presets.hpp"
#include "support/matrices.hpp"
#include "support/rope.hpp"

namespace star_kv_maps_tests {

using namespace lowrankkv;
using Eigen::MatrixXd;
using Eigen::VectorXd;
using support::FloatRows;
using support::from_row_major;
using support::gaussian;
using support::Random;
using support::relative_distance;
using support::row_major;
using support::uniform;
using train::Decomposition;
using train::FactorisedWeight;
using train::StarKvFactors;
using train::StarKvProjection;

/// A projection with a threshold in each block that keeps some values, possibly none or all. Its
/// factors are as training leaves them (`moved`), or as the decomposition made them.
StarKvProjection some_projection(Random& random, int heads, int dim, int hidden,
                                 Decomposition decomposition, bool moved) {
  const FloatRows weight(gaussian(random, heads * dim, hidden));
  StarKvProjection projection = train::star_kv_projection(weight.view(), heads, decomposition);
  for (StarKvFactors& block : projection.blocks) {
    block.alpha = calibrate::threshold_for_rank(
        block.sigma, uniform(random, 0, static_cast<int>(block.sigma.size())));
    if (!moved) continue;
    block.left += 0.2 * gaussian(random, block.left.rows(), block.left.cols());
    block.right += 0.2 * gaussian(random, block.right.rows(), block.right.cols());
    block.sigma += 0.2 * gaussian(random, static_cast<int>(block.sigma.size()), 1);
  }
  return projection;
}

/// U diag(sigma 1{sigma >= alpha}) V^T of all blocks (eq. 1), as it stands.
MatrixXd hard_weight(const StarKvProjection& projection) {
  MatrixXd weight(projection.channels(), projection.hidden());
  Eigen::Index row = 0;
  for (const StarKvFactors& block : projection.blocks) {
    VectorXd sigma = block.sigma;
    for (double& value : sigma) {
      if (value < block.alpha) value = 0.0;
    }
    weight.middleRows(row, block.left.rows()) =
        block.left * sigma.asDiagonal() * block.right.transpose();
    row += block.left.rows();
  }
  return weight;
}

TEST_CASE("truncation keeps the terms above the threshold, as an orthonormal basis") {
  Random random(61);
  int none = 0, all = 0;
  for (int round = 0; round < 60; ++round) {
    const int heads = uniform(random, 1, 4), dim = uniform(random, 1, 7),
              hidden = uniform(random, 1, 30);
    const Decomposition decomposition =
        round % 2 == 0 ? Decomposition::head_wise : Decomposition::joint;
    const StarKvProjection projection =
        some_projection(random, heads, dim, hidden, decomposition, round % 3 != 0);
    const std::vector<FactorisedWeight> blocks = train::truncated(projection);
    REQUIRE(blocks.size() == projection.blocks.size());
    const MatrixXd expected = hard_weight(projection), found = train::truncated_weight(blocks);
    REQUIRE(found.rows() == heads * dim);
    REQUIRE(found.cols() == hidden);
    CHECK((found - expected).norm() <= 1e-12 * (1.0 + expected.norm()));
    int sum = 0;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const FactorisedWeight& block = blocks[i];
      const int rank = block.rank();
      CHECK(rank == projection.blocks[i].rank());
      CHECK(block.down.rows() == rank);
      CHECK((block.up.transpose() * block.up - MatrixXd::Identity(rank, rank)).norm() < 1e-12);
      for (int k = 1; k < rank; ++k)
        CHECK(block.down.row(k).norm() <= block.down.row(k - 1).norm() * (1.0 + 1e-12));
      // Rows of down are orthogonal: coefficients that are sorted by weight, each its own axis.
      const MatrixXd gram = block.down * block.down.transpose();
      CHECK((gram - MatrixXd(gram.diagonal().asDiagonal())).norm() <= 1e-11 * (1.0 + gram.norm()));
      none += rank == 0;
      all += rank == projection.blocks[i].sigma.size();
      sum += rank;
    }
    CHECK(sum == projection.rank());
  }
  CHECK(none > 0);
  CHECK(all > 0);
  // A decomposition that nothing moved is its own: the paper's U_r and (Sigma V)^T.
  const StarKvProjection still =
      some_projection(random, 1, 6, 9, Decomposition::joint, /*moved=*/false);
  StarKvFactors block = still.blocks[0];
  block.alpha = calibrate::threshold_for_rank(block.sigma, 4);
  const FactorisedWeight weight = train::truncated(block);
  for (int k = 0; k < 4; ++k) {
    CHECK(std::abs(weight.up.col(k).dot(block.left.col(k))) == doctest::Approx(1.0).epsilon(1e-12));
    CHECK(weight.down.row(k).norm() == doctest::Approx(block.sigma[k]).epsilon(1e-12));
  }
  block.alpha = std::nan("");
  CHECK_THROWS_AS(train::truncated(block), ValueError);
  block = still.blocks[0];
  block.sigma *= 1e200;
  block.right *= 1e200;
  CHECK_THROWS_AS(train::truncated(block), ValueError);  // the product overflows
  block = still.blocks[0];
  block.sigma.conservativeResize(3);
  CHECK_THROWS_WITH_AS(train::truncated(block),
                       "STAR-KV: left has 6 columns, sigma 3 values, right 6 columns", ShapeError);
}

TEST_CASE("keys and values through a cache's maps are those of the truncated weights") {
  Random random(62);
  for (int round = 0; round < 60; ++round) {
    const int heads = uniform(random, 1, 4), dim = uniform(random, 1, 9),
              hidden = uniform(random, 1, 30), n = 11, width = heads * dim;
    const CacheShape shape{2 * heads, heads, dim};
    const bool joint = round % 2 == 0, biased = round % 4 < 2;
    const StarKvProjection keys = some_projection(random, heads, dim, hidden,
                                                  Decomposition::head_wise, round % 3 != 0),
                           values = some_projection(
                               random, heads, dim, hidden,
                               joint ? Decomposition::joint : Decomposition::head_wise, true);
    const std::vector<FactorisedWeight> key_blocks = train::truncated(keys),
                                        value_blocks = train::truncated(values);
    std::vector<float> key_bias, value_bias;
    if (biased) {
      key_bias = row_major(gaussian(random, 1, width));
      value_bias = row_major(gaussian(random, 1, width));
    }
    const LayerBasis basis =
        train::star_kv_basis(key_blocks, value_blocks, shape, key_bias, value_bias);
    if (joint)
      validate(JointValues{.keys = {.centred = biased}}, basis, shape);
    else
      validate(PerHead{.centred = biased}, basis, shape);

    const MatrixXd input = gaussian(random, n, hidden);
    const auto rows_of = [&](const StarKvProjection& projection, const std::vector<float>& bias) {
      MatrixXd rows = input * hard_weight(projection).transpose();
      if (!bias.empty()) rows.rowwise() += from_row_major(bias, 1, width).row(0);
      return rows;
    };
    const MatrixXd k = rows_of(keys, key_bias), v = rows_of(values, value_bias);
    MatrixXd latent;  // of joint values: the heads' parts add up
    for (int head = 0; head < heads; ++head) {
      const HeadBasis& maps = basis.heads[static_cast<std::size_t>(head)];
      const FactorisedWeight& block = key_blocks[static_cast<std::size_t>(head)];
      CHECK(maps.key_rank == std::max(1, block.rank()));
      const auto mean_of = [dim](const std::vector<float>& mean) {
        return mean.empty() ? MatrixXd::Zero(1, dim) : from_row_major(mean, 1, dim);
      };
      const MatrixXd down = from_row_major(maps.key_down, dim, maps.key_rank),
                     mean = mean_of(maps.key_mean);
      const MatrixXd coefficients = (k.middleCols(head * dim, dim).rowwise() - mean.row(0)) * down;
      const MatrixXd decoded = (coefficients * down.transpose()).rowwise() + mean.row(0);
      CHECK((decoded - k.middleCols(head * dim, dim)).norm() <= 1e-6 * (1.0 + k.norm()));
      // The cache's coefficients are what an engine computes with the factorised weight.
      if (block.rank() > 0)
        CHECK((coefficients - input * block.down.transpose()).norm() <= 1e-6 * (1.0 + k.norm()));
      const MatrixXd part =
          (v.middleCols(head * dim, dim).rowwise() - mean_of(maps.value_mean).row(0)) *
          from_row_major(maps.value_down, dim, maps.value_rank);
      if (joint && head > 0)
        latent += part;
      else
        latent = part;
      if (joint && head < heads - 1) continue;
      const FactorisedWeight& own = value_blocks[joint ? 0 : static_cast<std::size_t>(head)];
      CHECK(maps.value_rank == std::max(1, own.rank()));
      if (own.rank() > 0)
        CHECK((latent - input * own.down.transpose()).norm() <= 1e-6 * (1.0 + v.norm()));
      for (int reader = joint ? 0 : head; reader <= head; ++reader) {
        const HeadBasis& read = basis.heads[static_cast<std::size_t>(reader)];
        const MatrixXd value =
            (latent * from_row_major(read.value_down, dim, read.value_rank).transpose()).rowwise() +
            mean_of(read.value_mean).row(0);
        CHECK((value - v.middleCols(reader * dim, dim)).norm() <= 1e-6 * (1.0 + v.norm()));
      }
    }
  }
}

TEST_CASE("a cache of pre-RoPE keys and joint values attends as the truncated model does") {
  Random random(63);
  const int heads = 2, group = 3, dim = 12, hidden = 40, n = 70;
  const CacheShape shape{heads * group, heads, dim};
  StarKvProjection keys =
                       some_projection(random, heads, dim, hidden, Decomposition::head_wise, true),
                   values = some_projection(random, heads, dim, hidden, Decomposition::joint, true);
  keys.blocks[0].sigma.setConstant(0.25);
  keys.blocks[0].alpha = 0.5;  // no value reaches it
  std::sort(values.blocks[0].sigma.begin(), values.blocks[0].sigma.end(), std::greater<>());
  values.blocks[0].alpha = calibrate::threshold_for_rank(values.blocks[0].sigma, 15);
  const auto key_blocks = train::truncated(keys), value_blocks = train::truncated(values);
  CHECK(key_blocks[0].rank() == 0);
  CHECK(value_blocks[0].rank() == 15);
  const std::vector<float> key_bias = row_major(gaussian(random, 1, heads * dim)),
                           value_bias = row_major(gaussian(random, 1, heads * dim));

  const MatrixXd input = gaussian(random, n, hidden) / std::sqrt(hidden);
  const auto rows = [&](const std::vector<FactorisedWeight>& blocks,
                        const std::vector<float>& bias) {
    MatrixXd all = input * train::truncated_weight(blocks).transpose();
    all.rowwise() += from_row_major(bias, 1, heads * dim).row(0);
    return FloatRows(all);
  };
  const FloatRows k = rows(key_blocks, key_bias), v = rows(value_blocks, value_bias),
                  q(gaussian(random, n, shape.num_qo_heads * dim));

  CacheConfig config;
  config.shape = shape;
  config.full_type = DType::f32;
  config.epoch_type = DType::f32;
  config.max_tokens = 100;
  config.rope = support::pre_rope();
  const std::vector<float> rotated_k = support::rotate_rows(k.values, heads, dim, config.rope),
                           rotated_q =
                               support::rotate_rows(q.values, shape.num_qo_heads, dim, config.rope);
  const MatrixXd full_k = from_row_major(rotated_k, n, heads * dim),
                 full_q = from_row_major(rotated_q, n, shape.num_qo_heads * dim);
  using Cache = CompressedKVCache<Cpu, JointValues, Static, CompressAll, NoQuantizer>;
  Cache::PolicySet policies;
  policies.basis.keys.centred = true;
  policies.quantizer.type = DType::f32;
  Cache cache(config, train::star_kv_basis(key_blocks, value_blocks, shape, key_bias, value_bias),
              policies);
  cache.create(0);
  const KeyView key(k.values.data(), n, heads, dim);
  const ValueView value(v.values.data(), n, heads, dim);
  cache.ingest(0, key.tokens(0, n - 1), value.tokens(0, n - 1));
  cache.append(0, key.tokens(n - 1, 1), value.tokens(n - 1, 1));
  std::vector<float> out(static_cast<std::size_t>(shape.num_qo_heads * dim));
  cache.attend(0, QueryView(rotated_q.data(), n, shape.num_qo_heads, dim).tokens(n - 1, 1),
               {out.data(), 1, shape.num_qo_heads, dim});
  CHECK(cache.memory(0).total() < static_cast<std::size_t>(n * heads * dim * 2 * 4));

  // The output of the layer, with values up-projected and with the absorbed projection.
  const FloatRows projection(gaussian(random, 31, shape.num_qo_heads * dim));
  const train::AbsorbedOutput absorbed =
      train::absorbed_output(value_blocks, projection.view(), shape, value_bias);
  const MatrixXd latent = input * value_blocks[0].down.transpose();
  VectorXd expected = VectorXd::Zero(31), from_latent = absorbed.bias, from_cache = expected;
  for (int query = 0; query < shape.num_qo_heads; ++query) {
    const int head = query / group;
    VectorXd weights = full_k.middleCols(head * dim, dim) *
                       full_q.row(n - 1).segment(query * dim, dim).transpose() / std::sqrt(dim);
    weights = (weights.array() - weights.maxCoeff()).exp();
    weights /= weights.sum();
    const VectorXd output = v.matrix.middleCols(head * dim, dim).transpose() * weights;
    const VectorXd found =
        from_row_major(out, shape.num_qo_heads * dim, 1).col(0).segment(query * dim, dim);
    CHECK((found - output).norm() < 1e-5 * (1.0 + output.norm()));
    const MatrixXd own = projection.matrix.middleCols(query * dim, dim);
    expected += own * output;
    from_cache += own * found;
    from_latent += absorbed.heads[static_cast<std::size_t>(query)] * (latent.transpose() * weights);
  }
  CHECK(relative_distance(from_cache, expected) < 1e-5);
  CHECK(relative_distance(from_latent, expected) < 1e-6);
}

TEST_CASE("an absorbed output projection reads the latent as the engine reads values") {
  Random random(64);
  for (int round = 0; round < 40; ++round) {
    const int heads = uniform(random, 1, 4), group = uniform(random, 1, 3),
              dim = uniform(random, 1, 7), hidden = uniform(random, 1, 20),
              n = uniform(random, 1, 9);
    const CacheShape shape{heads * group, heads, dim};
    const bool joint = round % 2 == 0;
    const StarKvProjection values = some_projection(
        random, heads, dim, hidden, joint ? Decomposition::joint : Decomposition::head_wise, true);
    const std::vector<FactorisedWeight> blocks = train::truncated(values);
    std::vector<float> bias;
    if (round % 3 == 0) bias = row_major(gaussian(random, 1, heads * dim));
    const FloatRows projection(gaussian(random, 13, shape.num_qo_heads * dim));
    const train::AbsorbedOutput absorbed =
        train::absorbed_output(blocks, projection.view(), shape, bias);
    REQUIRE(absorbed.heads.size() == static_cast<std::size_t>(shape.num_qo_heads));
    const MatrixXd input = gaussian(random, n, hidden);
    MatrixXd v = input * hard_weight(values).transpose();
    if (!bias.empty()) v.rowwise() += from_row_major(bias, 1, heads * dim).row(0);
    VectorXd expected = VectorXd::Zero(13), found = absorbed.bias;
    for (int query = 0; query < shape.num_qo_heads; ++query) {
      const int head = query / group;
      VectorXd weights = gaussian(random, n, 1).cwiseAbs();
      weights /= weights.sum();
      expected += projection.matrix.middleCols(query * dim, dim) *
                  (v.middleCols(head * dim, dim).transpose() * weights);
      const FactorisedWeight& block = blocks[joint ? 0 : static_cast<std::size_t>(head)];
      const MatrixXd& own = absorbed.heads[static_cast<std::size_t>(query)];
      if (block.rank() > 0)
        found += own * (block.down * (input.transpose() * weights));
      else
        CHECK(own.cols() == 1);  // of a coefficient that is 0
    }
    CHECK((found - expected).norm() < 1e-11 * (1.0 + expected.norm()));
    if (bias.empty()) CHECK(absorbed.bias.isZero(0.0));
  }
}

TEST_CASE("blocks and biases that do not fit a shape are refused with both values") {
  Random random(65);
  const CacheShape shape{6, 3, 4};
  const auto blocks = [&](Decomposition decomposition) {
    return train::truncated(some_projection(random, 3, 4, 9, decomposition, true));
  };
  const auto apart = blocks(Decomposition::head_wise), joint = blocks(Decomposition::joint);
  CHECK_THROWS_WITH_AS(train::star_kv_basis(joint, joint, shape),
                       "keys: blocks 1, num_kv_heads 3; joint keys have no maps a head",
                       ShapeError);
  auto few = apart;
  few.pop_back();
  CHECK_THROWS_WITH_AS(train::star_kv_basis(apart, few, shape), "values: blocks 2, num_kv_heads 3",
                       ShapeError);
  CHECK_THROWS_WITH_AS(train::star_kv_basis(apart, joint, {6, 3, 5}), "channels: keys 4, shape 5",
                       ShapeError);
  const std::vector<float> bias(11);
  CHECK_THROWS_WITH_AS(train::star_kv_basis(apart, joint, shape, bias),
                       "channels: keys 12, bias 11", ShapeError);
  CHECK_THROWS_WITH_AS(train::star_kv_basis(apart, joint, shape, {}, bias),
                       "channels: values 12, bias 11", ShapeError);
  const FloatRows output(gaussian(random, 5, 23));
  CHECK_THROWS_WITH_AS(train::absorbed_output(joint, output.view(), shape),
                       "columns: output_weight 23, num_qo_heads * head_dim 24", ShapeError);
  CHECK_THROWS_WITH_AS(train::absorbed_output(joint, output.view(), {7, 3, 4}),
                       "num_qo_heads: 7, num_kv_heads 3", ShapeError);
}

}  // namespace star_kv_maps_tests
