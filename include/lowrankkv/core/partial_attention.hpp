// SPDX-License-Identifier: Apache-2.0
/// @file core/partial_attention.hpp  Arguments of attention over a part of a sequence.
#pragma once

#include <cstdint>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Which tokens the queries of a partial attention belong to.
///
/// `own`: the last tokens of the tail, causal among each other. `elsewhere`: tokens behind
/// everything that is stored here.
enum class QueryTokens : std::uint8_t { own, elsewhere };

/// @brief Unnormalised attention states of queries (cuda/attention/merge_states.cuh), f32, in the
/// backend's memory.
struct StateView {
  float* values = nullptr;   ///< A: [tokens, heads, head_dim]
  float* maximum = nullptr;  ///< M: [tokens, heads], natural-log units
  float* sum = nullptr;      ///< L: [tokens, heads]
  std::int64_t num_tokens = 0;
  int num_heads = 0, head_dim = 0;
};

LOWRANKKV_NAMESPACE_END
