// SPDX-License-Identifier: Apache-2.0
/// @file train/star_kv_maps.hpp  From trained thresholds to what inference uses: hard truncation,
/// factorised weights, a cache's maps, the absorbed output projection (STAR-KV sections 3.2, 3.3
/// and 4.1.2).
///
///     W^ = U_r diag(sigma_r) V_r^T, the r terms with sigma_i >= alpha      eq. 1
///        = up down        up [channels, r] with orthonormal columns, down [r, hidden]: section 3.2
///
/// The kept sigma are those of training, not Th_s(sigma): as the paper has it, a value close to its
/// threshold grows when the soft threshold becomes a hard one. Training may have left U_r and V_r
/// without orthonormal columns. So up and down are of the singular value decomposition of the
/// product W^, which is the same matrix; then the coefficients down x are sorted by their weight,
/// as quantizers with two scales expect (section 4.4), and up is an orthonormal basis.
///
/// Two ways to use it, with the same keys and values:
///
///     an engine's own cache   the coefficients c = down x, keys and values are up c
///     a cache of this library its rows are k = W^ x and v = W^ x; star_kv_basis() has its maps
#pragma once

#include <Eigen/Core>
#include <Eigen/QR>
#include <Eigen/SVD>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/calibrate/joint_values.hpp"
#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"
#include "lowrankkv/train/star_kv_factors.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace train {

/// @brief A truncated block of a projection: W^ = up down.
struct FactorisedWeight {
  Eigen::MatrixXd up;    ///< [channels, rank], orthonormal columns: the paper's U_K, U_V
  Eigen::MatrixXd down;  ///< [rank, hidden], rows of falling norm: the paper's (Sigma V)^T

  /// @brief Coefficients of a token; 0 if no singular value reached its threshold.
  int rank() const { return static_cast<int>(up.cols()); }
};

/// @brief Hard truncation of a block (file comment). @throws ShapeError unless the factors fit each
/// other, ValueError unless they and their product are finite
///
/// Cost: O((channels + hidden) r^2).
template <class Real = double>
FactorisedWeight truncated(const StarKvFactors& factors) {
  ::lowrankkv::detail::check_star_kv_factors("STAR-KV", factors);
  const Eigen::Index rank = factors.rank();
  FactorisedWeight weight{Eigen::MatrixX<Real>(factors.left.rows(), rank),
                          Eigen::MatrixX<Real>(rank, factors.right.rows())};
  if (rank == 0) return weight;
  Eigen::MatrixX<Real> left(factors.left.rows(), rank), right(factors.right.rows(), rank);
  Eigen::Index kept = 0;
  for (Eigen::Index i = 0; i < factors.sigma.size(); ++i) {
    if (!(factors.sigma[i] >= factors.alpha)) continue;
    left.col(kept) = factors.left.col(i) * factors.sigma[i];
    right.col(kept++) = factors.right.col(i);
  }
  // left right^T = Q_l (R_l R_r^T) Q_r^T: only an r x r matrix is decomposed.
  const auto triangle = [rank](const Eigen::HouseholderQR<Eigen::MatrixX<Real>>& qr) {
    return Eigen::MatrixX<Real>(
        qr.matrixQR().topRows(rank).template triangularView<Eigen::Upper>());
  };
  const Eigen::HouseholderQR<Eigen::MatrixX<Real>> left_qr(left), right_qr(right);
  const Eigen::MatrixX<Real> core = triangle(left_qr) * triangle(right_qr).transpose();
  if (!core.allFinite())
    ::lowrankkv::detail::fail<ValueError>("STAR-KV: the truncated weight's norm is ", core.norm(),
                                          ", finite expected");
  const Eigen::BDCSVD<Eigen::MatrixX<Real>> svd(core, Eigen::ComputeFullU | Eigen::ComputeFullV);
  weight.up.setZero();
  weight.up.topRows(rank) = svd.matrixU();
  weight.up.applyOnTheLeft(left_qr.householderQ());
  Eigen::MatrixX<Real> down = Eigen::MatrixX<Real>::Zero(factors.right.rows(), rank);
  down.topRows(rank) = svd.matrixV() * svd.singularValues().asDiagonal();
  down.applyOnTheLeft(right_qr.householderQ());
  weight.down = down.transpose();
  return weight;
}

