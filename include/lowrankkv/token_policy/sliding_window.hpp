// SPDX-License-Identifier: Apache-2.0
/// @file token_policy/sliding_window.hpp  SlidingWindow: sinks and a recent window, everything else
/// is dropped (StreamingLLM).
#pragma once

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Token policy: the first `sinks` tokens and the last `recent` tokens (up to recent + T
/// between two calls of maintain()) are kept at full rank. Keys keep the rotation of their own
/// position.
struct SlidingWindow {
  int sinks = 4;
  int recent = 1024;
  friend bool operator==(const SlidingWindow&, const SlidingWindow&) = default;
};

LOWRANKKV_NAMESPACE_END
