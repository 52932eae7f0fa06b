// SPDX-License-Identifier: Apache-2.0
/// @file cpu/token_policy/compress_all.hpp  CompressAll on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/token_policy/compress_all.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<CompressAll, Cpu> {
  static constexpr bool compresses = true;
  static int recent(const CompressAll&) { return CompressAll::recent; }
  static std::int64_t max_full_rows(const CompressAll&, std::int64_t) { return 0; }
  static void classify(const CompressAll&, const RowBatch&, std::span<RowState> states) {
    std::fill(states.begin(), states.end(), RowState::compressed);
  }
};

static_assert(TokenPolicyFor<CompressAll, Cpu>);

LOWRANKKV_NAMESPACE_END
