// SPDX-License-Identifier: Apache-2.0
/// @file cpu/token_policy/sliding_window.hpp  SlidingWindow on the CPU.
#pragma once

#include <cstdint>
#include <span>

#include "lowrankkv/cpu/token_policy/sinks.hpp"
#include "lowrankkv/token_policy/sliding_window.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<SlidingWindow, Cpu> {
  static constexpr bool compresses = false;
  static constexpr Evidence evidence = Evidence::none;
  static void validate(const SlidingWindow& policy) { check_sinks(policy.sinks); }
  static int recent(const SlidingWindow& policy) { return policy.recent; }
  static RowBounds bounds(const SlidingWindow& policy, const RowBatch& batch) {
    return {cpu::sinks_in(batch, policy.sinks), 0};
  }
  static void classify(const SlidingWindow& policy, const RowBatch& batch,
                       std::span<RowFate> fates) {
    cpu::pin_sinks(batch, policy.sinks, RowFate::dropped, fates);
  }
  static bool pinned(const SlidingWindow& policy, std::int64_t position) {
    return position < policy.sinks;
  }
};

static_assert(TokenPolicyFor<SlidingWindow, Cpu>);

LOWRANKKV_NAMESPACE_END