/// @brief Hard truncation of all blocks, first head first. @throws as above
template <class Real = double>
std::vector<FactorisedWeight> truncated(const StarKvProjection& projection) {
  std::vector<FactorisedWeight> blocks;
  for (const StarKvFactors& block : projection.blocks) blocks.push_back(truncated<Real>(block));
  return blocks;
}

/// @brief W^ of a projection, [num_kv_heads head_dim, hidden]: replaces the model's weight.
template <class Real = double>
Eigen::MatrixXd truncated_weight(const std::vector<FactorisedWeight>& blocks) {
  Eigen::Index channels = 0, row = 0;
  for (const FactorisedWeight& block : blocks) channels += block.up.rows();
  Eigen::MatrixX<Real> weight(channels, blocks.empty() ? 0 : blocks.front().down.cols());
  for (const FactorisedWeight& block : blocks) {
    weight.middleRows(row, block.up.rows()).noalias() = block.up * block.down;
    row += block.up.rows();
  }
  return weight;
}

}  // namespace train
namespace detail {

/// The rows of `blocks` that make a head's channels, [head_dim, rank], with at least one column:
/// caches have no rank 0. A column that stands for no rank meets coefficients that are all 0.
template <class Real = double>
Eigen::MatrixXd star_kv_head_up(const std::vector<train::FactorisedWeight>& blocks,
                                const CacheShape& shape, int head) {
  const bool joint = blocks.size() == 1;
  const train::FactorisedWeight& block = blocks[joint ? 0 : static_cast<std::size_t>(head)];
  const Eigen::Index first = joint ? Eigen::Index{head} * shape.head_dim : 0;
  if (block.rank() > 0) return block.up.middleRows(first, shape.head_dim);
  return Eigen::MatrixX<Real>::Identity(block.up.rows(), 1).middleRows(first, shape.head_dim);
}

/// Raises ShapeError unless there is a block a head, or one for all where `may_be_joint`, with the
/// channels of `shape`, and a bias is absent or as long as they are.
inline void check_star_kv_blocks(const char* what,
                                 const std::vector<train::FactorisedWeight>& blocks,
                                 const CacheShape& shape, std::span<const float> bias,
                                 bool may_be_joint) {
  const bool joint = may_be_joint && blocks.size() == 1;
  if (!joint && static_cast<int>(blocks.size()) != shape.num_kv_heads)
    fail<ShapeError>(what, ": blocks ", blocks.size(), ", num_kv_heads ", shape.num_kv_heads,
                     may_be_joint ? "" : "; joint keys have no maps a head");
  const std::int64_t channels = std::int64_t{shape.num_kv_heads} * shape.head_dim;
  for (const train::FactorisedWeight& block : blocks)
    check_equal("channels", what, std::int64_t{block.up.rows()}, "shape",
                joint ? channels : std::int64_t{shape.head_dim});
  if (!bias.empty())
    check_equal("channels", what, channels, "bias", static_cast<std::int64_t>(bias.size()));
}

}  // namespace detail
namespace train {

/// @brief The maps of a layer's cache, whose rows are keys before RoPE (Rope::pre) and values of
/// the truncated weights: the PerHead policy's with values of one block a head, JointValues' with
/// one block for all.
///
/// key_down = value_down = up: the rows lie in its span, and nothing is lost. A bias is the rows'
/// mean in these maps: the policy is then `centred`. Keys and values of one KV head alone are the
/// same in both policies.
/// @param keys, values  truncated(); keys are head-wise
/// @param key_bias, value_bias  of the projections, [num_kv_heads head_dim]; empty: none
/// @throws ShapeError unless blocks and biases fit the shape; joint keys among them, whose latent
/// no basis of this library has
///
/// A head (or a layer's values) of rank 0 has maps of rank 1, and coefficients that are 0.
/// Cost: O(num_kv_heads head_dim r).
template <class Real = double>
LayerBasis star_kv_basis(const std::vector<FactorisedWeight>& keys,
                         const std::vector<FactorisedWeight>& values, const CacheShape& shape,
                         std::span<const float> key_bias = {},
                         std::span<const float> value_bias = {}) {
  ::lowrankkv::detail::check_star_kv_blocks("keys", keys, shape, key_bias, false);
  ::lowrankkv::detail::check_star_kv_blocks("values", values, shape, value_bias, true);
  LayerBasis basis;
  for (int head = 0; head < shape.num_kv_heads; ++head) {
    HeadBasis maps;
    const auto mean_of = [&](std::span<const float> bias) {
      const std::size_t dim = static_cast<std::size_t>(shape.head_dim);
      if (!bias.empty()) bias = bias.subspan(static_cast<std::size_t>(head) * dim, dim);
      return std::vector<float>(bias.begin(), bias.end());
    };
    const Eigen::MatrixX<Real> key = ::lowrankkv::detail::star_kv_head_up(keys, shape, head),
                               value = ::lowrankkv::detail::star_kv_head_up(values, shape, head);
    maps.key_rank = static_cast<int>(key.cols());
    maps.value_rank = static_cast<int>(value.cols());
    maps.key_down = linalg::to_row_major(key);
    maps.value_down = linalg::to_row_major(value);
    maps.key_mean = mean_of(key_bias);
    maps.value_mean = mean_of(value_bias);
    basis.heads.push_back(std::move(maps));
  }
  return basis;
}

/// @brief The output projection that reads the values' latent (STAR-KV section 3.3).
struct AbsorbedOutput {
  /// W_out^i U_V of each query head i, [hidden, rank of its values].
  std::vector<Eigen::MatrixXd> heads;
  Eigen::VectorXd bias;  ///< [hidden]: what the values' bias adds; 0 without one
};

/// @brief Absorbs the values' up-projection into the output projection: with p^i the attention
/// weights of query head i and C [n, rank] the tokens' coefficients,
///
///     sum over i of W_out^i V^T p^i = sum over i of (W_out^i U_V) (C^T p^i) + bias
///
/// so values are never up-projected. Each query head has the U_V of its KV head. The weights p^i
/// sum to 1, so a bias of the values adds a constant.
/// @param values       truncated(): one block for all heads, or one a head
/// @param output_weight  W_out [hidden, num_qo_heads head_dim] (torch.nn.Linear.weight)
/// @param value_bias   [num_kv_heads head_dim]; empty: none
/// @throws ShapeError unless all of them fit the shape
///
/// Cost: O(num_qo_heads hidden head_dim rank).
template <class Real = double, class Stored = float>
AbsorbedOutput absorbed_output(const std::vector<FactorisedWeight>& values,
                               MatrixView output_weight, const CacheShape& shape,
                               std::span<const float> value_bias = {}) {
  ::lowrankkv::detail::check_star_kv_blocks("values", values, shape, value_bias, true);
  if (shape.num_qo_heads < 1 || shape.num_qo_heads % shape.num_kv_heads != 0)
    ::lowrankkv::detail::fail<ShapeError>("num_qo_heads: ", shape.num_qo_heads, ", num_kv_heads ",
                                          shape.num_kv_heads);
  ::lowrankkv::detail::check_equal("columns", "output_weight", output_weight.cols,
                                   "num_qo_heads * head_dim",
                                   std::int64_t{shape.num_qo_heads} * shape.head_dim);
  const Eigen::MatrixX<Real> weight = linalg::to_matrix(output_weight);
  AbsorbedOutput absorbed;
  absorbed.bias = Eigen::VectorX<Real>::Zero(weight.rows());
  for (int query = 0; query < shape.num_qo_heads; ++query) {
    const int head = query / shape.group_size();
    const Eigen::MatrixX<Real> own =
        weight.middleCols(Eigen::Index{query} * shape.head_dim, shape.head_dim);
    const Eigen::MatrixX<Real> up = ::lowrankkv::detail::star_kv_head_up(values, shape, head);
    absorbed.heads.push_back(calibrate::absorb_output(up.transpose(), own.transpose()).transpose());
    if (value_bias.empty()) continue;
    const Eigen::Map<const Eigen::VectorX<Stored>> bias(value_bias.data() + head * shape.head_dim,
                                                        shape.head_dim);
    absorbed.bias += own * bias.template cast<Real>();
  }
  return absorbed;
}

}  // namespace train
LOWRANKKV_NAMESPACE_END
