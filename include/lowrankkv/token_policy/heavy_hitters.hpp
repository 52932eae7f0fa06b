// SPDX-License-Identifier: Apache-2.0
/// @file token_policy/heavy_hitters.hpp  HeavyHitters (H2O): keeps the tokens with the largest
/// accumulated attention scores.
#pragma once

#include <cstdint>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/token_policy/share_of_rows.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Token policy: besides the recent window, each KV head keeps the tokens with the largest
/// accumulated attention scores.
///
/// Whenever rows leave the tail, the stored and flushed rows with the lowest scores are dropped for
/// good. Scores are causal: a row accumulates attention from the queries seen so far. These are all
/// queries of the prompt, and those decoded queries whose ScoreView from CompressedKVCache::attend
/// was given to accumulate(). Eviction happens every CacheConfig::flush_interval tokens; with
/// flush_interval 1 at every token, as in the paper.
///
/// On its own, the policy compresses the tokens that it keeps. Compose<KeepFull, HeavyHitters> is
/// the paper's H2O.
struct HeavyHitters {
  float keep = 0.25F;  ///< heavy tokens as a share of the tokens seen so far
  int budget = 0;      ///< > 0: fixed number of heavy tokens instead of a share
  int recent = 32;     ///< rows that always stay
  friend bool operator==(const HeavyHitters&, const HeavyHitters&) = default;
};

/// @brief Number of heavy tokens to keep once `tokens` tokens have left the tail. Pinned rows are
/// kept in addition.
inline std::int64_t heavy_rows(const HeavyHitters& policy, std::int64_t tokens) {
  return policy.budget > 0 ? policy.budget : share_of_rows(policy.keep, 0, tokens);
}

/// @brief Checks the parameters. @throws ValueError
inline void check_heavy_hitters(const HeavyHitters& policy) {
  using detail::fail;
  if (!(policy.keep >= 0.0F && policy.keep <= 1.0F))
    fail<ValueError>("HeavyHitters: keep is in [0, 1], given ", policy.keep);
  if (policy.budget < 0)
    fail<ValueError>("HeavyHitters: budget is at least 0, given ", policy.budget);
}

LOWRANKKV_NAMESPACE_END
