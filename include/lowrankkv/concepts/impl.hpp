// SPDX-License-Identifier: Apache-2.0
/// @file concepts/impl.hpp  What the concept headers share: whether a policy has an implementation
/// on a backend at all.
#pragma once

#include <cstdint>

#include "lowrankkv/core/attention_scores.hpp"
#include "lowrankkv/core/descriptors.hpp"
#include "lowrankkv/fwd.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief True when `Impl<Policy, Backend>` is defined. Ask only after the implementation's header
/// was included.
template <class Policy, class Backend>
concept HasImpl = requires {
  sizeof(Impl<Policy, Backend>);
};

/// @brief When rows are seen: while a prompt is compressed, or when decoded rows leave the tail.
enum class Phase : std::uint8_t { prefill, decode };

/// @brief Which of the two things a token stores.
enum class Part : std::uint8_t { key, value };

/// @brief Which prompt rows an updater wants to observe.
struct PromptSelection {
  float share =
      1.0F;  ///< of the prompt's (or chunk's) tokens, those with the highest scores; 1: every row
  AttentionScores scores;  ///< ignored when all rows are wanted
};

LOWRANKKV_NAMESPACE_END
