// SPDX-License-Identifier: Apache-2.0
/// @file cpu/quantizer/ggml_blocks.hpp  GgmlBlocks on the CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "lowrankkv/concepts/quantizer.hpp"
#include "lowrankkv/cpu/quantizer/level_codes.hpp"
#include "lowrankkv/quantizer/ggml_blocks.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief GgmlBlocks on the CPU.
template <int bits>
struct Impl<GgmlBlocks<bits>, Cpu> : cpu::LevelCodec<Impl<GgmlBlocks<bits>, Cpu>> {
  static LevelLayout layout(const GgmlBlocks<bits>& policy, int rank,
                            std::span<const std::uint8_t>) {
    return ggml_layout(policy, rank);
  }
  static void quantise(const LevelLayout&, const float* x, int n, Half* numbers,
                       std::uint8_t* codes) {
    float largest = 0.0F;  // with its sign
    for (int i = 0; i < n; ++i) largest = std::abs(x[i]) > std::abs(largest) ? x[i] : largest;
    const float step = bits == 8 ? std::abs(largest) / 127.0F : largest / -8.0F;
    const float inverse = step != 0.0F ? 1.0F / step : 0.0F;
    numbers[0] = to_half(step);
    for (int i = 0; i < n; ++i) {
      const float code = bits == 8 ? std::round(x[i] * inverse) + 128.0F : x[i] * inverse + 8.5F;
      // This order of min and max maps NaN to the lowest level.
      codes[i] = static_cast<std::uint8_t>(
          (std::min)((std::max)(0.0F, code), static_cast<float>((1 << bits) - 1)));
    }
  }
};

static_assert(QuantizerFor<GgmlBlocks<8>, Cpu> && QuantizerFor<GgmlBlocks<4>, Cpu>);

LOWRANKKV_NAMESPACE_END
