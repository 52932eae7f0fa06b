// SPDX-License-Identifier: Apache-2.0
/// @file cpu/token_policy/sink_recent.hpp  SinkRecent on the CPU.
#pragma once

#include <cstdint>
#include <span>

#include "lowrankkv/cpu/token_policy/sinks.hpp"
#include "lowrankkv/token_policy/sink_recent.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<SinkRecent, Cpu> {
  static constexpr bool compresses = true;
  static constexpr Evidence evidence = Evidence::none;
  static void validate(const SinkRecent& policy) { check_sinks(policy.sinks); }
  static int recent(const SinkRecent& policy) { return policy.recent; }
  static RowBounds bounds(const SinkRecent& policy, const RowBatch& batch) {
    const std::int64_t sinks = cpu::sinks_in(batch, policy.sinks);
    return {sinks, batch.num_rows - sinks};
  }
  static void classify(const SinkRecent& policy, const RowBatch& batch, std::span<RowFate> fates) {
    cpu::pin_sinks(batch, policy.sinks, RowFate::compressed, fates);
  }
  static bool pinned(const SinkRecent& policy, std::int64_t position) {
    return position < policy.sinks;
  }
};

static_assert(TokenPolicyFor<SinkRecent, Cpu>);

LOWRANKKV_NAMESPACE_END
