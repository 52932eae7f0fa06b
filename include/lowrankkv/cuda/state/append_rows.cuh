// SPDX-License-Identifier: Apache-2.0
/// @file cuda/state/append_rows.cuh  Kernels that append decoded tokens to the tails, and update
/// lengths after a flush.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/state/layer_view.cuh"
#include "lowrankkv/cuda/state/row_order.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Updates lengths after rows were stored. Lists grow, except those that are counted
/// already. Tails shrink if the rows came from them. Grid: sequences.
/// @param from_tail  whether the rows came from the tails
/// @param adds_full, adds_compressed  whether the list is still to be counted
/// @param counts  [2, sequences, heads], full rows, then compressed rows, if the host does not know
/// the numbers of every head; else null
template <class = void>
__global__ void note_stored_kernel(LayerEdit tables, FlushBatch flushed, bool from_tail,
                                   bool adds_full, bool adds_compressed,
                                   const std::int32_t* counts) {
  const int i = static_cast<int>(blockIdx.x), slot = flushed.slots[i], moved = flushed.rows[i];
  if (threadIdx.x == 0) {
    DeviceLengths& lengths = tables.lengths[slot];
    lengths.tail_position = flushed.position[i] + moved;
    if (from_tail) {
      lengths.tail_first = (lengths.tail_first + moved) % tables.ring_rows();
      lengths.tail_length -= moved;
    }
  }
  for (int head = static_cast<int>(threadIdx.x); head < tables.num_heads;
       head += static_cast<int>(blockDim.x)) {
    HeadRows& rows = tables.rows[tables.index(slot, head)];
    const auto added = [&](RowList list, std::int32_t stored) {
      return counts == nullptr
                 ? flushed.added(list, tables.scored, i, stored)
                 : counts[((list == RowList::full ? 0 : flushed.count) + i) * tables.num_heads +
                          head];
    };
    if (adds_full) rows.num_full += added(RowList::full, rows.num_full);
    if (adds_compressed) rows.num_compressed += added(RowList::compressed, rows.num_compressed);
  }
}

/// @brief Appends `m` tokens to the tail of each sequence. Rows [first + i m, first + (i + 1) m) of
/// the views belong to sequence i of the batch. If any element of a token is not finite, or beyond
/// `limit`, the token is stored as zeros and counted in tables.faults. Grid: sequences.
template <class Rows>
__global__ void append_kernel(LayerEdit tables, Batch batch, Rows key, Rows value,
                              std::int64_t first, int m, float limit) {
  const int slot = batch.slot(blockIdx.x);
  if (slot < 0) return;
  const DeviceLengths lengths = tables.lengths[slot];
  const int dim = tables.head_dim;
  for (int j = 0; j < m; ++j) {
    const std::int64_t token = first + static_cast<std::int64_t>(blockIdx.x) * m + j;
    const int place = (lengths.tail_first + lengths.tail_length + j) % tables.ring_rows();
    const std::int64_t key_row = key.place(token), value_row = value.place(token);
    const auto key_at = [&](int head, int channel) {
      return key.element(key_row + head * key.head_stride + channel * key.element_stride);
    };
    const auto value_at = [&](int head, int channel) {
      return value.element(value_row + head * value.head_stride + channel * value.element_stride);
    };
    bool bad = false;
    for (int i = static_cast<int>(threadIdx.x); i < tables.num_heads * dim;
         i += static_cast<int>(blockDim.x)) {
      bad = bad || !(fabsf(key_at(i / dim, i % dim)) <= limit) ||
            !(fabsf(value_at(i / dim, i % dim)) <= limit);
    }
    bad = __syncthreads_or(bad) != 0;
    if (bad && threadIdx.x == 0) atomicAdd(tables.faults, 1U);
    for (int i = static_cast<int>(threadIdx.x); i < tables.num_heads * dim;
         i += static_cast<int>(blockDim.x)) {
      const int head = i / dim, channel = i % dim;
      std::uint8_t* tile = tables.tail_tile(slot, head, place);
      const std::uint16_t k =
          bad ? std::uint16_t{0} : to_bits(tables.full_type, key_at(head, channel));
      const std::uint16_t v =
          bad ? std::uint16_t{0} : to_bits(tables.full_type, value_at(head, channel));
      *reinterpret_cast<std::uint16_t*>(
          tile + tables.full.plain_byte(Part::key, place % tables.full.rows, channel)) = k;
      *reinterpret_cast<std::uint16_t*>(
          tile + tables.full.plain_byte(Part::value, place % tables.full.rows, channel)) = v;
    }
    if (tables.tail_scores == nullptr) continue;
    for (int head = static_cast<int>(threadIdx.x); head < tables.num_heads;
         head += static_cast<int>(blockDim.x))
      tables.tail_row_scores(slot, head)[place] = 0.0F;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    tables.lengths[slot].tail_length = lengths.tail_length + m;
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
