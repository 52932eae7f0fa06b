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
/// joint_basis() makes the maps of a layer, with means subtracted from v. The functions on Moments
/// decompose what they are given: moments of v, as in the paper, or Moments::around_mean().
///
/// At r = H r_head this stores as much as r_head coefficients per head, and never loses more energy
/// (lemma 4.2), because head-wise bases are a special joint basis that is block-diagonal. The cost:
/// weighted sums of r instead of r / H coefficients per head.
#pragma once

#include <Eigen/Core>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "lowrankkv/calibrate/choose_rank.hpp"
#include "lowrankkv/calibrate/layer_moments.hpp"
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

/// @brief The maps of a layer for the JointValues policy: keys as LayerMoments::basis() makes them,
/// one decomposition for the values of each group of heads.
/// @param options  keys: as for LayerMoments::basis(). Values: the rank is value_ratio times the
/// group's channels, or the one that keeps value_energy, the largest among the groups. A group's
/// mean is subtracted where its share of the group's energy is at least mean_share
/// @param heads_per_group  as JointValues::heads_per_group; 0: all heads
/// @throws ShapeError unless heads_per_group divides num_kv_heads
///
/// Cost: O((group head_dim)^3) a group.
template <class Real = double>
LayerBasis joint_basis(const LayerMoments& layer, const BasisOptions& options,
                       int heads_per_group = 0) {
  const int heads = layer.shape().num_kv_heads, dim = layer.shape().head_dim;
  const int group = heads_per_group == 0 ? heads : heads_per_group;
  if (group < 1 || heads % group != 0)
    ::lowrankkv::detail::fail<ShapeError>("joint values: heads_per_group ", heads_per_group,
                                          ", num_kv_heads ", heads);
  std::vector<Moments> groups = head_moments(layer.values(), heads / group);
  std::vector<Eigen::VectorX<Real>> means;  // by group; empty: not subtracted
  int rank = 0;
  for (Moments& moments : groups) {
    const bool centred = options.policy.centred && moments.mean_share() >= options.mean_share;
    means.push_back(centred ? moments.mean() : Eigen::VectorXd());
    if (centred) moments = moments.around_mean();
    const int own =
        options.value_energy > 0.0
            ? rank_by_energy(principal_axes(moments.second).values, options.value_energy)
            : rank_by_ratio(group * dim, options.value_ratio);
    rank = (std::max)(rank, own);
  }
  LayerBasis basis = layer.basis(options);
  for (int first = 0; first < heads; first += group) {
    const std::size_t index = static_cast<std::size_t>(first / group);
    const JointValueMaps joint = joint_values(groups[index], group, rank);
    const Eigen::MatrixX<Real>& down = joint.value_down;
    for (int member = 0; member < group; ++member) {
      HeadBasis& head = basis.heads[static_cast<std::size_t>(first + member)];
      head.value_rank = rank;
      head.value_down = linalg::to_row_major(down.middleRows(member * dim, dim));
      head.value_mean.clear();
      if (means[index].size() > 0)
        head.value_mean = linalg::to_row_major(means[index].segment(member * dim, dim));
    }
  }
  return basis;
}

LOWRANKKV_COMPILED_TEMPLATE(JointValueMaps joint_values<double>(const Moments&, int, int))
LOWRANKKV_COMPILED_TEMPLATE(LayerBasis joint_basis<double>(const LayerMoments&, const BasisOptions&,
                                                           int))

}  // namespace calibrate
LOWRANKKV_NAMESPACE_END
