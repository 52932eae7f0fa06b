// SPDX-License-Identifier: Apache-2.0
/// @file cuda/store/compaction/place_rows.cuh  Compressed rows move from staging tiles to the
/// places of evicted rows.
///
/// Codes of several rows share a 32-bit word of their tile, and different blocks may move rows of
/// one word. So each block changes only its own bits, by an atomic exclusive or with the
/// difference.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/layer/layer_state.cuh"
#include "lowrankkv/cuda/state/row_order.cuh"
#include "lowrankkv/cuda/tiles/joint_layout.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

namespace detail {

/// Copies the code at `from` of one tile over the code at `to` of another tile. Both codes are
/// `bits` wide.
__device__ inline void move_code(const std::uint8_t* source, const CodePlace& from,
                                 std::uint8_t* target, const CodePlace& to, int bits) {
  const std::uint32_t mask = (1U << bits) - 1U;
  std::uint32_t* word = reinterpret_cast<std::uint32_t*>(target + to.word);
  const std::uint32_t wanted =
                          *reinterpret_cast<const std::uint32_t*>(source + from.word) >> from.shift,
                      there = *word >> to.shift;  // no other thread changes these bits
  atomicXor(word, ((wanted ^ there) & mask) << to.shift);
}

/// Moves a row of codes of one list, and its gains; each lane has one channel of every unit. A warp
/// calls it.
__device__ inline void move_coded_row(const HeadTiles& layout, const std::uint8_t* source, int from,
                                      std::uint8_t* target, int to) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto move_unit = [&](Part part, int bits, int offset) {
    const CodePlace before = part == Part::key ? key_place(bits, from, lane)
                                               : value_place(bits, from, lane),
                    after =
                        part == Part::key ? key_place(bits, to, lane) : value_place(bits, to, lane);
    move_code(source + offset, before, target + offset, after, bits);
  };
  for (const Part part : {Part::key, Part::value}) {
    if (part == Part::key ? !layout.keys : !layout.values) continue;
    if (lane < layout.scale_groups * layout.gain_bytes()) {
      const int group = lane / layout.gain_bytes(), byte = lane % layout.gain_bytes();
      target[layout.gain_place(part, to, group) + byte] =
          source[layout.gain_place(part, from, group) + byte];
    }
    int offset = layout.offset(part);
    if (!layout.keys) {  // joint values: each block of channels has a unit in several planes
      const int blocks =
          joint_blocks(layout, 0) + (layout.scale_groups == 2 ? joint_blocks(layout, 1) : 0);
      for (int index = 0; index < blocks; ++index) {
        const JointBlock block = joint_block(layout, index);
        for (int plane = 0, bits = 8; plane < 4; ++plane, bits /= 2) {
          if ((block.bits & bits) != 0) move_unit(part, bits, block.at[plane]);
        }
      }
      continue;
    }
    for (int unit = 0; unit < layout.units(part); ++unit) {
      const int bits = layout.width(part, unit);
      move_unit(part, bits, offset);
      offset += code_unit_bytes(bits);
    }
  }
}

/// Moves a row of a plain tile; each lane has some of its channels. A warp calls it.
__device__ inline void move_plain_row(const HeadTiles& layout, const std::uint8_t* source, int from,
                                      std::uint8_t* target, int to) {
  for (const Part part : {Part::key, Part::value}) {
    if (part == Part::key ? !layout.keys : !layout.values) continue;
    if (layout.scaled) {
      for (int channel = static_cast<int>(threadIdx.x) % 32; channel < layout.channels(part);
           channel += 32)
        target[layout.plain_byte(part, to, channel)] =
            source[layout.plain_byte(part, from, channel)];
      if (threadIdx.x % 32 == 0)
        *reinterpret_cast<std::uint16_t*>(target + layout.step_byte(part, to)) =
            *reinterpret_cast<const std::uint16_t*>(source + layout.step_byte(part, from));
      continue;
    }
    for (int channel = static_cast<int>(threadIdx.x) % 32; channel < layout.channels(part);
         channel += 32) {
      *reinterpret_cast<std::uint16_t*>(target + layout.plain_byte(part, to, channel)) =
          *reinterpret_cast<const std::uint16_t*>(source + layout.plain_byte(part, from, channel));
    }
  }
}

/// Moves row `from` of a tile to row `to` of another. A warp calls it.
__device__ inline void move_row(const HeadTiles& layout, const std::uint8_t* source, int from,
                                std::uint8_t* target, int to) {
  if (layout.codes)
    move_coded_row(layout, source, from, target, to);
  else
    move_plain_row(layout, source, from, target, to);
}

}  // namespace detail

/// @brief Moves rows from staging tiles to the places that evicted rows freed, a warp a row. Grid:
/// pieces of as many rows as a block has warps x compressed lists x sequences.
/// @param freed  [sequence of the batch, head, stride]: the places
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    place_rows_kernel(LayerEdit tables, FlushBatch flushed, StagingTiles staging,
                      const std::int32_t* freed, std::int32_t stride) {
  const int list = static_cast<int>(blockIdx.y), sequence = static_cast<int>(blockIdx.z),
            head = list < tables.num_heads ? list : (list - tables.num_heads) * tables.joint_heads;
  const int row = static_cast<int>(blockIdx.x * kStoreThreads + threadIdx.x) / 32;
  if (row >= staging.counts[sequence * tables.num_heads + head]) return;
  const HeadTiles& layout = tables.compressed[list];
  const int place = freed[static_cast<std::size_t>(sequence * tables.num_heads + head) *
                              static_cast<std::size_t>(stride) +
                          static_cast<std::size_t>(row)];
  const std::uint8_t* source =
      staging.of(tables, sequence, list) +
      static_cast<std::size_t>(row / layout.rows) * static_cast<std::size_t>(layout.bytes);
  std::uint8_t* target =
      tables.tile(tables.page_table(RowList::compressed, flushed.slots[sequence], list), layout,
                  place / layout.rows);
  const int from = row % layout.rows, to = place % layout.rows;
  detail::move_row(layout, source, from, target, to);
}

/// @brief Enqueues place_rows_kernel.
/// @param most  rows of a sequence that are moved, at most
template <class = void>
void place_rows(const LayerState& layer, const FlushBatch& flushed, const StagingTiles& staging,
                const RowOrder& freed, std::int64_t most, cudaStream_t stream) {
  constexpr std::int64_t warps = kStoreThreads / 32;
  const dim3 grid(static_cast<unsigned>((most + warps - 1) / warps),
                  static_cast<unsigned>(layer.tiles().compressed.size()),
                  static_cast<unsigned>(flushed.count));
  place_rows_kernel<><<<grid, kStoreThreads, 0, stream>>>(layer.tables(), flushed, staging,
                                                          freed.rows, freed.stride);
  check(cudaGetLastError(), "place_rows_kernel");
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
