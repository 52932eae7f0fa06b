// SPDX-License-Identifier: Apache-2.0
/// @file core/attention_scores.hpp  How a prompt's tokens are scored by the attention they get
/// (SnapKV).
#pragma once

#include <cstdint>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief How neighbouring scores are pooled, so that a chosen token brings its neighbours along.
enum class Pooling : std::uint8_t { average, maximum };

/// @brief Whose attention scores a prompt's token.
enum class ScoreScope : std::uint8_t {
  kv_head,  ///< that of a KV head's query heads: a set of rows for each KV head
  layer,    ///< that of all query heads: one set of rows for the layer
};

/// @brief SnapKV scores of a prompt's rows: the attention they get from the prompt's last queries.
struct AttentionScores {
  int window = 0;  ///< queries at the end of the prompt (or chunk) that score it
  int kernel = 1;  ///< width of the pooling window, odd; 1: no pooling
  Pooling pooling = Pooling::average;
  friend bool operator==(const AttentionScores&, const AttentionScores&) = default;
};

LOWRANKKV_NAMESPACE_END
