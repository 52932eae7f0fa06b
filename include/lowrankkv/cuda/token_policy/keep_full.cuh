// SPDX-License-Identifier: Apache-2.0
/// @file cuda/token_policy/keep_full.cuh  KeepFull on the Cuda backend.
#pragma once

#include <cstdint>

#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/token_policy/keep_full.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<KeepFull, Cuda> {
  static constexpr RowFate fate = RowFate::full;
  static int recent(const KeepFull& policy) { return policy.recent; }
};

LOWRANKKV_NAMESPACE_END
