// SPDX-License-Identifier: Apache-2.0
/// @file train/dlrp_fold.hpp  Deployment: trained chains folded into the maps of a cache, or into
/// the weights of a model (DLRP section 3.3, eq. 11; algorithm 3).
///
/// The basis policy Projector has four maps a KV head, applied behind RoPE. So chains after RoPE
/// fold into it (projector_basis()), and chains before RoPE, whose query and output maps belong to
/// query heads, do not: they fold into W_Q, W_K, W_V and W_O (folded_weights()). An engine then has
/// two ways.
///
/// - FoldedWidth::head_dim: rows keep head_dim channels, of which those without a coefficient are
///   0. RoPE stays the model's and leaves them 0. padded_basis() makes the maps that store the
///   other channels alone, so that preset Dlrp caches r_qk + r_vo numbers a token and KV head, on
///   both backends, and loses nothing but rounding. Rows that wait for a flush still take 2
///   head_dim numbers, and a query step multiplies by a selection.
/// - FoldedWidth::rank: rows have r_qk or r_vo channels. RoPE rotates r_qk / 2 pairs at the
///   frequencies of HeadRanks::pairs, and softmax keeps the scale 1 / sqrt(head_dim) of the model.
///   A cache of such rows would need a CacheShape with a width for keys and one for values.
///
/// To hold the chains themselves, Projector would need query_down and output_up a query head, and
/// the caller's rows before RoPE; the attention kernels, which project a group's queries with one
/// map and expand its sums with one, would take one each.
///
/// Weights fold exactly only where projections are linear up to the map: a norm of each head's
/// queries and keys before RoPE (Qwen3) stands between W and D, and such a model must apply D_Q and
/// D_K behind it.
#pragma once

#include <Eigen/Core>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/calibrate/projector.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"
#include "lowrankkv/train/deep_projectors.hpp"
#include "lowrankkv/train/low_rank_projectors.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace train {

namespace detail {

/// The product of a chain of `layer`.
template <class Real>
Eigen::MatrixX<Real> map_of(const DeepProjectors& projectors, int layer, Projection projection,
                            int head) {
  return calibrate::fold<Real>(projectors.chain(projectors.chain_index({layer, projection, head})));
}

/// Raises StateError unless the maps are applied where the caller needs them.
inline void check_geometry(const DeepProjectors& projectors, DlrpGeometry needed,
                           const char* caller) {
  if (projectors.options.geometry == needed) return;
  const bool before = projectors.options.geometry == DlrpGeometry::before_rope;
  ::lowrankkv::detail::fail<StateError>(
      caller, ": maps are ", before ? "before" : "after", " RoPE, with ",
      projectors.num_maps(Projection::query), " query maps for ", projectors.shape.num_kv_heads,
      " KV heads; maps ", before ? "after RoPE, one a KV head," : "before RoPE", " are needed");
}

}  // namespace detail

/// @brief The maps of a layer for the basis policy Projector (preset Dlrp): key_down = D_K,
/// query_down = D_Q, value_down = D_V, output_up = D_O, each the product of its chain, rounded to
/// f32.
///
/// The chains' layer projects every row. A cache reads rows that wait for their flush, and others
/// that a policy keeps, at full rank, without maps: there it differs from what was trained.
/// @throws StateError unless the geometry is DlrpGeometry::after_rope; ShapeError for a layer
/// that is not there; ValueError for a map that is not finite in f32
template <class Real = double>
LayerBasis projector_basis(const DeepProjectors& projectors, int layer) {
  detail::check_geometry(projectors, DlrpGeometry::after_rope, "projector_basis");
  LayerBasis basis;
  for (int head = 0; head < projectors.shape.num_kv_heads; ++head) {
    basis.heads.push_back(calibrate::make_projector_head<Real>(
        detail::map_of<Real>(projectors, layer, Projection::query, head),
        detail::map_of<Real>(projectors, layer, Projection::key, head),
        detail::map_of<Real>(projectors, layer, Projection::value, head),
        detail::map_of<Real>(projectors, layer, Projection::output, head)));
  }
  return basis;
}

