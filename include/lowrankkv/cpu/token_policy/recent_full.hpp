// SPDX-License-Identifier: Apache-2.0
/// @file cpu/token_policy/recent_full.hpp  RecentFull on the CPU.
#pragma once

#include <algorithm>
#include <span>

#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/token_policy/recent_full.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<RecentFull, Cpu> {
  static constexpr bool compresses = true;
  static constexpr Evidence evidence = Evidence::none;
  static int recent(const RecentFull& policy) { return policy.recent; }
  static RowBounds bounds(const RecentFull&, const RowBatch& batch) { return {0, batch.num_rows}; }
  static void classify(const RecentFull&, const RowBatch&, std::span<RowFate> fates) {
    std::fill(fates.begin(), fates.end(), RowFate::compressed);
  }
};

static_assert(TokenPolicyFor<RecentFull, Cpu>);

LOWRANKKV_NAMESPACE_END
