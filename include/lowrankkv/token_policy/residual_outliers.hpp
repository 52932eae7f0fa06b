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
  /// Only rows of the sequence's first so many tokens, of which `share` is the share then. 0: of
  /// all tokens. In some texts all later tokens read one of the first, whose code is not enough. On
  /// the Cuda backend, where scores drop rows too, calls block as with a threshold.
  int first_tokens = 0;
  friend bool operator==(const ResidualOutliers&, const ResidualOutliers&) = default;
};

/// @brief Checks the parameters. @throws ValueError
inline void check_residual_outliers(const ResidualOutliers& policy) {
  using detail::fail;
  if (!(policy.share >= 0.0F && policy.share <= 1.0F))
    fail<ValueError>("ResidualOutliers: share is in [0, 1], given ", policy.share);
  if (!(policy.threshold >= 0.0F))
    fail<ValueError>("ResidualOutliers: threshold is at least 0, given ", policy.threshold);
  if (policy.first_tokens < 0)
    fail<ValueError>("ResidualOutliers: first_tokens is at least 0, given ", policy.first_tokens);
}

/// @brief Of `count` rows from position `first` on, so many of the first may stay at full rank.
inline std::int64_t outlier_candidates(const ResidualOutliers& policy, std::int64_t first,
                                       std::int64_t count) {
  return policy.first_tokens == 0
             ? count
             : (std::clamp)(policy.first_tokens - first, std::int64_t{0}, count);
}

/// @brief Rows of [first, first + count) that stay at full rank. The results of adjacent batches
/// add up to the result of their union.
inline std::int64_t outlier_rows(const ResidualOutliers& policy, std::int64_t first,
                                 std::int64_t count) {
  return share_of_rows(policy.share, first, outlier_candidates(policy, first, count));
}

LOWRANKKV_NAMESPACE_END
