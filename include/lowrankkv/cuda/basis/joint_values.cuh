// SPDX-License-Identifier: Apache-2.0
/// @file cuda/basis/joint_values.cuh  JointValues on the Cuda backend.
#pragma once

#include "lowrankkv/basis/joint_values.hpp"
#include "lowrankkv/concepts/impl.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<JointValues, Cuda> {
  static int joint_heads(const JointValues& policy, int num_kv_heads) {
    return policy.group_of(num_kv_heads);
  }
  static void validate(const JointValues& policy, const LayerBasis& basis,
                       const CacheShape& shape) {
    ::lowrankkv::validate(policy, basis, shape);
  }
};

LOWRANKKV_NAMESPACE_END
