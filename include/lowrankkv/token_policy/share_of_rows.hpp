// SPDX-License-Identifier: Apache-2.0
/// @file token_policy/share_of_rows.hpp  How many rows of a batch fall to a share.
#pragma once

#include <cmath>
#include <cstdint>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Rows of [first, first + count) that fall to a share, such that neighbouring batches add
/// up to the whole's: floor(share (first + count)) - floor(share first).
inline std::int64_t share_of_rows(float share, std::int64_t first, std::int64_t count) {
  const auto below = [&](std::int64_t rows) {
    return static_cast<std::int64_t>(
        std::floor(static_cast<double>(share) * static_cast<double>(rows)));
  };
  return below(first + count) - below(first);
}

LOWRANKKV_NAMESPACE_END
