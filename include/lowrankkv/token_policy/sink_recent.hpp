// SPDX-License-Identifier: Apache-2.0
/// @file token_policy/sink_recent.hpp  SinkRecent: the first and the last tokens stay at full rank
/// (OjaKV section 5.1).
#pragma once

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Token policy: `sinks` first tokens and at least `recent` last tokens at full rank, the
/// rest compressed.
struct SinkRecent {
  int sinks = 32;   ///< n_start of the paper
  int recent = 32;  ///< n_recent of the paper: rows that always stay in the tail
  friend bool operator==(const SinkRecent&, const SinkRecent&) = default;
};

LOWRANKKV_NAMESPACE_END
