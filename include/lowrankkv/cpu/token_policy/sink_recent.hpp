// SPDX-License-Identifier: Apache-2.0
/// @file cpu/token_policy/sink_recent.hpp  SinkRecent on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/token_policy/sink_recent.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<SinkRecent, Cpu> {
  static constexpr bool compresses = true;
  static void validate(const SinkRecent& policy) {
    if (policy.sinks < 0) ::lowrankkv::detail::fail<CapacityError>("sinks: at least 0, given ", policy.sinks);
  }
  static int recent(const SinkRecent& policy) { return policy.recent; }
  static std::int64_t max_full_rows(const SinkRecent& policy, std::int64_t tokens) {
    return (std::min)(tokens, std::int64_t{policy.sinks});
  }
  static void classify(const SinkRecent& policy, const RowBatch& batch, std::span<RowState> states) {
    for (std::size_t row = 0; row < states.size(); ++row) {
      const bool sink = batch.first_position + static_cast<std::int64_t>(row) < policy.sinks;
      states[row] = sink ? RowState::full : RowState::compressed;
    }
  }
};

static_assert(TokenPolicyFor<SinkRecent, Cpu>);

LOWRANKKV_NAMESPACE_END
