// SPDX-License-Identifier: Apache-2.0
/// @file token_policy/sinks.hpp  Counting sinks, shared by the policies with sinks on every
/// backend.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Number of the `count` rows from `first_position` on that lie before position `sinks`.
constexpr std::int64_t sinks_among(int sinks, std::int64_t first_position, std::int64_t count) {
  return (std::clamp)(std::int64_t{sinks} - first_position, std::int64_t{0}, count);
}

/// @brief Checks a number of sinks. @throws CapacityError if it is negative
inline void check_sinks(int sinks) {
  if (sinks < 0) ::lowrankkv::detail::fail<CapacityError>("sinks: at least 0, given ", sinks);
}

LOWRANKKV_NAMESPACE_END
