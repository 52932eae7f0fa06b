// SPDX-License-Identifier: Apache-2.0
/// @file train/star_kv_gradient.hpp  The soft-thresholded projection and its gradients (STAR-KV
/// section 4.1.2).
///
///     t_i = Th_s(sigma_i; alpha)             eq. 2 with c = 0
///     W~  = U diag(t) V^T                    what training computes keys and values with
///     y   = W~ x
///
/// With G = dL/dW~ [channels, hidden] the gradients of a block are
///
///     dL/dt_i     = u_i^T G v_i
///     dL/dalpha   = sum over i of dL/dt_i dt_i/dalpha
///     dL/dsigma_i = dL/dt_i dt_i/dsigma_i
///     dL/dU = G V diag(t),   dL/dV = G^T U diag(t)
///
///     dt/dsigma = tanh(z) + sigma s / cosh(z)^2,   dt/dalpha = -sigma s / cosh(z)^2,
///     z = s (sigma - alpha); both 0 where sigma < alpha
///
/// Eq. 2 has a kink at sigma = alpha; there the slopes are those of its upper branch. With c = 0 a
/// value below its threshold gives no gradient: it returns only when the threshold sinks below it,
/// which the values above the threshold decide.
///
/// An engine that has dL/dW~ of its own backward pass needs star_kv_weight() and
/// star_kv_weight_gradient() alone. Keys: G is with respect to rows before their rotary embedding,
/// so the engine's backward pass has rotated the gradient of a rotated key back.
#pragma once

#include <Eigen/Core>

#include <cmath>
#include <utility>
#include <vector>

#include "lowrankkv/calibrate/soft_threshold.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"
#include "lowrankkv/train/star_kv_factors.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace train {

/// @brief Th_s(sigma; alpha) and its two derivatives (file comment).
struct SoftThresholdSlopes {
  double value = 0.0;
  double by_sigma = 0.0;
  double by_alpha = 0.0;
};

/// @brief The soft threshold of one singular value (STAR-KV eq. 2, c = 0), with its derivatives.
/// @param sharpness  s, per unit of sigma
/// @throws ValueError unless s > 0 and alpha is a number
template <class = void>
SoftThresholdSlopes soft_threshold_slopes(double sigma, double alpha, double sharpness) {
  SoftThresholdSlopes slopes;
  slopes.value = calibrate::soft_threshold(sigma, alpha, sharpness);
  if (!(sigma >= alpha)) return slopes;
  const double z = sharpness * (sigma - alpha), cosh = std::cosh(z);
  const double bend = sigma * sharpness / (cosh * cosh);  // 1 / cosh^2: 1 - tanh^2 loses digits
  slopes.by_sigma = std::tanh(z) + bend;
  slopes.by_alpha = -bend;
  return slopes;
}

/// @brief W~ of a projection, [channels, hidden]: what the model computes with during training.
/// @throws ValueError as soft_threshold_slopes()
///
/// Cost: O(channels hidden p), p of a block.
template <class Real = double>
Eigen::MatrixXd star_kv_weight(const StarKvProjection& projection, double sharpness) {
  Eigen::MatrixX<Real> weight(projection.channels(), projection.hidden());
  Eigen::Index row = 0;
  for (const StarKvFactors& block : projection.blocks) {
    const Eigen::VectorX<Real> soft =
        calibrate::soft_threshold(block.sigma, block.alpha, sharpness);
    weight.middleRows(row, block.left.rows()).noalias() =
        block.left * soft.asDiagonal() * block.right.transpose();
    row += block.left.rows();
  }
  return weight;
}

