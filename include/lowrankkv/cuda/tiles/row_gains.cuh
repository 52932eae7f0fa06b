// SPDX-License-Identifier: Apache-2.0
/// @file cuda/tiles/row_gains.cuh  Gains of rows in tiles of codes: 8 bits on a logarithmic scale,
/// or f16.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/runtime/device.cuh"
#include "lowrankkv/cuda/tiles/tile_layout.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

namespace detail {

/// Encodes a gain in 8 bits: code 0 is 0, code c is 2^((c - 128) / 16).
__device__ inline int gain_code(float gain) {
  if (!(gain > 0.0F)) return 0;
  if (!(gain < 256.0F)) return 255;
  return min(255, max(1, static_cast<int>(lroundf(16.0F * log2f(gain))) + 128));
}
__device__ inline float gain_of(int code) {
  return code == 0 ? 0.0F : exp2f((static_cast<float>(code) - 128.0F) * 0.0625F);
}
/// Loads the gain of a row from a tile of codes.
__device__ inline float stored_gain(const std::uint8_t* tile, const HeadTiles& layout, Part part,
                                    int row, int group = 0) {
  const std::uint8_t* place = tile + layout.gain_place(part, row, group);
  return layout.gains == ScaleKind::norm_log8
             ? gain_of(*place)
             : __half2float(*reinterpret_cast<const __half*>(place));
}

}  // namespace detail

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
