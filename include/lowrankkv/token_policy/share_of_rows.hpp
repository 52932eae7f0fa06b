// SPDX-License-Identifier: Apache-2.0
/// @file token_policy/share_of_rows.hpp  Number of rows of a batch for a share of all rows.
#pragma once

#include <cmath>
#include <cstdint>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Rows of [first, first + count) for a share: floor(share (first + count)) - floor(share
/// first). The results of adjacent batches add up to the result of their union.
inline std::int64_t share_of_rows(float share, std::int64_t first, std::int64_t count) {
  const auto below = [&](std::int64_t rows) {
    return static_cast<std::int64_t>(
        std::floor(static_cast<double>(share) * static_cast<double>(rows)));
  };
  return below(first + count) - below(first);
}

LOWRANKKV_NAMESPACE_END
