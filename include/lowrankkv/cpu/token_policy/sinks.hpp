// SPDX-License-Identifier: Apache-2.0
/// @file cpu/token_policy/sinks.hpp  Assigns the fates of sinks and of the rows behind them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/token_policy/sinks.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Rows of the batch at positions below `sinks`.
inline std::int64_t sinks_in(const RowBatch& batch, int sinks) {
  return sinks_among(sinks, batch.first_position, batch.num_rows);
}
/// @brief Pins the sinks, and gives all other rows the fate `rest`.
inline void pin_sinks(const RowBatch& batch, int sinks, RowFate rest, std::span<RowFate> fates) {
  const std::ptrdiff_t pinned = static_cast<std::ptrdiff_t>(sinks_in(batch, sinks));
  std::fill(fates.begin(), fates.begin() + pinned, RowFate::pinned);
  std::fill(fates.begin() + pinned, fates.end(), rest);
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
