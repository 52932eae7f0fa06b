// SPDX-License-Identifier: Apache-2.0
/// @file core/scalar.hpp  Element types of inputs and of stored rows: f32, f16 (IEEE half), bf16.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Element types of tensors and of stored rows.
enum class DType : std::uint8_t { f32, f16, bf16 };

/// @brief IEEE 754 half precision, as bits. The library converts it, but does not compute in it.
struct Half {
  std::uint16_t bits;
};
/// @brief bfloat16, as bits.
struct BFloat16 {
  std::uint16_t bits;
};

/// @brief Size of one element in bytes.
constexpr std::size_t size_of(DType type) { return type == DType::f32 ? 4 : 2; }

/// @brief `f32`, `f16` or `bf16`.
constexpr const char* name_of(DType type) {
  return type == DType::f32 ? "f32" : type == DType::f16 ? "f16" : "bf16";
}

/// @brief The largest finite value that the type holds.
constexpr float max_finite(DType type) {
  return type == DType::f16 ? 65504.0F : type == DType::bf16 ? 3.38953139e38F : 3.40282347e38F;
}

/// @brief Half the distance from 1 to the next value: the relative error of one rounding (unit
/// roundoff).
constexpr float unit_roundoff(DType type) {
  return type == DType::f16 ? 0x1p-11F : type == DType::bf16 ? 0x1p-8F : 0x1p-24F;
}

/// @brief f16 to f32; exact.
inline float to_float(Half value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000U) << 16;
  const std::uint32_t magnitude = value.bits & 0x7fffU;
  // Multiplying by 2^112 moves the exponent bias from 15 to 127, and normalises subnormals.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112F;
  const std::uint32_t special =
      magnitude >= 0x7c00U ? 0x7f800000U | (magnitude << 13) : std::bit_cast<std::uint32_t>(scaled);
  return std::bit_cast<float>(sign | special);
}

/// @brief bf16 to f32; exact.
inline float to_float(BFloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

/// @brief f32 to f16, to nearest even. Finite values beyond +-65504 saturate, so a finite value
/// never becomes Inf.
inline Half to_half(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  std::uint32_t half = 0;
  if (magnitude > 0x7f800000U) {
    half = 0x7e00U;  // NaN
  } else if (magnitude == 0x7f800000U) {
    half = 0x7c00U;
  } else if (magnitude >= 0x477fe000U) {
    half = 0x7bffU;  // 65504, the largest finite half
  } else if (magnitude < 0x38800000U) {
    // Subnormal half: adding 0.5 aligns the mantissa, so the hardware rounds to nearest even.
    half = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3f000000U;
  } else {
    half = (magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
  }
  return Half{static_cast<std::uint16_t>(sign | half)};
}

/// @brief The smallest f16 that is not below `value`; 65504 if there is none.
inline Half half_not_below(float value) {
  Half half = to_half(value);
  if (to_float(half) < value && half.bits < 0x7bffU) ++half.bits;
  return half;
}

/// @brief f32 to bf16, to nearest even; finite values saturate.
inline BFloat16 to_bfloat16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U)
    return BFloat16{static_cast<std::uint16_t>((bits >> 16) | 0x40U)};
  std::uint32_t rounded = bits + 0x7fffU + ((bits >> 16) & 1U);
  if ((rounded & 0x7f800000U) == 0x7f800000U && (bits & 0x7f800000U) != 0x7f800000U) {
    rounded = (bits & 0x80000000U) | 0x7f7f0000U;
  }
  return BFloat16{static_cast<std::uint16_t>(rounded >> 16)};
}

/// @brief The value after one round trip through `type`.
inline float round_to(DType type, float value) {
  if (type == DType::f16) return to_float(to_half(value));
  if (type == DType::bf16) return to_float(to_bfloat16(value));
  return value;
}

LOWRANKKV_NAMESPACE_END
