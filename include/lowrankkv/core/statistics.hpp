// SPDX-License-Identifier: Apache-2.0
/// @file core/statistics.hpp  Counters of a cache's flushes, epochs and segment merges.
#pragma once

#include <cstdint>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Counters of one layer since construction.
struct CacheStatistics {
  std::int64_t flushes = 0;       ///< batches of rows that left a tail
  std::int64_t publications = 0;  ///< epochs published by sequences
  /// Rows that were not finite, and updates whose basis was not finite and orthonormal.
  std::int64_t rejected_updates = 0;
  std::int64_t merges = 0;             ///< pairs of segments merged, each to its end
  std::int64_t rows_reprojected = 0;   ///< rows (per KV head) rewritten by merges
  std::int64_t bytes_reprojected = 0;  ///< coefficient bytes read and written by merges
};

LOWRANKKV_NAMESPACE_END
