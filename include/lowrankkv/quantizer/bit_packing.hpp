// SPDX-License-Identifier: Apache-2.0
/// @file quantizer/bit_packing.hpp  Packing codes of 1 to 8 bits into bytes without gaps: code i
/// takes bits [i b, (i + 1) b), low bits first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Bytes that `count` codes of `bits` bits fill.
constexpr std::size_t packed_bytes(std::int64_t count, int bits) {
  return static_cast<std::size_t>((count * bits + 7) / 8);
}

/// @brief Code `index` of a line.
inline unsigned get_code(const std::byte* line, std::int64_t index, int bits) {
  const std::int64_t bit = index * bits;
  const std::byte* at = line + bit / 8;
  const int shift = static_cast<int>(bit % 8);
  unsigned word = std::to_integer<unsigned>(at[0]);
  if (shift + bits > 8) word |= std::to_integer<unsigned>(at[1]) << 8;
  return word >> shift & ((1U << bits) - 1U);
}

/// @brief Writes code `index` of a line; its neighbours keep their bits.
inline void put_code(std::byte* line, std::int64_t index, int bits, unsigned code) {
  const std::int64_t bit = index * bits;
  std::byte* at = line + bit / 8;
  const int shift = static_cast<int>(bit % 8);
  const unsigned mask = ((1U << bits) - 1U) << shift;
  const unsigned value = code << shift;
  at[0] =
      static_cast<std::byte>((std::to_integer<unsigned>(at[0]) & ~mask) | (value & mask & 0xffU));
  if (shift + bits > 8)
    at[1] = static_cast<std::byte>((std::to_integer<unsigned>(at[1]) & ~(mask >> 8)) |
                                   (value >> 8 & mask >> 8));
}

LOWRANKKV_NAMESPACE_END
