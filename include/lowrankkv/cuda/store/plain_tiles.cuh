// SPDX-License-Identifier: Apache-2.0
/// @file cuda/store/plain_tiles.cuh  Rows of 16-bit numbers in shared memory, and plain tiles made
/// from them.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/state/row_source.cuh"
#include "lowrankkv/cuda/tiles/tile_layout.cuh"
#include "lowrankkv/cuda/tiles/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// A lane's 16 bytes of a unit of 16 rows: an A operand of mma.m16n8k16 with rows of keys, or
/// channels of values, as its rows.
/// @param rows  [., stride] from the first of the 16 rows on
__device__ __forceinline__ uint4 plain_words(Part part, const std::uint16_t* rows, int stride,
                                             int unit) {
  const int lane = static_cast<int>(threadIdx.x) % 32, low = lane / 8 % 2,
            high = lane / 16;  // the lane gives the address of a row of 8 x 8 matrix (low, high)
  if (part == Part::key)
    return load_matrices<false>(rows + (8 * low + lane % 8) * stride + unit * kPlainUnit +
                                8 * high);
  return load_matrices<true>(rows + (8 * high + lane % 8) * stride + unit * kPlainUnit + 8 * low);
}

/// The words of 16 rows of which only the first `left` exist: zeros for the others.
__device__ __forceinline__ uint4 first_rows(Part part, const uint4& words, int left) {
  if (left >= kPlainRows) return words;
  std::uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    // A is [m, k]: m = lane / 4 (+ 8), k = 2 (lane % 4) (+ 8), two at a time.
    const int lane = static_cast<int>(threadIdx.x) % 32, m = lane / 4 + 8 * (word % 2),
              k = 2 * (lane % 4) + 8 * (word / 2);
    if (part == Part::key)
      all[word] = m < left ? all[word] : 0U;
    else
      all[word] &= (k < left ? 0xffffU : 0U) | (k + 1 < left ? 0xffff0000U : 0U);
  }
  return {all[0], all[1], all[2], all[3]};
}

/// Writes rows [begin, end) of a part into plain tiles. At a list's end, rows past it become zeros,
/// which add nothing to products.
/// @param tiles   the tiles of the rows, from row 0 on
/// @param rows    [., stride], all channels of the tiles
/// @param at_end  whether `end` is the list's end
__device__ inline void store_plain(const HeadTiles& layout, std::uint8_t* const* tiles, Part part,
                                   const std::uint16_t* rows, int stride, int begin, int end,
                                   bool at_end) {
  const int channels = layout.channels(part), units = channels / kPlainUnit;
  const int padded_end = at_end ? (end + layout.rows - 1) / layout.rows * layout.rows : end;
  // Steps of 16 rows that are all new: lanes write their 16 bytes of every unit.
  const int whole = (begin + kPlainRows - 1) / kPlainRows;  // the first such step
  for (int item = static_cast<int>(threadIdx.x) / 32;
       item < (padded_end / kPlainRows - whole) * units; item += kStoreThreads / 32) {
    const int unit = item % units, row = (whole + item / units) * kPlainRows;
    const uint4 words =
        first_rows(part, plain_words(part, rows + row * stride, stride, unit), end - row);
    *reinterpret_cast<uint4*>(tiles[row / layout.rows] + layout.offset(part) +
                              (row % layout.rows / kPlainRows * units + unit) * kPlainUnitBytes +
                              16 * (threadIdx.x % 32)) = words;
  }
  // The other rows, at the beginning and, inside a list, at the end.
  const int head = min(whole * kPlainRows, padded_end) - begin,
            first_left = max(whole, padded_end / kPlainRows) * kPlainRows;
  for (int item = static_cast<int>(threadIdx.x);
       item < (head + max(0, padded_end - first_left)) * channels; item += kStoreThreads) {
    const int index = item / channels,
              row = index < head ? begin + index : first_left + index - head,
              channel = item % channels;
    *reinterpret_cast<std::uint16_t*>(tiles[row / layout.rows] +
                                      layout.plain_byte(part, row % layout.rows, channel)) =
        row < end ? rows[row * stride + channel] : std::uint16_t{0};
  }
}

/// Copies rows of a source whose steps of 16 rows are those of the tiles. Rows past the end become
/// zeros.
__device__ inline void copy_rows(const HeadTiles& layout, std::uint8_t* const* tiles,
                                 const SourceRows& source, int first, int begin, int end) {
  const int padded_end = (end + layout.rows - 1) / layout.rows * layout.rows;
  for (const Part part : {Part::key, Part::value}) {
    const int units = part == Part::key ? layout.key_units : layout.value_units;
#pragma unroll 4
    for (int item = static_cast<int>(threadIdx.x);
         item < (padded_end - begin) / kPlainRows * units * 32;
         item += kStoreThreads) {  // whole warps take part
      const int lane = item % 32, unit = item / 32 % units,
                row = begin + item / 32 / units * kPlainRows,
                left = end - row;  // rows that exist
      const uint4 words =
          left > 0 ? source.words(part, source.step_of(first + row))[32 * unit] : uint4{0, 0, 0, 0};
      *reinterpret_cast<uint4*>(tiles[row / layout.rows] + layout.offset(part) +
                                (row % layout.rows / kPlainRows * units + unit) * kPlainUnitBytes +
                                16 * lane) = first_rows(part, words, left);
    }
  }
}

}  // namespace detail
}  // namespace cuda
LOWRANKKV_NAMESPACE_END
