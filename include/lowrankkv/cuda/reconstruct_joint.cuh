// SPDX-License-Identifier: Apache-2.0
/// @file cuda/reconstruct_joint.cuh  Joint values back as the values of each head, in the engine's own tensor.
///
/// Sums are f32, of coefficients as attention takes them. Cost: 2 rank x head_dim flops a row and head.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lowrankkv/cuda/joint_tiles.cuh"
#include "lowrankkv/cuda/reconstruct.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Writes V of the compressed rows of a range. Grid: 64-row pieces of a list x KV heads.
/// @tparam scale_groups  of tiles of codes; 0: plain ones, of `type`
template <int scale_groups>
__global__ void __launch_bounds__(kStoreThreads) decode_joint_kernel(Tables tables, int slot, TokenRange range, DType type, DeviceTarget value) {
  constexpr int kRowsOfThread = 4, kMostDims = kMaxHeadDim / 16;  // of sixteen threads along a row
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  __shared__ float coefficients[kStoreRows][kCodeUnit + 1];
  __shared__ std::int64_t places[kStoreRows];
  float* map = reinterpret_cast<float*>(shared_memory);  // [kCodeUnit, head_dim]
  const int head = static_cast<int>(blockIdx.y), group = head / tables.joint_heads, list = tables.num_heads + group, dim = tables.head_dim;
  const int begin = (range.first_piece(RowList::compressed) + static_cast<int>(blockIdx.x)) * kStoreRows;
  const int thread = static_cast<int>(threadIdx.x), along = thread % 16, first_row = thread / 16 * kRowsOfThread;
  const HeadRows lists = tables.rows[tables.index(slot, head)];
  const HeadTiles& layout = tables.compressed[list];
  const PartMaps& maps = tables.maps[head].value;
  const std::int32_t* table = tables.page_table(RowList::compressed, slot, list);
  if (thread < kStoreRows) {
    const int row = begin + thread;
    const std::int64_t token = row < lists.num_compressed ? (range.by_row ? row : detail::position_of(tables, RowList::compressed, slot, head, lists, row)) - range.first : -1;
    places[thread] = value.place_of(token, range.count);
  }
  __syncthreads();
  const int first_blocks = scale_groups > 0 ? joint_blocks(layout, 0) : 0;
  float sums[kRowsOfThread][kMostDims] = {};
  for (int base = 0; base < maps.width; base += kCodeUnit) {
    const JointBlock block = scale_groups > 0 ? joint_block(layout, base / kCodeUnit) : JointBlock{};
    __syncthreads();
    for (int item = thread; item < kStoreRows * kCodeUnit; item += kStoreThreads) {
      const int row = item / kCodeUnit, channel = item % kCodeUnit, in_list = begin + row;
      float coefficient = 0.0F;
      if (in_list < lists.num_compressed && base + channel < maps.width) {
        const std::uint8_t* tile = tables.tile(table, layout, in_list / layout.rows);
        if constexpr (scale_groups > 0) {
          const float level = static_cast<float>(joint_code(tile, block, row, channel)) - 0.5F * static_cast<float>((1 << block.bits) - 1);
          coefficient = level * detail::stored_gain(tile, layout, Part::value, row, base / kCodeUnit < first_blocks ? 0 : 1);
        } else {
          coefficient = from_bits(type, *reinterpret_cast<const std::uint16_t*>(tile + layout.plain_byte(Part::value, in_list % layout.rows, base + channel)));
        }
      }
      coefficients[row][channel] = coefficient;
    }
    for (int item = thread; item < kCodeUnit * dim; item += kStoreThreads) map[item] = base + item / dim < maps.width ? maps.reader.element(base + item / dim, item % dim, dim) : 0.0F;
    __syncthreads();
    for (int channel = 0; channel < kCodeUnit; ++channel) {
      float own[kRowsOfThread];
      #pragma unroll
      for (int row = 0; row < kRowsOfThread; ++row) own[row] = coefficients[first_row + row][channel];
      #pragma unroll
      for (int i = 0; i < kMostDims; ++i) {
        if (along + 16 * i >= dim) break;
        const float number = map[channel * dim + along + 16 * i];
        #pragma unroll
        for (int row = 0; row < kRowsOfThread; ++row) sums[row][i] = fmaf(own[row], number, sums[row][i]);
      }
    }
  }
  #pragma unroll
  for (int row = 0; row < kRowsOfThread; ++row) {
    if (places[first_row + row] == kNowhere) continue;
    const std::int64_t at = places[first_row + row] + head * value.head_stride;
    #pragma unroll
    for (int i = 0; i < kMostDims; ++i) {
      const int channel = along + 16 * i;
      if (channel >= dim) break;
      const float number = sums[row][i] + (maps.mean == nullptr ? 0.0F : maps.mean[channel]);
      if (value.dtype == DType::f32) static_cast<float*>(value.data)[at + channel] = number;
      else static_cast<std::uint16_t*>(value.data)[at + channel] = to_bits(value.dtype, number);
    }
  }
}

/// @brief Enqueues the stored V of a range of a sequence's compressed tokens. @tparam scale_groups  of tiles of codes; 0: plain ones
template <int scale_groups>
void reconstruct_joint(const LayerState& layer, int slot, const TokenRange& range, const DeviceTarget& value, cudaStream_t stream) {
  const int pieces = range.pieces(RowList::compressed);
  if (pieces == 0) return;
  const dim3 grid(static_cast<unsigned>(pieces), static_cast<unsigned>(layer.tables().num_heads));
  detail::launch_kernel(decode_joint_kernel<scale_groups>, grid, kStoreThreads, sizeof(float) * static_cast<std::size_t>(kCodeUnit * layer.tables().head_dim), "decode_joint_kernel", stream, layer.tables(), slot,
                       range, layer.tiles().coded_type, value);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
