// SPDX-License-Identifier: Apache-2.0
/// @file cuda/basis/projector.cuh  Projector on the Cuda backend.
#pragma once

#include "lowrankkv/basis/projector.hpp"
#include "lowrankkv/concepts/impl.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<Projector, Cuda> {
  static void validate(const Projector& policy, const LayerBasis& basis, const CacheShape& shape) {
    ::lowrankkv::validate(policy, basis, shape);
  }
};

LOWRANKKV_NAMESPACE_END
