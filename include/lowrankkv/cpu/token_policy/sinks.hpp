// SPDX-License-Identifier: Apache-2.0
/// @file cpu/token_policy/sinks.hpp  What the policies with sinks share: how many rows of a batch are sinks, and their fate.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Rows of the batch at positions below `sinks`.
inline std::int64_t sinks_in(const RowBatch& batch, int sinks) {
  return (std::clamp)(std::int64_t{sinks} - batch.first_position, std::int64_t{0}, batch.num_rows);
}
/// @brief Sinks are pinned, the others get `rest`.
inline void pin_sinks(const RowBatch& batch, int sinks, RowFate rest, std::span<RowFate> fates) {
  const std::ptrdiff_t pinned = static_cast<std::ptrdiff_t>(sinks_in(batch, sinks));
  std::fill(fates.begin(), fates.begin() + pinned, RowFate::pinned);
  std::fill(fates.begin() + pinned, fates.end(), rest);
}
/// @brief Raises CapacityError for a negative number of sinks.
inline void check_sinks(int sinks) {
  if (sinks < 0) ::lowrankkv::detail::fail<CapacityError>("sinks: at least 0, given ", sinks);
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
