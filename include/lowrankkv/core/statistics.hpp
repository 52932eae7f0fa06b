// SPDX-License-Identifier: Apache-2.0
/// @file core/statistics.hpp  What a cache has done besides storing rows: the traffic of its
/// epochs.
#pragma once

#include <cstdint>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Counters of one layer since it was made.
struct CacheStatistics {
  std::int64_t flushes = 0;            ///< batches of rows that left a tail
  std::int64_t publications = 0;       ///< epochs published by sequences
  std::int64_t rejected_updates = 0;   ///< rows that were not finite, and bases that an updater
                                       ///< returned and that were not finite and orthonormal
  std::int64_t merges = 0;             ///< pairs of segments merged
  std::int64_t rows_reprojected = 0;   ///< rows (per KV head) rewritten by merges
  std::int64_t bytes_reprojected = 0;  ///< coefficient bytes read and written by merges
};

LOWRANKKV_NAMESPACE_END
