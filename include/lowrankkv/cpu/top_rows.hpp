// SPDX-License-Identifier: Apache-2.0
/// @file cpu/top_rows.hpp  Selects rows by score, with one rule for ties.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "lowrankkv/token_policy/share_of_rows.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// A score above all others.
inline constexpr float kAlways = std::numeric_limits<float>::infinity();

/// @brief The indices of the `count` largest scores, ascending. Among equal scores the earlier row
/// wins. Cost: O(n log count).
inline std::vector<std::int64_t> top_rows(std::span<const float> scores, std::int64_t count) {
  const std::int64_t limit = static_cast<std::int64_t>(scores.size());
  std::vector<std::int64_t> order(scores.size());
  std::iota(order.begin(), order.end(), std::int64_t{0});
  const std::int64_t keep = (std::clamp)(count, std::int64_t{0}, limit);
  const auto higher = [&](std::int64_t a, std::int64_t b) {
    const float left = scores[static_cast<std::size_t>(a)];
    const float right = scores[static_cast<std::size_t>(b)];
    return left != right ? left > right : a < b;
  };
  std::partial_sort(order.begin(), order.begin() + keep, order.end(), higher);
  order.resize(static_cast<std::size_t>(keep));
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
