// SPDX-License-Identifier: Apache-2.0
/// @file cpu/basis/joint_values.hpp  JointValues on the CPU: keys as PerHead, one latent for the
/// values of a group.
#pragma once

#include "lowrankkv/basis/joint_values.hpp"
#include "lowrankkv/cpu/basis/per_head.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<JointValues, Cpu> {
  static constexpr bool fixed = true;
  static void validate(const JointValues& policy, const LayerBasis& basis,
                       const CacheShape& shape) {
    ::lowrankkv::validate(policy, basis, shape);
  }
  static int heads_per_group(const JointValues& policy, int num_kv_heads) {
    return policy.group_of(num_kv_heads);
  }
  template <class = void>
  static void to_metric(const JointValues& policy, const HeadBasis& head, int head_dim, Part part,
                        float* rows, int count) {
    Impl<PerHead, Cpu>::to_metric(policy.keys, head, head_dim, part, rows, count);
  }
};

static_assert(BasisFor<JointValues, Cpu>);

LOWRANKKV_NAMESPACE_END
