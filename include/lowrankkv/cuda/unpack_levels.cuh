// SPDX-License-Identifier: Apache-2.0
/// @file cuda/unpack_levels.cuh  Units of codes as 16-bit numbers about their centre, exactly.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/row_source.cuh"
#include "lowrankkv/cuda/tile_layout.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Two bytes of a word as numbers of 16 bits about `centre`, exactly.
__device__ __forceinline__ __half2 levels_of(std::uint32_t bytes, std::uint32_t selector, float centre) {
  const std::uint32_t words = __byte_perm(bytes, 0x64646464U, selector);  // 1024 + code
  return __hsub2(__hsub2(*reinterpret_cast<const __half2*>(&words), __float2half2_rn(1024.0F)), __float2half2_rn(centre));
}

/// Levels of a unit of codes as maps expect them, gains left out: the plane about its centre, values as often as sums count them. A word holds one byte of codes of
/// four channels, or rows (tile_layout.cuh). keys: target [64 rows, stride], of its first channel; values: [32 channels, stride]. One warp.
template <Part part, int bits>
__device__ void unpack_levels(const std::uint8_t* unit, __half* target, int stride, int lane) {
  constexpr float centre = 0.5F * static_cast<float>((1 << bits) - 1);
  constexpr std::uint32_t mask = 0x01010101U * ((1U << bits) - 1U);
  #pragma unroll 4
  for (int item = lane; item < code_unit_bytes(bits) / 4; item += 32) {
    const std::uint32_t word = reinterpret_cast<const std::uint32_t*>(unit)[item];
    #pragma unroll
    for (int q = 0; q < 8 / bits; ++q) {
      const std::uint32_t codes = word >> (bits * q) & mask;
      if constexpr (part == Part::key) {
        const CodeIndex first = key_code(bits, item, q, 0);  // of four channels
        __half2* own = reinterpret_cast<__half2*>(target + first.row * stride + first.channel);
        own[0] = levels_of(codes, 0x4140, centre);
        own[1] = levels_of(codes, 0x4342, centre);
      } else {
        const CodeIndex first = value_code(bits, item, q, 0);  // of rows r, r + 8, r + 1, r + 9
        const __half2 weight = __float2half2_rn(static_cast<float>(value_weight(bits, first.channel)));
        __half2* own = reinterpret_cast<__half2*>(target + first.channel * stride + first.row);
        own[0] = __hmul2(levels_of(codes, 0x4240, centre), weight);
        own[4] = __hmul2(levels_of(codes, 0x4341, centre), weight);  // eight rows on
      }
    }
  }
}
/// The same of any width.
template <Part part>
__device__ void unpack_levels(const std::uint8_t* unit, int bits, __half* target, int stride, int lane) {
  if (bits == 8) unpack_levels<part, 8>(unit, target, stride, lane);
  else if (bits == 4) unpack_levels<part, 4>(unit, target, stride, lane);
  else if (bits == 2) unpack_levels<part, 2>(unit, target, stride, lane);
  else unpack_levels<part, 1>(unit, target, stride, lane);
}

}  // namespace detail
}  // namespace cuda
LOWRANKKV_NAMESPACE_END
