// SPDX-License-Identifier: Apache-2.0
/// @file cpu/basis/projector.hpp  Projector on the CPU: maps are used as given, means are
/// subtracted.
#pragma once

#include <cstddef>
#include <vector>

#include "lowrankkv/basis/projector.hpp"
#include "lowrankkv/concepts/basis.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<Projector, Cpu> {
  static constexpr bool fixed = true;
  static void validate(const Projector& policy, const LayerBasis& basis, const CacheShape& shape) {
    ::lowrankkv::validate(policy, basis, shape);
  }
  /// x <- x - mean; there is no metric.
  static void to_metric(const Projector&, const HeadBasis& head, int head_dim, Part part,
                        float* rows, int count) {
    const std::vector<float>& mean = part == Part::key ? head.key_mean : head.value_mean;
    if (mean.empty()) return;
    for (int row = 0; row < count; ++row) {
      for (int channel = 0; channel < head_dim; ++channel)
        rows[row * head_dim + channel] -= mean[static_cast<std::size_t>(channel)];
    }
  }
};

static_assert(BasisFor<Projector, Cpu>);

LOWRANKKV_NAMESPACE_END