/// @brief Keys before RoPE, or values, of some tokens: y = x W~^T, through the coefficients x V.
/// @param input  x [n, hidden]
/// @return [n, channels], without the projection's bias
/// @throws ShapeError if hidden differs, ValueError as soft_threshold_slopes()
///
/// Cost: O(n p (channels + hidden)) a block.
template <class Real = double>
Eigen::MatrixXd star_kv_forward(const StarKvProjection& projection,
                                const linalg::MatrixRef<Real>& input, double sharpness) {
  ::lowrankkv::detail::check_equal("hidden", "projection", projection.hidden(), "input",
                                   input.cols());
  Eigen::MatrixX<Real> output(input.rows(), projection.channels());
  Eigen::Index column = 0;
  for (const StarKvFactors& block : projection.blocks) {
    const Eigen::VectorX<Real> soft =
        calibrate::soft_threshold(block.sigma, block.alpha, sharpness);
    output.middleCols(column, block.left.rows()).noalias() =
        (input * block.right) * soft.asDiagonal() * block.left.transpose();
    column += block.left.rows();
  }
  return output;
}

/// @brief The gradients of factors and thresholds from that of the weight (file comment).
/// @param weight_gradient  G = dL/dW~ [channels, hidden]: of linear layers, the sum over tokens of
/// (dL/dy) x^T
/// @return dL/dU, dL/dsigma, dL/dV and dL/dalpha of each block
/// @throws ShapeError if channels or hidden differ, ValueError as soft_threshold_slopes()
///
/// Cost: O(channels hidden p) a block.
template <class Real = double>
StarKvProjection star_kv_weight_gradient(const StarKvProjection& projection,
                                         const linalg::MatrixRef<Real>& weight_gradient,
                                         double sharpness) {
  ::lowrankkv::detail::check_equal("channels", "projection", projection.channels(),
                                   "weight_gradient", weight_gradient.rows());
  ::lowrankkv::detail::check_equal("hidden", "projection", projection.hidden(), "weight_gradient",
                                   weight_gradient.cols());
  StarKvProjection gradient;
  Eigen::Index row = 0;
  for (const StarKvFactors& block : projection.blocks) {
    const auto own = weight_gradient.middleRows(row, block.left.rows());
    row += block.left.rows();
    StarKvFactors change;
    change.left = own * block.right;              // G V
    change.right = own.transpose() * block.left;  // G^T U
    change.sigma.resize(block.sigma.size());
    for (Eigen::Index i = 0; i < block.sigma.size(); ++i) {
      const SoftThresholdSlopes slopes =
          soft_threshold_slopes(block.sigma[i], block.alpha, sharpness);
      const double by_soft = block.left.col(i).dot(change.left.col(i));
      change.sigma[i] = by_soft * slopes.by_sigma;
      change.alpha += by_soft * slopes.by_alpha;
      change.left.col(i) *= slopes.value;
      change.right.col(i) *= slopes.value;
    }
    gradient.blocks.push_back(std::move(change));
  }
  return gradient;
}

/// @brief What star_kv_output_gradient() returns.
struct StarKvOutputGradient {
  StarKvProjection factors;  ///< as of star_kv_weight_gradient()
  Eigen::MatrixXd input;     ///< dL/dx [n, hidden] through this projection
};

/// @brief The backward pass of star_kv_forward(), from the gradient of its output: G = (dL/dy)^T x,
/// dL/dx = (dL/dy) W~.
/// @param input            x [n, hidden]
/// @param output_gradient  dL/dy [n, channels]
/// @throws ShapeError if n, hidden or channels differ, ValueError as soft_threshold_slopes()
///
/// Cost: O((n + p) channels hidden).
template <class Real = double>
StarKvOutputGradient star_kv_output_gradient(const StarKvProjection& projection,
                                             const linalg::MatrixRef<Real>& input,
                                             const linalg::MatrixRef<Real>& output_gradient,
                                             double sharpness) {
  ::lowrankkv::detail::check_equal("tokens", "input", input.rows(), "output_gradient",
                                   output_gradient.rows());
  ::lowrankkv::detail::check_equal("hidden", "projection", projection.hidden(), "input",
                                   input.cols());
  ::lowrankkv::detail::check_equal("channels", "projection", projection.channels(),
                                   "output_gradient", output_gradient.cols());
  return {star_kv_weight_gradient(projection, output_gradient.transpose() * input, sharpness),
          output_gradient * star_kv_weight(projection, sharpness)};
}

}  // namespace train
LOWRANKKV_NAMESPACE_END
