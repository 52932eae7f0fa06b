// SPDX-License-Identifier: Apache-2.0
/// @file token_policy/sinks.hpp  What the policies with sinks share on every backend: how many rows
/// of a batch are sinks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief The oldest of `count` rows from a position on that stand before position `sinks`.
constexpr std::int64_t sinks_among(int sinks, std::int64_t first_position, std::int64_t count) {
  return (std::clamp)(std::int64_t{sinks} - first_position, std::int64_t{0}, count);
}

/// @brief Raises what is wrong with a number of sinks. @throws CapacityError
inline void check_sinks(int sinks) {
  if (sinks < 0) ::lowrankkv::detail::fail<CapacityError>("sinks: at least 0, given ", sinks);
}

LOWRANKKV_NAMESPACE_END
