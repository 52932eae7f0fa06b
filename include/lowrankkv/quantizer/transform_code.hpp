// SPDX-License-Identifier: Apache-2.0
/// @file quantizer/transform_code.hpp  TransformCode: each channel of the principal-axis basis has
/// its own number of bits.
#pragma once

#include <cstdint>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Step of the uniform mid-rise quantiser with 2^bits levels that minimises the squared
/// error of a unit Gaussian (Max, 1960), bits 1 to 8.
constexpr float gaussian_step(int bits) {
  constexpr float steps[] = {0.0F,    1.5958F, 0.9957F, 0.5860F, 0.3352F,
                             0.1881F, 0.1041F, 0.0569F, 0.0308F};
  return steps[bits];
}

/// @brief Quantizer policy for transform coding: the basis gives bits and rms for every channel
/// (HeadBasis::key_bits, key_rms). budgeted.hpp fills them by reverse water-filling; a channel with
/// 0 bits is not stored.
///
/// A row's codes are relative to one 8-bit logarithmic gain. Its norm is the root of the mean, over
/// the channels with bits, of (coefficient / rms)^2; of kTriedGains gains around it, the one that
/// leaves the least squared error, in steps, is taken. Steps are folded into the maps. Bytes of a
/// row: (sum of bits + 8) / 8.
struct TransformCode {
  /// Steps relative to gaussian_step.
  float step_scale = 1.0F;
  friend bool operator==(const TransformCode&, const TransformCode&) = default;
};

LOWRANKKV_NAMESPACE_END
