// SPDX-License-Identifier: Apache-2.0
/// @file concepts/impl.hpp  Shared by the concept headers: whether a policy has an implementation
/// on a backend, and the vocabulary of policy members.
#pragma once

#include <cstdint>

#include "lowrankkv/core/attention_scores.hpp"
#include "lowrankkv/core/descriptors.hpp"
#include "lowrankkv/fwd.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief True when `Impl<Policy, Backend>` is defined. Use it only after including the header of
/// the implementation.
template <class Policy, class Backend>
concept HasImpl = requires {
  sizeof(Impl<Policy, Backend>);
};

/// @brief When a policy sees rows: as a prompt is compressed, or as decoded rows leave the tail.
enum class Phase : std::uint8_t { prefill, decode };

/// @brief The key or the value of a token.
enum class Part : std::uint8_t { key, value };

/// @brief Selects the prompt rows that an updater observes.
struct PromptSelection {
  /// Share of the tokens of the prompt (or chunk): the tokens with the highest scores. 1: every
  /// row.
  float share = 1.0F;
  AttentionScores scores;                  ///< ignored when all rows are wanted
  ScoreScope scope = ScoreScope::kv_head;  ///< ignored when all rows are wanted
};

LOWRANKKV_NAMESPACE_END
