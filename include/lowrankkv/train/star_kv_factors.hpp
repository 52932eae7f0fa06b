// SPDX-License-Identifier: Apache-2.0
/// @file train/star_kv_factors.hpp  Key and value projections as trainable factors (STAR-KV
/// sections 3.2, 4.1 and 4.3).
///
/// A projection's weight W [num_kv_heads head_dim, hidden] makes the keys, or the values, of all KV
/// heads of a token from the layer's input x: k = W x (torch.nn.Linear.weight). Keys are those
/// before their rotary embedding. The rows of W are cut into blocks: one a head (the paper's HD),
/// or one for all heads (JD). Each block is its singular value decomposition, and has a threshold:
///
///     W = U diag(sigma) V^T          section 3.2
///     U left [channels, p], sigma [p], V right [hidden, p], p = min(channels, hidden)
///
/// Training changes U, sigma and V as well as the threshold alpha (appendix A.3: "all model
/// parameters"). So after the first step U and V are not orthonormal, and sigma has no order.
///
/// A bias of the projection is not part of W: it stays the model's. The paper's models have none.
#pragma once

#include <Eigen/Core>
#include <Eigen/SVD>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "lowrankkv/calibrate/soft_threshold.hpp"
#include "lowrankkv/calibrate/weights.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace train {

/// @brief What one decomposition covers (STAR-KV section 4.3). The paper has head_wise keys and
/// joint values; figure 7 compares all four combinations.
enum class Decomposition {
  head_wise,  ///< HD: each head's rows of W alone, a threshold a head
  joint,      ///< JD: the rows of all heads of the layer, one threshold
};

/// @brief A decomposition's name in files and messages.
inline const char* name_of(Decomposition decomposition) {
  return decomposition == Decomposition::joint ? "joint" : "head_wise";
}

/// @brief The trainable numbers of one block, f64. A gradient, or a step of an optimiser, has the
/// same members and shapes.
struct StarKvFactors {
  Eigen::MatrixXd left;   ///< U [channels, p]
  Eigen::VectorXd sigma;  ///< [p]
  Eigen::MatrixXd right;  ///< V [hidden, p]
  double alpha = 0.0;     ///< threshold, in the unit of sigma

  /// @brief r_eff = #{sigma_i >= alpha} (STAR-KV eq. 1). @throws ValueError if alpha is NaN
  template <class = void>
  int rank() const {
    return calibrate::rank_by_threshold(sigma, alpha);
  }
};

/// @brief The blocks of one projection, from the first head on: num_kv_heads of them, or one that
/// is joint.
struct StarKvProjection {
  std::vector<StarKvFactors> blocks;

  /// @brief Rows of the weight: num_kv_heads head_dim.
  Eigen::Index channels() const {
    Eigen::Index sum = 0;
    for (const StarKvFactors& block : blocks) sum += block.left.rows();
    return sum;
  }
  /// @brief Columns of the weight; 0 without blocks.
  Eigen::Index hidden() const { return blocks.empty() ? 0 : blocks.front().right.rows(); }
  /// @brief Coefficients that are stored of a token after hard truncation: the sum of
  /// StarKvFactors::rank() over the blocks.
  template <class = void>
  int rank() const {
    int sum = 0;
    for (const StarKvFactors& block : blocks) sum += block.rank();
    return sum;
  }
};

