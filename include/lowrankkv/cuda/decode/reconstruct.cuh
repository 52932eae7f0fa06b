// SPDX-License-Identifier: Apache-2.0
/// @file cuda/decode/reconstruct.cuh  Stored rows back as K and V, in the engine's own tensors.
///
/// Rows are read list by list, in the order in which they are stored, and written to the places of
/// their positions: full rows here, compressed rows in cuda/decode/decode_rows.cuh. Floor: the
/// tiles' bytes once, the written rows once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "lowrankkv/cuda/decode/decode_rows.cuh"
#include "lowrankkv/cuda/state/row_source.cuh"
#include "lowrankkv/cuda/tiles/int8_tiles.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Writes K and V (K alone, if there is no target for V) of a range's full rows and of its
/// rows in the tail, as they are stored. Grid: 64-row pieces of the full list, then of the tail, x
/// KV heads x (keys, then values).
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    copy_rows_kernel(LayerView tables, int slot, TokenRange range, int full_pieces,
                     DeviceTarget key, DeviceTarget value) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  __shared__ std::int64_t places[kStoreRows];
  __shared__ const std::uint8_t* tiles[kStoreRows / kPlainRows];
  const int head = static_cast<int>(blockIdx.y), dim = tables.head_dim, units = dim / kPlainUnit,
            thread = static_cast<int>(threadIdx.x);
  const Part part = blockIdx.z == 0 ? Part::key : Part::value;
  DeviceTarget target = key;  // a reference to key or value would put a copy into local memory
  if (part == Part::value) target = value;
  const bool tail = static_cast<int>(blockIdx.x) >= full_pieces;
  const int begin =
      (static_cast<int>(blockIdx.x) + (tail ? -full_pieces : range.first_piece(RowList::full))) *
      kStoreRows;
  const HeadRows lists = tables.rows[tables.index(slot, head)];
  const DeviceLengths lengths = tables.lengths[slot];
  const std::int32_t* table = tables.page_table(RowList::full, slot, head);
  const int num_rows = tail ? lengths.tail_length : lists.num_full,
            used = min(kStoreRows, num_rows - begin);
  if (thread < kStoreRows) {
    const std::int64_t position = thread >= used ? -1
                                  : tail         ? range.first_tail + begin + thread
                                  : range.by_row ? begin + thread
                                                 : detail::position_of(tables, RowList::full, slot,
                                                                       head, lists, begin + thread);
    places[thread] = target.place_of(position - range.first, range.count);
  } else if (!tail && (thread - kStoreRows) * tables.listed.rows < used) {
    tiles[thread - kStoreRows] =
        tables.tile(table, tables.listed, begin / tables.listed.rows + thread - kStoreRows);
  }
  const SourceRows ring(tables, {}, slot, head);
  const detail::RowStage rows(shared_memory, target.dtype, dim);
  __syncthreads();
  if (tail) {
    for (int item = thread; item < used * dim / 2; item += kStoreThreads) {
      const int row = item / (dim / 2), channel = item % (dim / 2) * 2;
      rows.put(row, channel, ring.element(part, begin + row, channel),
               ring.element(part, begin + row, channel + 1));
    }
  } else if (tables.listed.scaled) {
    for (int item = thread; item < used * dim / 2; item += kStoreThreads) {
      const int row = item / (dim / 2), channel = item % (dim / 2) * 2,
                in_tile = row % tables.listed.rows;
      const auto element = [&](int own) {
        return detail::scaled_element(tables.listed, tiles[row / tables.listed.rows], part, in_tile,
                                      own);
      };
      rows.put(row, channel, element(channel), element(channel + 1));
    }
  } else {
#pragma unroll 4
    for (int item = thread; item < (used + kPlainRows - 1) / kPlainRows * units * 32;
         item += kStoreThreads) {
      const int lane = item % 32, unit = item / 32 % units, row = item / 32 / units * kPlainRows;
      const uint4 words = *reinterpret_cast<const uint4*>(
          tiles[row / tables.listed.rows] + tables.listed.offset(part) +
          (row % tables.listed.rows / kPlainRows * units + unit) * kPlainUnitBytes + 16 * lane);
      // Units of keys are rows x channels, units of values channels x rows. Whole warps take part.
      const std::uint32_t all[4] = {part == Part::key ? words.x : transposed(words.x),
                                    part == Part::key ? words.y : transposed(words.z),
                                    part == Part::key ? words.z : transposed(words.y),
                                    part == Part::key ? words.w : transposed(words.w)};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        rows.put_word(row + lane / 4 + 8 * (i % 2),
                      unit * kPlainUnit + 2 * (lane % 4) + 8 * (i / 2), tables.full_type, all[i]);
    }
  }
  __syncthreads();
  detail::RowWriter(rows, target, head, 0, thread, kStoreThreads)
      .template write<kStoreRows>(places);
}

