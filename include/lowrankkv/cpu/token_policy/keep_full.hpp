// SPDX-License-Identifier: Apache-2.0
/// @file cpu/token_policy/keep_full.hpp  KeepFull on the CPU.
#pragma once

#include <algorithm>
#include <span>

#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/token_policy/keep_full.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<KeepFull, Cpu> {
  static constexpr bool compresses = false;
  static constexpr Evidence evidence = Evidence::none;
  static int recent(const KeepFull& policy) { return policy.recent; }
  static RowBounds bounds(const KeepFull&, const RowBatch& batch) { return {batch.num_rows, 0}; }
  static void classify(const KeepFull&, const RowBatch&, std::span<RowFate> fates) {
    std::fill(fates.begin(), fates.end(), RowFate::full);
  }
};

static_assert(TokenPolicyFor<KeepFull, Cpu>);

LOWRANKKV_NAMESPACE_END