/// @brief The thin SVD of one block's weight, with alpha as given.
/// @param weight  [channels, hidden], at least one of each
/// @throws ShapeError without rows or columns, ValueError on NaN or Inf, or if alpha is not finite
///
/// Cost: O(channels hidden min(channels, hidden)).
template <class Real = double>
StarKvFactors star_kv_factors(const linalg::MatrixRef<Real>& weight, double alpha = 0.0) {
  if (weight.size() == 0)
    ::lowrankkv::detail::fail<ShapeError>("STAR-KV: weight of ", weight.rows(), " rows, ",
                                          weight.cols(), " columns, at least 1 of each expected");
  if (!weight.allFinite())
    ::lowrankkv::detail::fail<ValueError>("STAR-KV: the weight's norm is ", weight.norm(),
                                          ", finite expected");
  if (!std::isfinite(alpha))
    ::lowrankkv::detail::fail<ValueError>("STAR-KV: alpha is ", alpha, ", finite expected");
  const Eigen::BDCSVD<Eigen::MatrixX<Real>> svd(weight, Eigen::ComputeThinU | Eigen::ComputeThinV);
  return {svd.matrixU(), svd.singularValues(), svd.matrixV(), alpha};
}

/// @brief The factors of a layer's key or value projection before training.
/// @param weight         [num_kv_heads head_dim, hidden], row-major
/// @param decomposition  a block a head, or one for all
/// @param alpha          where every threshold begins. The paper is silent; its program begins at 0
/// @throws ShapeError unless num_kv_heads divides the rows, and as star_kv_factors()
///
/// Cost: O(rows hidden p), p as in the file comment.
template <class Real = double>
StarKvProjection star_kv_projection(MatrixView weight, int num_kv_heads,
                                    Decomposition decomposition, double alpha = 0.0) {
  const Eigen::MatrixX<Real> all = linalg::to_matrix(weight);
  const Eigen::Index head_dim = ::lowrankkv::detail::joint_head_dim(all.rows(), num_kv_heads);
  const bool joint = decomposition == Decomposition::joint;
  const Eigen::Index channels = joint ? all.rows() : head_dim;
  StarKvProjection projection;
  for (Eigen::Index block = 0; block < (joint ? 1 : num_kv_heads); ++block)
    projection.blocks.push_back(star_kv_factors(all.middleRows(block * channels, channels), alpha));
  return projection;
}

}  // namespace train
namespace detail {

/// Raises ShapeError or ValueError unless the block's factors fit each other and are finite.
inline void check_star_kv_factors(const std::string& where, const train::StarKvFactors& factors) {
  const Eigen::Index rank = factors.sigma.size();
  if (factors.left.cols() != rank || factors.right.cols() != rank)
    fail<ShapeError>(where, ": left has ", factors.left.cols(), " columns, sigma ", rank,
                     " values, right ", factors.right.cols(), " columns");
  const Eigen::Index most = (std::min)(factors.left.rows(), factors.right.rows());
  if (rank < 1 || rank > most)
    fail<ShapeError>(where, ": ", rank, " singular values, 1 to ", most, " expected");
  if (!factors.left.allFinite() || !factors.sigma.allFinite() || !factors.right.allFinite() ||
      !std::isfinite(factors.alpha))
    fail<ValueError>(where, ": norms of left ", factors.left.norm(), ", sigma ",
                     factors.sigma.norm(), ", right ", factors.right.norm(), ", alpha ",
                     factors.alpha, ", finite expected");
}

/// Raises ShapeError unless `change` has the shapes of `factors`, ValueError unless it is finite.
inline void check_star_kv_change(const std::string& where, const train::StarKvProjection& factors,
                                 const train::StarKvProjection& change) {
  check_equal("blocks", where.c_str(), factors.blocks.size(), "change", change.blocks.size());
  for (std::size_t i = 0; i < factors.blocks.size(); ++i) {
    const std::string block = where + " block " + std::to_string(i);
    const train::StarKvFactors &own = factors.blocks[i], &other = change.blocks[i];
    check_equal("channels", block.c_str(), own.left.rows(), "change", other.left.rows());
    check_equal("hidden", block.c_str(), own.right.rows(), "change", other.right.rows());
    check_equal("singular values", block.c_str(), own.sigma.size(), "change", other.sigma.size());
    check_star_kv_factors("change of " + block, other);
  }
}

}  // namespace detail
LOWRANKKV_NAMESPACE_END
