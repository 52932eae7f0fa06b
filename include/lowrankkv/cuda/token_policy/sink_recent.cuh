// SPDX-License-Identifier: Apache-2.0
/// @file cuda/token_policy/sink_recent.cuh  SinkRecent on the Cuda backend.
#pragma once

#include <cstdint>

#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/token_policy/sink_recent.hpp"
#include "lowrankkv/token_policy/sinks.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<SinkRecent, Cuda> {
  static constexpr RowFate fate = RowFate::compressed;
  static void validate(const SinkRecent& policy) { check_sinks(policy.sinks); }
  static int recent(const SinkRecent& policy) { return policy.recent; }
  static std::int64_t pinned_rows(const SinkRecent& policy, std::int64_t first_position,
                                  std::int64_t count) {
    return sinks_among(policy.sinks, first_position, count);
  }
};

LOWRANKKV_NAMESPACE_END
