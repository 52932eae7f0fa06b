// SPDX-License-Identifier: Apache-2.0
/// @file cuda/basis/per_head.cuh  PerHead on the Cuda backend.
#pragma once

#include "lowrankkv/basis/per_head.hpp"
#include "lowrankkv/concepts/impl.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<PerHead, Cuda> {
  static void validate(const PerHead& policy, const LayerBasis& basis, const CacheShape& shape) {
    ::lowrankkv::validate(policy, basis, shape);
  }
  static constexpr bool moves = true;  ///< bases may move, in the metrics of keys and values
};

LOWRANKKV_NAMESPACE_END
