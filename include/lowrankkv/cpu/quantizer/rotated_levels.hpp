// SPDX-License-Identifier: Apache-2.0
/// @file cpu/quantizer/rotated_levels.hpp  RotatedLevels on the CPU.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "lowrankkv/concepts/quantizer.hpp"
#include "lowrankkv/cpu/quantizer/level_codes.hpp"
#include "lowrankkv/quantizer/rotated_levels.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<RotatedLevels, Cpu> : cpu::LevelCodec<Impl<RotatedLevels, Cpu>> {
  static void validate(const RotatedLevels& policy) { check_rotated_levels(policy); }
  static LevelLayout layout(const RotatedLevels& policy, int rank, std::span<const std::uint8_t>) {
    return rotated_layout(policy, rank);
  }
  static ChannelFold fold(const RotatedLevels& policy, const LevelLayout& layout,
                          std::span<const float>) {
    return {random_rotation(policy.seed, layout.rank), {}};
  }
  static void quantise(const LevelLayout& layout, const float* x, int n, Half* numbers,
                       std::uint8_t* codes) {
    double energy = 0.0;
    for (int i = 0; i < n; ++i) energy += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    numbers[0] = to_half(static_cast<float>(std::sqrt(energy)));
    const float norm = to_float(numbers[0]);
    const float inverse = norm > 0.0F ? 1.0F / norm : 0.0F;
    const std::size_t last = layout.levels.size() - 1;
    for (int i = 0; i < n; ++i) {
      const float y = x[i] * inverse;
      std::size_t code = 0;
      while (code < last && y > 0.5F * (layout.levels[code] + layout.levels[code + 1])) ++code;
      codes[i] = static_cast<std::uint8_t>(code);
    }
  }
};

static_assert(QuantizerFor<RotatedLevels, Cpu>);

LOWRANKKV_NAMESPACE_END
