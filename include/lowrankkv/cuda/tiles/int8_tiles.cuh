// SPDX-License-Identifier: Apache-2.0
/// @file cuda/tiles/int8_tiles.cuh  Full rows in 8 bits (CacheConfig::full_row_bits): encoding and
/// decoding of scaled plain tiles. Results equal those of FullRows on the CPU.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/runtime/device.cuh"
#include "lowrankkv/cuda/runtime/forms.cuh"
#include "lowrankkv/cuda/tiles/tile_layout.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr float kScaledHalf = 128.0F;    ///< the largest number of a row, in steps
inline constexpr float kScaledCentre = 127.5F;  ///< the code that would stand for 0
/// @brief Lower bound of value steps where weights are multiplied by them: the least f16, so that
/// the step of a row of zeros has a logarithm.
inline constexpr float kLeastStep = 0x1p-24F;

namespace detail {

/// Converts the codes in bytes `first` and first + 1 of a word to two 16-bit numbers in units of
/// the step. Exact.
template <DType type>
__device__ __forceinline__ std::uint32_t scaled_pair(std::uint32_t word, std::uint32_t first) {
  if constexpr (type == DType::f16) {
    const std::uint32_t raised =
        __byte_perm(word, 0x64646464U, 0x4140U + 0x0101U * first);  // 1024 + code
    const __half2 steps =
        __hsub2(__hsub2(*reinterpret_cast<const __half2*>(&raised), __float2half2_rn(1024.0F)),
                __float2half2_rn(kScaledCentre));
    return *reinterpret_cast<const std::uint32_t*>(&steps);
  } else {  // 32768 + code
    const auto number = [&](std::uint32_t byte) {
      return __int_as_float(
                 static_cast<int>(__byte_perm(word, 0x47000000U, 0x7504U + 0x10U * byte))) -
             (32768.0F + kScaledCentre);
    };
    const __nv_bfloat162 steps = __floats2bfloat162_rn(number(first), number(first + 1));
    return *reinterpret_cast<const std::uint32_t*>(&steps);
  }
}
/// Converts a lane's eight codes of a unit to its part of a 16-bit A operand, in units of the step.
template <DType type>
__device__ __forceinline__ uint4 scaled_words(const uint2& codes) {
  return {scaled_pair<type>(codes.x, 0), scaled_pair<type>(codes.x, 2),
          scaled_pair<type>(codes.y, 0), scaled_pair<type>(codes.y, 2)};
}

/// Loads the step of a row of a scaled tile.
__device__ inline float step_of(const HeadTiles& layout, const std::uint8_t* tile, Part part,
                                int row) {
  return __half2float(*reinterpret_cast<const __half*>(tile + layout.step_byte(part, row)));
}
/// Decodes an element of a scaled tile.
__device__ inline float scaled_element(const HeadTiles& layout, const std::uint8_t* tile, Part part,
                                       int row, int channel) {
  return (static_cast<float>(tile[layout.plain_byte(part, row, channel)]) - kScaledCentre) *
         step_of(layout, tile, part, row);
}

/// The step of a row of numbers number(0) to number(channels - 1): its largest magnitude over 128,
/// rounded up to f16, so that nothing is clipped. All lanes of a warp call it.
template <class Number>
__device__ __half row_step(int channels, Number&& number) {
  float largest = 0.0F;
  for (int channel = static_cast<int>(threadIdx.x) % 32; channel < channels; channel += 32)
    largest = fmaxf(largest, fabsf(number(channel)));
  for (int distance = 16; distance > 0; distance /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, distance));
  return __float2half_ru(fminf(largest / kScaledHalf, 65504.0F));
}
/// The reciprocal of a step; 0 for rows of zeros.
__device__ inline float inverse_of(__half step) {
  return __half2float(step) > 0.0F ? 1.0F / __half2float(step) : 0.0F;
}
/// The code of a number.
__device__ __forceinline__ std::uint32_t scaled_code(float number, float inverse_step) {
  return static_cast<std::uint32_t>(
      fminf(fmaxf(0.0F, floorf(number * inverse_step) + kScaledHalf), 2.0F * kScaledHalf - 1.0F));
}

/// Encodes rows [begin, end) of a part, the last rows of their list, into scaled tiles. Rows past
/// the end, up to the end of the tile, get step 0. All threads of a block call it; it synchronises.
/// @param tiles  tiles of the rows, from row 0 on
/// @param rows  [., stride], 16-bit numbers of `type`
/// @param inverse_steps  shared memory of kStoreRows numbers of `type`
/// @param inverse_steps  shared memory of kStoreRows numbers
__device__ inline void store_scaled(const HeadTiles& layout, std::uint8_t* const* tiles, Part part,
                                    const std::uint16_t* rows, int stride, DType type,
                                    float* inverse_steps, int begin, int end) {
  const int channels = layout.channels(part), units = channels / kPlainUnit,
            lane = static_cast<int>(threadIdx.x) % 32;
  const int padded_end = (end + layout.rows - 1) / layout.rows * layout.rows;
  for (int row = begin + static_cast<int>(threadIdx.x) / 32; row < padded_end;
       row += kStoreThreads / 32) {
    const __half step = row_step(row < end ? channels : 0, [&](int channel) {
      return from_bits(type, rows[row * stride + channel]);
    });
    if (lane != 0) continue;
    *reinterpret_cast<__half*>(tiles[row / layout.rows] +
                               layout.step_byte(part, row % layout.rows)) = step;
    inverse_steps[row] = inverse_of(step);
  }
  __syncthreads();
  // Each lane writes eight bytes of every sixteen rows of a unit. Bytes of rows before `begin`
  // stay.
  for (int item = begin / kPlainRows * units + static_cast<int>(threadIdx.x) / 32;
       item < padded_end / kPlainRows * units; item += kStoreThreads / 32) {
    const int unit = item % units, first_row = item / units * kPlainRows;
    std::uint8_t* target =
        tiles[first_row / layout.rows] + layout.offset(part) +
        ((first_row % layout.rows / kPlainRows * units + unit) * kPlainUnitBytes + 16 * lane) / 2;
    uint2 words = first_row < begin ? *reinterpret_cast<const uint2*>(target) : uint2{0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // A is [m, k]: m = lane / 4 (+ 8), k = 2 (lane % 4) (+ 1, + 8).
      const int m = lane / 4 + 8 * (i / 2 % 2), k = 2 * (lane % 4) + i % 2 + 8 * (i / 4),
                row = first_row + (part == Part::key ? m : k),
                channel = unit * kPlainUnit + (part == Part::key ? k : m);
      if (row < begin) continue;
      const std::uint32_t code =
          row < end ? scaled_code(from_bits(type, rows[row * stride + channel]), inverse_steps[row])
                    : 0U;
      std::uint32_t& word = i < 4 ? words.x : words.y;
      word = (word & ~(0xffU << (8 * (i % 4)))) | code << (8 * (i % 4));
    }
    *reinterpret_cast<uint2*>(target) = words;
  }
  __syncthreads();
}

}  // namespace detail
}  // namespace cuda
LOWRANKKV_NAMESPACE_END