/// @brief The projections of a layer's attention, as torch.nn.Linear has them: rows are output
/// channels, y = W x + b. Heads lie behind each other.
struct AttentionWeights {
  Eigen::MatrixXd query;   ///< [width of all query heads, hidden_size]
  Eigen::MatrixXd key;     ///< [width of all KV heads, hidden_size]
  Eigen::MatrixXd value;   ///< [width of all KV heads, hidden_size]
  Eigen::MatrixXd output;  ///< [hidden_size, width of all query heads]; its bias does not change
  Eigen::VectorXd query_bias, key_bias, value_bias;  ///< one number a row; empty: none
};

/// @brief How wide the heads of folded weights are.
enum class FoldedWidth : std::uint8_t {
  rank,     ///< r_qk channels of queries and keys, r_vo of values: the paper's smaller heads
  head_dim  ///< head_dim channels, those without a coefficient 0: for engines as they are
};

/// @brief The channels of a head's queries and keys that are not 0 in FoldedWidth::head_dim, in the
/// order of the coefficients: of a KV head and the query heads that read it. [r_qk]
/// @throws StateError unless the geometry is DlrpGeometry::before_rope
inline std::vector<int> padded_channels(const DeepProjectors& projectors, int layer, int kv_head) {
  detail::check_geometry(projectors, DlrpGeometry::before_rope, "padded_channels");
  static_cast<void>(projectors.chain_index({layer, Projection::key, kv_head}));  // is it there?
  return pair_channels(projectors.head_ranks(layer, kv_head).pairs, projectors.shape.head_dim,
                       projectors.options.pairing);
}

namespace detail {

/// Raises ShapeError unless the weights are those of a layer of `shape`.
template <class Real = double>
void check_weights(const CacheShape& shape, const AttentionWeights& weights) {
  using ::lowrankkv::detail::check_equal;
  const Eigen::Index queries = Eigen::Index{shape.num_qo_heads} * shape.head_dim;
  const Eigen::Index keys = Eigen::Index{shape.num_kv_heads} * shape.head_dim;
  check_equal("query weight", "rows", weights.query.rows(), "heads have", queries);
  check_equal("key weight", "rows", weights.key.rows(), "heads have", keys);
  check_equal("value weight", "rows", weights.value.rows(), "heads have", keys);
  check_equal("output weight", "columns", weights.output.cols(), "heads have", queries);
  const Eigen::Index hidden = weights.query.cols();
  check_equal("hidden_size", "query", hidden, "key", weights.key.cols());
  check_equal("hidden_size", "query", hidden, "value", weights.value.cols());
  check_equal("hidden_size", "query", hidden, "output", weights.output.rows());
  const auto check_bias = [](const char* name, const Eigen::VectorX<Real>& bias,
                             const Eigen::MatrixX<Real>& weight) {
    if (bias.size() != 0) check_equal(name, "numbers", bias.size(), "rows", weight.rows());
  };
  check_bias("query bias", weights.query_bias, weights.query);
  check_bias("key bias", weights.key_bias, weights.key);
  check_bias("value bias", weights.value_bias, weights.value);
}

/// Maps of every head of a projection, at the width that is asked for.
template <class Real>
std::vector<Eigen::MatrixX<Real>> head_maps(const DeepProjectors& projectors, int layer,
                                            Projection projection, FoldedWidth width) {
  const int dim = projectors.shape.head_dim;
  std::vector<Eigen::MatrixX<Real>> maps;
  for (int head = 0; head < projectors.num_maps(projection); ++head) {
    Eigen::MatrixX<Real> map = map_of<Real>(projectors, layer, projection, head);
    if (width == FoldedWidth::head_dim) {
      Eigen::MatrixX<Real> padded = Eigen::MatrixX<Real>::Zero(dim, dim);
      if (projection == Projection::value) {
        padded.leftCols(map.cols()) = map;
      } else if (projection == Projection::output) {
        padded.topRows(map.rows()) = map;
      } else {
        const std::vector<int> channels =
            padded_channels(projectors, layer, projectors.kv_head({layer, projection, head}));
        for (std::size_t i = 0; i < channels.size(); ++i)
          padded.col(channels[i]) = map.col(static_cast<Eigen::Index>(i));
      }
      map = padded;
    }
    maps.push_back(map);
  }
  return maps;
}

/// Rows of heads of `weight` times their maps: D^T W, and D^T b.
template <class Real>
void fold_rows(const std::vector<Eigen::MatrixX<Real>>& maps, Eigen::MatrixX<Real>& weight,
               Eigen::VectorX<Real>& bias) {
  Eigen::Index rows = 0, at = 0, to = 0;
  for (const Eigen::MatrixX<Real>& map : maps) rows += map.cols();
  Eigen::MatrixX<Real> folded(rows, weight.cols());
  Eigen::VectorX<Real> folded_bias(bias.size() == 0 ? 0 : rows);
  for (const Eigen::MatrixX<Real>& map : maps) {
    folded.middleRows(to, map.cols()) = map.transpose() * weight.middleRows(at, map.rows());
    if (bias.size() != 0)
      folded_bias.segment(to, map.cols()) = map.transpose() * bias.segment(at, map.rows());
    at += map.rows();
    to += map.cols();
  }
  weight = std::move(folded);
  bias = std::move(folded_bias);
}

}  // namespace detail

