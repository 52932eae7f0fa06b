// SPDX-License-Identifier: Apache-2.0
/// @file token_policy/snapkv.hpp  SnapKV: of a prompt, the tokens that its last queries attend to are kept.
#pragma once

#include "lowrankkv/core/attention_scores.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Token policy: prompt tokens outside the window are kept if their pooled score is among the highest, else dropped.
/// Decoded tokens are kept when a tail is flushed; a later prompt of the same sequence scores the rows that are still in the
/// tail with its own. Scores are summed over the window's queries and the heads of a group: one decision a KV head.
///
/// Alone, or composed with SinkRecent, kept tokens are compressed; Compose<KeepFull, SnapKV> keeps them at full rank.
struct SnapKV {
  float keep = 0.5F;    ///< share of a prompt's (or chunk's) tokens that is kept besides the window
  int budget = 0;       ///< > 0: so many tokens of a prompt (or chunk) instead of a share
  int window = 32;      ///< w: the last queries, which score; their tokens always stay
  int kernel = 7;       ///< pooling width, odd
  Pooling pooling = Pooling::average;
  friend bool operator==(const SnapKV&, const SnapKV&) = default;
};

LOWRANKKV_NAMESPACE_END
