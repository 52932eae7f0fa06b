// SPDX-License-Identifier: Apache-2.0
/// @file cpu/quantizer/fp8_rows.hpp  Fp8Rows on the CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "lowrankkv/concepts/quantizer.hpp"
#include "lowrankkv/cpu/quantizer/level_codes.hpp"
#include "lowrankkv/quantizer/fp8_rows.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<Fp8Rows, Cpu> : cpu::LevelCodec<Impl<Fp8Rows, Cpu>> {
  static LevelLayout layout(const Fp8Rows& policy, int rank, std::span<const std::uint8_t>) {
    return fp8_layout(policy, rank);
  }
  static void quantise(const LevelLayout& layout, const float* x, int n, Half* numbers,
                       std::uint8_t* codes) {
    float inverse = 1.0F;
    if (layout.scales > 0) {
      float largest = 0.0F;
      for (int i = 0; i < n; ++i) largest = (std::max)(largest, std::abs(x[i]));
      numbers[0] = half_not_below(largest / kLargestE4M3);
      const float scale = to_float(numbers[0]);
      inverse = scale > 0.0F ? 1.0F / scale : 0.0F;
    }
    for (int i = 0; i < n; ++i) codes[i] = to_e4m3(x[i] * inverse);
  }
};

static_assert(QuantizerFor<Fp8Rows, Cpu>);

LOWRANKKV_NAMESPACE_END
