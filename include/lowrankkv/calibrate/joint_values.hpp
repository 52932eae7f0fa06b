// SPDX-License-Identifier: Apache-2.0
/// @file calibrate/joint_values.hpp  One decomposition of the values of a group of heads (STAR-KV
/// section 4.3; Palu's grouped heads).
///
/// The values of all heads of a token are one row v = [v_0 | v_1 | ...] of H d channels (H =
/// num_kv_heads, d = head_dim).
///
///     encode  c = v value_down                 r coefficients per token, shared by all heads
///     decode  v_h = c output_up_h              output_up_h = (rows of head h of value_down)^T
///     output  o_h = (sum_i alpha_i c_i) output_up_h
///
/// At r = H r_head this stores as much as r_head coefficients per head, and never loses more energy
/// (lemma 4.2), because head-wise bases are a special joint basis that is block-diagonal. The cost:
/// weighted sums of r instead of r / H coefficients per head.
#pragma once

#include <Eigen/Core>

#include <cstddef>
#include <vector>

#include "lowrankkv/calibrate/moments.hpp"
#include "lowrankkv/calibrate/weights.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace calibrate {

/// @brief The maps of joint values, f64.
struct JointValueMaps {
  Eigen::MatrixXd value_down;  ///< [num_kv_heads head_dim, rank], orthonormal columns
  /// Per head [rank, head_dim]; side by side they are the transpose of value_down.
  std::vector<Eigen::MatrixXd> output_up;
};

/// @brief The joint maps with the smallest squared error sum ||v - v^||^2 at their rank
/// (Eckart-Young).
/// @param moments of stacked values, [num_kv_heads head_dim]: Moments::add on rows [n, num_kv_heads
/// head_dim], or weight_moments
/// @throws ShapeError unless num_kv_heads divides the width and 1 <= rank <= width, ValueError on
/// NaN or Inf
///
/// Cost: O((num_kv_heads head_dim)^3).
template <class Real = double>
JointValueMaps joint_values(const Moments& moments, int num_kv_heads, int rank) {
  const Eigen::Index width = moments.second.rows();
  const Eigen::Index dim = ::lowrankkv::detail::joint_head_dim(width, num_kv_heads);
  if (rank < 1 || rank > width)
    ::lowrankkv::detail::fail<ShapeError>("rank: joint rank ", rank, ", num_kv_heads * head_dim ",
                                          width);
  JointValueMaps maps;
  const Eigen::MatrixX<Real> axes = principal_axes(moments.second).vectors;
  maps.value_down = axes.leftCols(rank);
  for (Eigen::Index head = 0; head < num_kv_heads; ++head) {
    maps.output_up.push_back(axes.block(head * dim, 0, dim, rank).transpose());
  }
  return maps;
}

/// @brief The squared error sum ||v - v^||^2 of the best joint maps of `rank`: the sum of the joint
/// sigma^2 beyond this rank, in the unit of moments.second. @throws ShapeError unless 0 <= rank <=
/// width
///
/// Cost: O((num_kv_heads head_dim)^3).
template <class Real = double>
double joint_error(const Moments& moments, int rank) {
  const Eigen::Index width = moments.second.rows();
  if (rank < 0 || rank > width)
    ::lowrankkv::detail::fail<ShapeError>("rank: joint rank ", rank, ", num_kv_heads * head_dim ",
                                          width);
  const Eigen::VectorX<Real> values = principal_axes(moments.second).values;
  return values.tail(width - rank).sum();
}

/// @brief The squared error of the best maps of each head alone, with rank_per_head each.
/// joint_error(num_kv_heads rank_per_head) is never above it (lemma 4.2). @throws ShapeError unless
/// num_kv_heads divides the width and 0 <= rank_per_head <= head_dim
///
/// Cost: O(num_kv_heads head_dim^3).
template <class Real = double>
double head_wise_error(const Moments& moments, int num_kv_heads, int rank_per_head) {
  double error = 0.0;
  for (const Moments& head : head_moments(moments, num_kv_heads)) {
    const Eigen::Index dim = head.second.rows();
    if (rank_per_head < 0 || rank_per_head > dim)
      ::lowrankkv::detail::fail<ShapeError>("rank: rank_per_head ", rank_per_head, ", head_dim ",
                                            dim);
    const Eigen::VectorX<Real> values = principal_axes(head.second).values;
    error += values.tail(dim - rank_per_head).sum();
  }
  return error;
}

/// @brief Folds a head's output_up into the engine's output projection: o_h W_O = (sum_i alpha_i
/// c_i) (output_up_h W_O). Values are then never reconstructed (STAR-KV section 3.3).
/// @param output_up  [rank, head_dim] of the KV head that the query head reads
/// @param projection [head_dim, hidden] of the query head, applied from the right: the head's
/// columns of a torch.nn.Linear.weight, transposed
/// @return [rank, hidden]
/// @throws ShapeError if head_dim differs
///
/// Cost: O(rank head_dim hidden).
template <class Real = double>
Eigen::MatrixXd absorb_output(const linalg::MatrixRef<Real>& output_up,
                              const linalg::MatrixRef<Real>& projection) {
  ::lowrankkv::detail::check_equal("head_dim", "output_up", output_up.cols(), "projection",
                                   projection.rows());
  return output_up * projection;
}

LOWRANKKV_COMPILED_TEMPLATE(JointValueMaps joint_values<double>(const Moments&, int, int))

}  // namespace calibrate
LOWRANKKV_NAMESPACE_END
