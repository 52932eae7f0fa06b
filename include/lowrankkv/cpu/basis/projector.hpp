// SPDX-License-Identifier: Apache-2.0
/// @file cpu/basis/projector.hpp  Projector on the CPU: maps are used as given.
#pragma once

#include "lowrankkv/basis/projector.hpp"
#include "lowrankkv/concepts/basis.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<Projector, Cpu> {
  static constexpr bool fixed = true;
  static void validate(const Projector& policy, const LayerBasis& basis, const CacheShape& shape) {
    ::lowrankkv::validate(policy, basis, shape);
  }
  static void to_metric(const Projector&, const HeadBasis&, int, Part, float*, int) {}
};

static_assert(BasisFor<Projector, Cpu>);

LOWRANKKV_NAMESPACE_END
