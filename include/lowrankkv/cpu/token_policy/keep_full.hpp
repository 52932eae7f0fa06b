// SPDX-License-Identifier: Apache-2.0
/// @file cpu/token_policy/keep_full.hpp  KeepFull on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/token_policy/keep_full.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<KeepFull, Cpu> {
  static constexpr bool compresses = false;
  static int recent(const KeepFull& policy) { return policy.recent; }
  static std::int64_t max_full_rows(const KeepFull&, std::int64_t tokens) { return tokens; }
  static void classify(const KeepFull&, const RowBatch&, std::span<RowState> states) {
    std::fill(states.begin(), states.end(), RowState::full);
  }
};

static_assert(TokenPolicyFor<KeepFull, Cpu>);

LOWRANKKV_NAMESPACE_END
