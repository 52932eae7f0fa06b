// SPDX-License-Identifier: Apache-2.0
/// @file cpu/token_policy/residual_outliers.hpp  ResidualOutliers on the CPU: rows with the largest
/// errors stay at full rank.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/cpu/top_rows.hpp"
#include "lowrankkv/token_policy/residual_outliers.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<ResidualOutliers, Cpu> {
  static constexpr bool compresses = true;
  static constexpr Evidence evidence = Evidence::residuals;
  static void validate(const ResidualOutliers& policy) { check_residual_outliers(policy); }
  static bool relative_residuals(const ResidualOutliers& policy) {
    return policy.error == OutlierError::relative;
  }
  static std::int64_t residual_candidates(const ResidualOutliers& policy, std::int64_t first,
                                          std::int64_t count) {
    return outlier_rows(policy, first, count) > 0 ? outlier_candidates(policy, first, count) : 0;
  }
  static int recent(const ResidualOutliers&) { return 0; }
  static RowBounds bounds(const ResidualOutliers& policy, const RowBatch& batch) {
    return {outlier_rows(policy, batch.first_position, batch.num_rows), batch.num_rows};
  }
  static void classify(const ResidualOutliers& policy, const RowBatch& batch,
                       std::span<RowFate> fates) {
    std::fill(fates.begin(), fates.end(), RowFate::compressed);
    if (batch.residuals.empty()) return;
    for (const std::int64_t row : cpu::top_rows(
             batch.residuals, outlier_rows(policy, batch.first_position, batch.num_rows))) {
      const float residual = batch.residuals[static_cast<std::size_t>(row)];
      if (residual > policy.threshold) fates[static_cast<std::size_t>(row)] = RowFate::full;
    }
  }
};

static_assert(TokenPolicyFor<ResidualOutliers, Cpu>);

LOWRANKKV_NAMESPACE_END
