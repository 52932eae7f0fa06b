// SPDX-License-Identifier: Apache-2.0
/// @file cuda/scores/rotate_rows.cuh  Rotates the pre-RoPE keys of a packed prompt into a copy,
/// which its rows are scored with.
///
/// k' = R(p) k for the pair (x, y) of every frequency: x cos - y sin, y cos + x sin. Computed in
/// f32 and rounded to full_type, as keys of a cache of post-RoPE keys are. p is the position of the
/// row's token, position shifts included. Floor: the keys read and written once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lowrankkv/cuda/runtime/launch.cuh"
#include "lowrankkv/cuda/state/row_source.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Bytes of the rotated keys of a prompt with `tiles` tiles per head.
inline std::size_t rotated_bytes(const LayerView& tables, std::int32_t tiles) {
  return static_cast<std::size_t>(tables.num_heads) * static_cast<std::size_t>(tiles) *
         static_cast<std::size_t>(tables.full.value_offset);
}

/// @brief Writes the rotated keys of a packed prompt as tiles of keys alone, [heads, tiles]. Row i
/// belongs to token first_token + i of its sequence. Rows behind the last one of a packed prompt
/// are zeros and stay zeros. Grid: 64-row pieces x heads.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    rotate_rows_kernel(LayerView tables, RowSource source, int slot, int first_token,
                       std::uint8_t* target) {
  const HeadTiles& layout = tables.full;
  const Rotary& rotary = tables.rotary;
  const int head = static_cast<int>(blockIdx.y), dim = tables.head_dim,
            first = static_cast<int>(blockIdx.x) * kStoreRows,
            rows = min(kStoreRows, source.tiles * layout.rows - first);
  const std::size_t first_tile =
      static_cast<std::size_t>(head) * static_cast<std::size_t>(source.tiles);
  for (int item = static_cast<int>(threadIdx.x); item < rows * (dim / 4); item += kStoreThreads) {
    const int row = first + item / (dim / 4), two = item % (dim / 4), tile = row / layout.rows;
    const int position = rotary.position(slot, first_token + row);
    // Two pairs are two words of neighbouring channels. One word holds the pairs' first channels
    // and one their second channels; with interleaved pairs each word is one pair.
    const bool neighbours = rotary.interleaved && 2 * two < rotary.pairs;
    const int channels[2] = {rotary.channel(2 * two, dim),
                             rotary.channel(neighbours ? 2 * two + 1 : 2 * two + dim / 2, dim)};
    float x[2], y[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint8_t* tile_of_row =
          source.packed +
          (first_tile + static_cast<std::size_t>(tile)) * static_cast<std::size_t>(layout.bytes);
      const std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(
          tile_of_row + layout.plain_byte(Part::key, row % layout.rows, channels[i]));
      const float low = from_bits(tables.full_type, static_cast<std::uint16_t>(word)),
                  high = from_bits(tables.full_type, static_cast<std::uint16_t>(word >> 16));
      (neighbours ? x[i] : i == 0 ? x[0] : y[0]) = low;
      (neighbours ? y[i] : i == 0 ? x[1] : y[1]) = high;
    }
    const float4 phases = rotary.phases(position, two, dim);
    const auto rotate = [](float cosine, float sine, float& u, float& v) {
      const float before = u;
      u = u * cosine - v * sine;
      v = v * cosine + before * sine;
    };
    rotate(phases.x, phases.y, x[0], y[0]);
    rotate(phases.z, phases.w, x[1], y[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float low = neighbours ? x[i]
                        : i == 0   ? x[0]
                                   : y[0],
                  high = neighbours ? y[i]
                         : i == 0   ? x[1]
                                    : y[1];
      *reinterpret_cast<std::uint32_t*>(
          target +
          (first_tile + static_cast<std::size_t>(tile)) *
              static_cast<std::size_t>(layout.value_offset) +
          layout.plain_byte(Part::key, row % layout.rows, channels[i])) =
          static_cast<std::uint32_t>(to_bits(tables.full_type, low)) |
          static_cast<std::uint32_t>(to_bits(tables.full_type, high)) << 16;
    }
  }
}

/// @brief Enqueues the rotation of the keys of a packed prompt whose row 0 belongs to token
/// first_token of its sequence.
/// @param target  memory of rotated_bytes()
/// @return the rotated keys, as a source with keys only
template <class = void>
RowSource enqueue_rotation(const LayerView& tables, const RowSource& source, int slot,
                           std::int32_t first_token, std::uint8_t* target, cudaStream_t stream) {
  const dim3 grid(
      static_cast<unsigned>((source.tiles * tables.full.rows + kStoreRows - 1) / kStoreRows),
      static_cast<unsigned>(tables.num_heads));
  detail::launch_kernel(rotate_rows_kernel<>, grid, kStoreThreads, 0, "rotate_rows_kernel", stream,
                        tables, source, slot, first_token, target);
  return {target, source.tiles, source.first, tables.full.value_offset};
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
