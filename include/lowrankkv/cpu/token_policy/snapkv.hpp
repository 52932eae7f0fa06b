// SPDX-License-Identifier: Apache-2.0
/// @file cpu/token_policy/snapkv.hpp  SnapKV on the CPU: keeps the rows with the highest scores.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/cpu/top_rows.hpp"
#include "lowrankkv/token_policy/snapkv.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<SnapKV, Cpu> {
  static constexpr bool compresses = true;
  static constexpr Evidence evidence = Evidence::attention;
  static void validate(const SnapKV& policy) { check_snapkv(policy); }
  static int recent(const SnapKV& policy) { return policy.window; }
  static AttentionScores attention_scores(const SnapKV& policy) {
    return {policy.window, policy.kernel, policy.pooling};
  }
  // All decoded rows are kept, and a prompt may be classified in chunks: counts alone give no lower
  // bound than all rows.
  static RowBounds bounds(const SnapKV&, const RowBatch& batch) { return {0, batch.num_rows}; }
  static void classify(const SnapKV& policy, const RowBatch& batch, std::span<RowFate> fates) {
    std::fill(fates.begin(), fates.end(), RowFate::compressed);
    if (batch.phase == Phase::decode || batch.attention.empty()) return;
    std::fill(fates.begin(), fates.end(), RowFate::dropped);
    for (const std::int64_t row : cpu::top_rows(batch.attention, kept_rows(policy, batch.num_rows)))
      fates[static_cast<std::size_t>(row)] = RowFate::compressed;
  }
};

static_assert(TokenPolicyFor<SnapKV, Cpu>);

LOWRANKKV_NAMESPACE_END
