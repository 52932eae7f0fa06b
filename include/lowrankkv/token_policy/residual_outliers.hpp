// SPDX-License-Identifier: Apache-2.0
/// @file token_policy/residual_outliers.hpp  ResidualOutliers: tokens that the basis reconstructs
/// badly stay at full rank (OjaKV v2).
#pragma once

#include <algorithm>
#include <cstdint>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/token_policy/share_of_rows.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief How the errors of rows are compared.
enum class OutlierError {
  /// ||k - k^||^2 / ||k||^2 + ||v - v^||^2 / ||v||^2, means subtracted: 0 to about 2 (OjaKV v2).
  relative,
  /// ||k - k^||^2 + ||v - v^||^2: for metrics that measure both in one unit, as Budgeted's do.
  absolute
};

/// @brief Token policy: of the rows about to be compressed, those with the largest reconstruction
/// error stay at full rank.
///
/// The error of a row is measured in the basis's metrics, after projection and quantisation, under
/// the basis that is about to store it. Applies to prompts and to every T decoded rows.
struct ResidualOutliers {
  OutlierError error = OutlierError::relative;
  float share = 0.02F;  ///< at most this share of the rows, counted over the life of a sequence
  /// Only rows whose error exceeds this value. 0: the rows with the largest errors, whatever they
  /// are. On the Cuda backend a threshold makes calls that compress block until the device has
  /// counted these rows, as with HeavyHitters.
  float threshold = 0.0F;
  /// So many rows more of the first kEarlyTokens; of shorter sequences in proportion. In some texts
  /// all later tokens read one of the first, whose code is not enough.
  int early = 0;
  static constexpr std::int64_t kEarlyTokens = 128;
  friend bool operator==(const ResidualOutliers&, const ResidualOutliers&) = default;
};

/// @brief Checks the parameters. @throws ValueError
inline void check_residual_outliers(const ResidualOutliers& policy) {
  using detail::fail;
  if (!(policy.share >= 0.0F && policy.share <= 1.0F))
    fail<ValueError>("ResidualOutliers: share is in [0, 1], given ", policy.share);
  if (!(policy.threshold >= 0.0F))
    fail<ValueError>("ResidualOutliers: threshold is at least 0, given ", policy.threshold);
  if (policy.early < 0 || policy.early > ResidualOutliers::kEarlyTokens)
    fail<ValueError>("ResidualOutliers: early is in [0, ", ResidualOutliers::kEarlyTokens,
                     "], given ", policy.early);
}

/// @brief Rows of [first, first + count) that stay at full rank. The results of adjacent batches
/// add up to the result of their union.
inline std::int64_t outlier_rows(const ResidualOutliers& policy, std::int64_t first,
                                 std::int64_t count) {
  const auto early_below = [&](std::int64_t rows) {
    constexpr std::int64_t most = ResidualOutliers::kEarlyTokens;
    return (std::min)(rows, most) * policy.early / most;
  };
  return (std::min)(count, share_of_rows(policy.share, first, count) + early_below(first + count) -
                               early_below(first));
}

LOWRANKKV_NAMESPACE_END
