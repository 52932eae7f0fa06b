// SPDX-License-Identifier: Apache-2.0
/// @file quantizer/int8.hpp  Int8: coefficients in 8 bits, one f16 scale a token for keys and one for values.
#pragma once

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Quantizer policy (SubSpace section 3.6): 8-bit codes of every coefficient of a row, its largest magnitude the scale.
/// |c - c^| <= max |c| / 256 (up to the rounding of the scale). Bytes of a row: r + 2.
struct Int8 {
  friend bool operator==(const Int8&, const Int8&) = default;
};

LOWRANKKV_NAMESPACE_END
