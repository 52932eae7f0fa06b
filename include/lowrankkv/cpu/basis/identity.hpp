// SPDX-License-Identifier: Apache-2.0
/// @file cpu/basis/identity.hpp  Identity on the CPU.
#pragma once

#include "lowrankkv/basis/identity.hpp"
#include "lowrankkv/concepts/basis.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<Identity, Cpu> {
  static constexpr bool fixed = true;
  static void validate(const Identity& policy, const LayerBasis& basis, const CacheShape& shape) {
    ::lowrankkv::validate(policy, basis, shape);
  }
  static LayerBasis own_maps(const Identity&, const CacheShape& shape) {
    return identity_basis(shape);
  }
  /// There is neither a mean nor a metric.
  static void to_metric(const Identity&, const HeadBasis&, int, Part, float*, int) {}
};

static_assert(BasisFor<Identity, Cpu>);

LOWRANKKV_NAMESPACE_END
