// SPDX-License-Identifier: Apache-2.0
/// @file quantizer/fp8_rows.hpp  Fp8Rows: rows in 8-bit floating point, E4M3.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "lowrankkv/config.hpp"
#include "lowrankkv/quantizer/level_layout.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Quantizer policy: OCP E4M3 (the variant FN: no infinity), a sign, 4 bits of exponent of
/// bias 7, 3 of mantissa. Rounds to nearest even, and saturates at +-448.
///
/// Without row_scale numbers are stored as they are, as vLLM does by default (its scale is 1):
/// |x - x^| <= max(|x| / 16, 2^-10) for |x| <= 448. With it a row has a scale s in f16, max |x| /
/// 448 rounded up, and x / s is stored. Bytes of a row: head_dim, and 2 with a scale.
struct Fp8Rows {
  bool row_scale = false;  ///< one scale a row
  friend bool operator==(const Fp8Rows&, const Fp8Rows&) = default;
};

/// @brief The largest number of E4M3.
inline constexpr float kLargestE4M3 = 448.0F;

/// @brief f32 to E4M3, to nearest even; saturates, and keeps NaN.
inline std::uint8_t to_e4m3(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 24 & 0x80U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  std::uint32_t code = 0;
  if (magnitude > 0x7f800000U) {
    code = 0x7fU;
  } else if (magnitude >= std::bit_cast<std::uint32_t>(kLargestE4M3)) {
    code = 0x7eU;
  } else if (magnitude < 0x3c800000U) {
    // Below 2^-6: adding 2^14 leaves steps of 2^-9 in the mantissa, rounded to nearest even.
    code = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 16384.0F) - 0x46800000U;
  } else {
    code = (magnitude - 0x3c000000U + 0x7ffffU + (magnitude >> 20 & 1U)) >> 20;
  }
  return static_cast<std::uint8_t>(sign | code);
}

/// @brief E4M3 to f32; exact.
inline float from_e4m3(std::uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                  : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  if ((code & 0x7f) == 0x7f) magnitude = std::bit_cast<float>(0x7fc00000U);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

/// @brief The layout of rows of `rank` coefficients.
inline LevelLayout fp8_layout(const Fp8Rows& policy, int rank) {
  LevelLayout layout{rank, 8, (std::max)(1, rank), policy.row_scale ? 1 : 0, {}, 0.0F, 2};
  for (int code = 0; code < 256; ++code)
    layout.levels.push_back(from_e4m3(static_cast<std::uint8_t>(code)));
  return layout;
}

LOWRANKKV_NAMESPACE_END
