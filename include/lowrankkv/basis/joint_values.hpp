// SPDX-License-Identifier: Apache-2.0
/// @file basis/joint_values.hpp  JointValues: keys per head, one latent for the values of several
/// heads (STAR-KV; Palu's groups).
#pragma once

#include <cstddef>
#include <vector>

#include "lowrankkv/basis/per_head.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Basis policy of STAR-KV section 4.3: key maps per head, and one value map
/// [heads_per_group * head_dim, value_rank] for the stacked values of the heads of a group. The
/// value map is orthonormal as a whole. value_rank may reach heads_per_group * head_dim.
///
/// HeadBasis::value_down of a head is its block [head_dim, value_rank] of that map; output_up is
/// the block's transpose. One row of value coefficients serves all heads of the group, so the heads
/// share the fate of every token: evidence for a token policy (attention, accumulated scores,
/// residuals) is summed over the group. Works with the Static updater.
struct JointValues {
  /// Heads whose values share a latent. 0: all heads of the layer. Must divide num_kv_heads.
  int heads_per_group = 0;
  /// Metric of the keys, and centring of keys and values. Values use the plain metric.
  PerHead keys{};
  friend bool operator==(const JointValues&, const JointValues&) = default;

  /// @brief Heads of one group in a layer of num_kv_heads.
  int group_of(int num_kv_heads) const {
    return heads_per_group > 0 ? heads_per_group : num_kv_heads;
  }
};

namespace detail {

/// max |(sum over the heads of a group of A_h^T A_h) - I|, A_h [dim, rank].
inline double joint_orthonormality_error(const HeadBasis* first, int heads, int dim) {
  const int rank = first->value_rank;
  std::vector<float> stacked;
  for (int head = 0; head < heads; ++head)
    stacked.insert(stacked.end(), first[head].value_down.begin(), first[head].value_down.end());
  return biorthogonality_error(stacked, stacked, heads * dim, rank);
}

}  // namespace detail

/// @brief Raises ShapeError or ValueError, naming both values, unless `basis` fits the shape and
/// the policy.
inline void validate(const JointValues& policy, const LayerBasis& basis, const CacheShape& shape) {
  using detail::fail;
  detail::check_num_heads(basis, shape);
  const int group = policy.group_of(shape.num_kv_heads);
  if (policy.keys.value_metric != ValueMetric::plain)
    fail<ValueError>("JointValues: value_metric ", static_cast<int>(policy.keys.value_metric),
                     ", plain (0) expected");
  if (policy.heads_per_group < 0 || shape.num_kv_heads % group != 0)
    fail<ShapeError>("JointValues: heads_per_group ", policy.heads_per_group, ", num_kv_heads ",
                     shape.num_kv_heads);
  for (int first = 0; first < shape.num_kv_heads; first += group) {
    const HeadBasis& leader = basis.heads[static_cast<std::size_t>(first)];
    if (leader.value_rank < 1 || leader.value_rank > group * shape.head_dim) {
      fail<ShapeError>("rank: value_rank ", leader.value_rank, ", heads_per_group x head_dim ",
                       group * shape.head_dim);
    }
    for (int head = first; head < first + group; ++head) {
      const HeadBasis& maps = basis.heads[static_cast<std::size_t>(head)];
      detail::check_equal("value_rank", "group", leader.value_rank, "head", maps.value_rank);
      if (maps.value_bits != leader.value_bits || maps.value_rms != leader.value_rms)
        fail<ValueError>("JointValues: value_bits or value_rms of heads ", first, " and ", head,
                         " differ, one latent has one set");
      detail::validate_keys(policy.keys, maps, shape.head_dim);
      detail::check_size(
          "value_down",
          static_cast<std::size_t>(shape.head_dim) * static_cast<std::size_t>(maps.value_rank),
          maps.value_down.size());
      detail::check_values(policy.keys, maps, shape.head_dim);
    }
    const double error = detail::joint_orthonormality_error(&leader, group, shape.head_dim);
    if (error > static_cast<double>(policy.keys.orthonormal_tolerance)) {
      fail<ValueError>("basis: not orthonormal: max |U^T U - I| is ", error,
                       " for the joint values of heads ", first, " to ", first + group - 1,
                       ", tolerance ", policy.keys.orthonormal_tolerance);
    }
  }
}

LOWRANKKV_NAMESPACE_END
