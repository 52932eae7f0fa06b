// SPDX-License-Identifier: Apache-2.0
/// @file token_policy/snapkv.hpp  SnapKV: keeps the prompt tokens that the prompt's last queries
/// attend to.
#pragma once

#include <cstdint>

#include "lowrankkv/core/attention_scores.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/token_policy/share_of_rows.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Token policy: prompt tokens outside the window are kept if their pooled score is among
/// the highest, and dropped otherwise.
///
/// Decoded tokens are kept when a tail is flushed. A later prompt of the same sequence scores the
/// rows that are still in the tail together with its own. Scores are summed over the window's
/// queries and the heads of a group: one decision per KV head. Rows that another policy keeps in
/// any case (sinks) do not count against the kept number.
///
/// On its own, or composed with SinkRecent, the policy compresses the tokens that it keeps.
/// Compose<KeepFull, SnapKV> keeps them at full rank.
struct SnapKV {
  float keep = 0.5F;  ///< share of a prompt's (or chunk's) tokens that is kept besides the window
  int budget = 0;     ///< > 0: fixed number of tokens of a prompt (or chunk) instead of a share
  int window = 32;    ///< w: the last queries, which score; their own tokens always stay
  int kernel = 7;     ///< pooling width, odd
  Pooling pooling = Pooling::average;
  friend bool operator==(const SnapKV&, const SnapKV&) = default;
};

/// @brief Number of rows to keep, of `count` prompt rows that leave the tail.
inline std::int64_t kept_rows(const SnapKV& policy, std::int64_t count) {
  return policy.budget > 0 ? policy.budget : share_of_rows(policy.keep, 0, count);
}

/// @brief Checks the parameters. @throws ValueError
inline void check_snapkv(const SnapKV& policy) {
  using detail::fail;
  if (!(policy.keep >= 0.0F && policy.keep <= 1.0F))
    fail<ValueError>("SnapKV: keep is in [0, 1], given ", policy.keep);
  if (policy.budget < 0) fail<ValueError>("SnapKV: budget is at least 0, given ", policy.budget);
  if (policy.window < 1) fail<ValueError>("SnapKV: window is at least 1, given ", policy.window);
  if (policy.kernel < 1 || policy.kernel % 2 == 0)
    fail<ValueError>("SnapKV: kernel is odd and at least 1, given ", policy.kernel);
}

LOWRANKKV_NAMESPACE_END
