// SPDX-License-Identifier: Apache-2.0
/// @file cuda/updater/frequent_directions.cuh  FrequentDirections on the Cuda backend.
#pragma once

#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/updater/frequent_directions.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<FrequentDirections, Cuda> {
  static constexpr bool adapts = true;
  static constexpr bool device_epochs = true;
  static void validate(const FrequentDirections& policy) { check_frequent_directions(policy); }
  static void validate_basis(const FrequentDirections& policy, const LayerBasis& basis) {
    check_thresholds(policy, basis);
  }
};

LOWRANKKV_NAMESPACE_END
