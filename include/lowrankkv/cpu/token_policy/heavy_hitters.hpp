// SPDX-License-Identifier: Apache-2.0
/// @file cpu/token_policy/heavy_hitters.hpp  HeavyHitters on the CPU: keeps the stored and flushed
/// rows with the largest accumulated scores.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/cpu/top_rows.hpp"
#include "lowrankkv/token_policy/heavy_hitters.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<HeavyHitters, Cpu> {
  static constexpr bool compresses = true;
  static constexpr Evidence evidence = Evidence::accumulated;
  static void validate(const HeavyHitters& policy) { check_heavy_hitters(policy); }
  static int recent(const HeavyHitters& policy) { return policy.recent; }
  static RowBounds bounds(const HeavyHitters&, const RowBatch& batch) {
    return {0, batch.num_rows};
  }
  static void classify(const HeavyHitters&, const RowBatch&, std::span<RowFate> fates) {
    std::fill(fates.begin(), fates.end(), RowFate::compressed);
  }

  static void evict(const HeavyHitters& policy, const RowBatch& batch, std::span<StoredRow> stored,
                    std::span<RowFate> fates) {
    std::int64_t kept = heavy_rows(policy, batch.first_position + batch.num_rows);
    std::vector<float> accumulated_scores;
    const auto add = [&](float accumulated, bool pinned) {
      // Pinned rows stay, and do not count against the number of kept rows.
      accumulated_scores.push_back(pinned ? cpu::kAlways : accumulated);
      kept += pinned ? 1 : 0;
    };
    for (const StoredRow& row : stored) add(row.accumulated, row.pinned);
    for (std::size_t row = 0; row < fates.size(); ++row) {
      // A row that another policy drops must not count either.
      add(fates[row] == RowFate::dropped ? -cpu::kAlways : batch.accumulated[row],
          fates[row] == RowFate::pinned);
    }
    std::vector<bool> stays(accumulated_scores.size(), false);
    for (const std::int64_t row : cpu::top_rows(accumulated_scores, kept))
      stays[static_cast<std::size_t>(row)] = true;
    for (std::size_t row = 0; row < stored.size(); ++row) stored[row].gone = !stays[row];
    for (std::size_t row = 0; row < fates.size(); ++row) {
      if (!stays[stored.size() + row]) fates[row] = (std::max)(fates[row], RowFate::dropped);
    }
  }
};

static_assert(TokenPolicyFor<HeavyHitters, Cpu>);

LOWRANKKV_NAMESPACE_END
