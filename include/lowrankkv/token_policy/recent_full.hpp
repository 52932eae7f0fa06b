// SPDX-License-Identifier: Apache-2.0
/// @file token_policy/recent_full.hpp  RecentFull: the last tokens stay at full rank, all others
/// are compressed (KIVI's residual).
#pragma once

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Token policy: at least the `recent` last tokens at full rank, the others compressed. No
/// sinks.
struct RecentFull {
  int recent = 128;  ///< rows that always stay in the tail; KIVI's residual length R
  friend bool operator==(const RecentFull&, const RecentFull&) = default;
};

LOWRANKKV_NAMESPACE_END
