// SPDX-License-Identifier: Apache-2.0
/// @file cuda/token_policy/sliding_window.cuh  SlidingWindow on the Cuda backend.
#pragma once

#include <cstdint>

#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/token_policy/sinks.hpp"
#include "lowrankkv/token_policy/sliding_window.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<SlidingWindow, Cuda> {
  static constexpr RowFate fate = RowFate::dropped;
  static void validate(const SlidingWindow& policy) { check_sinks(policy.sinks); }
  static int recent(const SlidingWindow& policy) { return policy.recent; }
  static std::int64_t pinned_rows(const SlidingWindow& policy, std::int64_t first_position,
                                  std::int64_t count) {
    return sinks_among(policy.sinks, first_position, count);
  }
};

LOWRANKKV_NAMESPACE_END
