// SPDX-License-Identifier: Apache-2.0
/// @file quantizer/full_rows.hpp  How rows at full rank are stored in pages: in a float type, or in
/// 8-bit codes.
#pragma once

#include "lowrankkv/core/scalar.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Storage of full rows outside the tail: as `type`, or with bits = 8 as codes of all
/// channels with one f16 scale for K and one for V.
///
/// |x - x^| <= max |x| / 256, up to the rounding of the scale; rows with all |x| below 1e-3 have
/// coarser scales. Bytes of a row: 2 d size_of(type), or 2 (d + 2).
struct FullRows {
  DType type = DType::f16;
  int bits = 0;  ///< 8: codes; 0: as `type`

  bool coded() const { return bits == 8; }
  friend bool operator==(const FullRows&, const FullRows&) = default;
};

LOWRANKKV_NAMESPACE_END
