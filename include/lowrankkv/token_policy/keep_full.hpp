// SPDX-License-Identifier: Apache-2.0
/// @file token_policy/keep_full.hpp  KeepFull: nothing is compressed (FullKV, the baseline of every
/// table).
#pragma once

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Token policy that keeps every row at full rank, in CacheConfig::full_type. Needs no
/// basis.
struct KeepFull {
  int recent = 32;  ///< rows that stay in the tail, where truncate() is exact
  friend bool operator==(const KeepFull&, const KeepFull&) = default;
};

LOWRANKKV_NAMESPACE_END
