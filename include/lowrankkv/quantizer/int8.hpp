// SPDX-License-Identifier: Apache-2.0
/// @file quantizer/int8.hpp  Int8: coefficients in 8 bits, with one f16 scale per token for keys
/// and one for values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/config.hpp"
#include "lowrankkv/quantizer/code_layout.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Quantizer policy of SubSpace section 3.6: 8-bit codes of all coefficients of a row,
/// scaled by its largest magnitude. |c - c^| <= max |c| / 256, up to the rounding of the scale.
/// Bytes of a row: r + 2.
struct Int8 {
  friend bool operator==(const Int8&, const Int8&) = default;
};

/// @brief The layout of rows of `rank` coefficients.
inline CodeLayout int8_layout(int rank) {
  CodeLayout layout{rank,
                    std::vector<std::uint8_t>(static_cast<std::size_t>(rank), 8),
                    {},
                    ScaleKind::largest_f16,
                    1.0F};
  if (rank > 0) layout.groups.push_back({0, rank});
  return layout;
}

LOWRANKKV_NAMESPACE_END