/// @brief Writes zeros, where rows may have been dropped. Grid: tokens of the range, as many a
/// block as it has rows at a time, x KV heads.
template <class = void>
__global__ void zero_rows_kernel(std::int64_t count, int dim, DeviceTarget key,
                                 DeviceTarget value) {
  for (const DeviceTarget* target : {&key, &value}) {
    const int size = target->dtype == DType::f32 ? 4 : 2, per_row = dim * size / 16,
              at_once = static_cast<int>(blockDim.x) / per_row,
              row = static_cast<int>(threadIdx.x) / per_row;
    const int byte = static_cast<int>(threadIdx.x) % per_row * 16;
    const bool wide = target->wide();
    if (row >= at_once) continue;
    for (std::int64_t token = std::int64_t{blockIdx.x} * at_once + row; token < count;
         token += std::int64_t{gridDim.x} * at_once) {
      std::uint8_t* at =
          static_cast<std::uint8_t*>(target->data) +
          (target->place(token) + static_cast<std::int64_t>(blockIdx.y) * target->head_stride) *
              size +
          byte;
      if (wide)
        *reinterpret_cast<uint4*>(at) = uint4{};
      else
        for (int i = 0; i < 8; ++i) reinterpret_cast<std::uint16_t*>(at)[i] = 0;
    }
  }
}

/// @brief Enqueues the stored K and V, or K alone, of a range's full rows and of its rows in the
/// tail.
template <class = void>
void copy_rows(const LayerState& layer, int slot, const TokenRange& range, const DeviceTarget& key,
               const DeviceTarget& value, cudaStream_t stream) {
  const LayerEdit& tables = layer.tables();
  const bool reaches_tail = !range.by_row && range.first + range.count > range.first_tail;
  const int full = range.pieces(RowList::full),
            pieces = full + (reaches_tail
                                 ? (layer.sequence(slot).tail_length + kStoreRows - 1) / kStoreRows
                                 : 0);
  if (pieces == 0) return;
  const dim3 grid(static_cast<unsigned>(pieces), static_cast<unsigned>(tables.num_heads),
                  value.data == nullptr ? 1U : 2U);
  const std::size_t stage =
      kStoreRows * (std::max)(detail::RowStage::bytes(key.dtype, tables.head_dim),
                              detail::RowStage::bytes(value.dtype, tables.head_dim));
  detail::launch_kernel(copy_rows_kernel<>, grid, kStoreThreads, stage, "copy_rows_kernel", stream,
                        tables, slot, range, full, key, value);
}

/// @brief Enqueues the stored K and V of a range of a sequence's tokens.
/// @tparam scale_groups  of tiles of codes; 0: plain tiles
/// @tparam joint  whether values are joint
/// @param drops  some of the tokens may be stored nowhere: their rows become zeros
template <int scale_groups, bool joint>
void reconstruct_rows(const LayerState& layer, int slot, const TokenRange& range, bool drops,
                      const DeviceTarget& key, const DeviceTarget& value, cudaStream_t stream) {
  if (drops) {
    const dim3 grid(
        static_cast<unsigned>((std::min)((range.count + 15) / 16, std::int64_t{1} << 20)),
        static_cast<unsigned>(layer.tables().num_heads));
    zero_rows_kernel<>
        <<<grid, kStoreThreads, 0, stream>>>(range.count, layer.tables().head_dim, key, value);
    check(cudaGetLastError(), "zero_rows_kernel");
  }
  copy_rows(layer, slot, range, key, value, stream);
  decode_rows<scale_groups>(layer, slot, range, key, value, stream);
  if constexpr (joint) decode_rows<scale_groups, true>(layer, slot, range, key, value, stream);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