/// @brief The weights of a layer with its chains folded in (DLRP section 3.1; algorithm 2, line 7;
/// algorithm 3): x W_Q D_Q, x W_K D_K, x W_V D_V and z D_O W_O, and biases b D, in the layout of
/// AttentionWeights. Behind them the layer is the chains' layer of the geometry
/// DlrpGeometry::before_rope (train/deep_projectors.hpp).
/// @throws StateError unless the geometry is before_rope; ShapeError, naming both values, if the
/// weights are not those of such a layer
///
/// Cost: a product [head_dim, r] times [head_dim, hidden_size] a map.
template <class Real = double>
AttentionWeights folded_weights(const DeepProjectors& projectors, int layer,
                                AttentionWeights weights, FoldedWidth width) {
  detail::check_geometry(projectors, DlrpGeometry::before_rope, "folded_weights");
  detail::check_weights<Real>(projectors.shape, weights);
  const auto maps = [&](Projection projection) {
    return detail::head_maps<Real>(projectors, layer, projection, width);
  };
  detail::fold_rows<Real>(maps(Projection::query), weights.query, weights.query_bias);
  detail::fold_rows<Real>(maps(Projection::key), weights.key, weights.key_bias);
  detail::fold_rows<Real>(maps(Projection::value), weights.value, weights.value_bias);
  // z D W_O: with the weight [hidden_size, channels], its transpose has the rows of the heads.
  std::vector<Eigen::MatrixX<Real>> outputs;
  for (const Eigen::MatrixX<Real>& map : maps(Projection::output))
    outputs.emplace_back(map.transpose());
  Eigen::MatrixX<Real> output = weights.output.transpose();
  Eigen::VectorX<Real> none;
  detail::fold_rows<Real>(outputs, output, none);
  weights.output = output.transpose();
  return weights;
}

/// @brief The maps of a layer for the basis policy Projector where weights are folded at
/// FoldedWidth::head_dim: key_down = query_down = the columns padded_channels() of the identity,
/// value_down and output_up the identity cut to r_vo. They lose nothing of such rows.
/// @throws StateError unless the geometry is DlrpGeometry::before_rope, ShapeError for a layer that
/// is not there
template <class Real = double>
LayerBasis padded_basis(const DeepProjectors& projectors, int layer) {
  const int dim = projectors.shape.head_dim;
  LayerBasis basis;
  for (int head = 0; head < projectors.shape.num_kv_heads; ++head) {
    const Eigen::MatrixX<Real> channels =
        detail::identity_columns<Real>(dim, padded_channels(projectors, layer, head));
    const int rank = projectors.head_ranks(layer, head).vo;
    basis.heads.push_back(calibrate::make_projector_head<Real>(
        channels, channels, Eigen::MatrixX<Real>::Identity(dim, rank),
        Eigen::MatrixX<Real>::Identity(rank, dim)));
  }
  return basis;
}

}  // namespace train
LOWRANKKV_NAMESPACE_END
