// SPDX-License-Identifier: Apache-2.0
/// @file quantizer/transform_code.hpp  TransformCode: every channel of the principal-axis basis has
/// bits of its own.
#pragma once

#include <cstdint>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Step of the uniform mid-rise quantiser with 2^bits levels that loses least of a unit
/// Gaussian (Max, 1960), bits 1 to 8.
constexpr float gaussian_step(int bits) {
  constexpr float steps[] = {0.0F,    1.5958F, 0.9957F, 0.5860F, 0.3352F,
                             0.1881F, 0.1041F, 0.0569F, 0.0308F};
  return steps[bits];
}

/// @brief Quantizer policy: transform coding. The basis gives bits and rms for every channel
/// (HeadBasis::key_bits, key_rms: budgeted.hpp fills them by reverse water-filling); 0 bits cut the
/// channel. A row's codes are relative to one 8-bit logarithmic gain, its norm over the calibrated
/// one; steps are folded into the maps. Bytes of a row: (sum of bits + 8) / 8.
struct TransformCode {
  float step_scale =
      1.15F;  ///< steps relative to gaussian_step: real channels have heavier tails than a Gaussian
  friend bool operator==(const TransformCode&, const TransformCode&) = default;
};

LOWRANKKV_NAMESPACE_END
