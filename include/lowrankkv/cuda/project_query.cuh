// SPDX-License-Identifier: Apache-2.0
/// @file cuda/project_query.cuh  Queries become operands: for rows at full rank as they are, for compressed ones projected by the maps.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/attention_step.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

namespace detail {

/// Columns [4 block, 4 block + 4) of values [columns, stride] as operands of mma.m16n8k16, relative to each column's unit.
template <DType type>
__device__ void write_plain_query(const float* values, int stride, int columns, int width, int units, const float* largest, uint2* target, int blocks, int unit_stride) {
  for (int item = static_cast<int>(threadIdx.x); item < blocks * units * 32; item += static_cast<int>(blockDim.x)) {
    const int lane = item % 32, unit = item / 32 % units, block = item / 32 / units;
    const int column = block * kBlockColumns + lane / 4 / 2;
    const bool low = lane / 4 % 2 == 1;
    std::uint32_t words[2] = {0, 0};
    for (int half = 0; half < 4; ++half) {
      const int channel = unit * kPlainUnit + 2 * (lane % 4) + half % 2 + 8 * (half / 2);
      const float scale = column < columns ? largest[column] : 0.0F;
      const float value = scale > 0.0F && channel < width ? values[column * stride + channel] / scale : 0.0F;
      const std::uint16_t high_bits = to_bits(type, value);
      const std::uint16_t bits = low ? to_bits(type, value - from_bits(type, high_bits)) : high_bits;
      words[half / 2] |= static_cast<std::uint32_t>(bits) << (16 * (half % 2));
    }
    target[(block * unit_stride + unit) * 32 + lane] = {words[0], words[1]};
  }
}

/// A query's channel as a 16-bit integer whose halves are signed bytes.
__device__ inline int query_integer(float value, float largest) { return largest > 0.0F ? __float2int_rn(value / largest * 32512.0F) : 0; }

/// The same as 16-bit integers, operands of mma.m16n8k32.
__device__ inline void write_code_query(const float* values, int stride, int columns, const HeadTiles& layout, const float* largest, uint2* target, int blocks, int unit_stride) {
  for (int item = static_cast<int>(threadIdx.x); item < blocks * layout.key_units * 32; item += static_cast<int>(blockDim.x)) {
    const int lane = item % 32, unit = item / 32 % layout.key_units, block = item / 32 / layout.key_units;
    const int column = block * kBlockColumns + lane / 4 / 2;
    const bool low = lane / 4 % 2 == 1;
    std::uint32_t words[2] = {0, 0};
    for (int i = 0; i < 8; ++i) {
      const int channel = unit * kCodeUnit + 16 * (i / 4) + 4 * (lane % 4) + i % 4;
      const float scale = column < columns ? largest[column] : 0.0F;
      const int value = scale > 0.0F ? query_integer(values[column * stride + channel], scale) : 0;
      const int high = (value + 128) >> 8;
      const int byte = low ? value - 256 * high : high;
      words[i / 4] |= (static_cast<std::uint32_t>(byte) & 0xffU) << (8 * (i % 4));
    }
    target[(block * unit_stride + unit) * 32 + lane] = {words[0], words[1]};
  }
}

/// largest[column] = max |values[column, 0..width)|, a warp a column.
__device__ inline void largest_of(const float* values, int stride, int columns, int width, float* largest) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int column = static_cast<int>(threadIdx.x) / 32; column < columns; column += static_cast<int>(blockDim.x) / 32) {
    float top = 0.0F;
    for (int i = lane; i < width; i += 32) top = fmaxf(top, fabsf(values[column * stride + i]));
    for (int distance = 16; distance > 0; distance /= 2) top = fmaxf(top, __shfl_xor_sync(~0U, top, distance));
    if (lane == 0) largest[column] = top;
  }
}

}  // namespace detail

/// @brief Columns of a block of project_query_kernel, at most.
inline constexpr int kProjectColumns = 16;

/// @brief Shared memory of project_query_kernel in bytes, for so many columns a block.
inline std::size_t project_query_bytes(int columns, int head_dim, int channels) { return sizeof(float) * static_cast<std::size_t>(columns) * static_cast<std::size_t>(head_dim + channels + 2); }

/// @brief Writes the operands and scales of a step. Rows [i m, (i + 1) m) of `query` belong to sequence i. Grid: KV heads x sequences x
/// groups of kProjectColumns columns.
/// @param factor  softmax scale times log2(e)
/// @param channels  largest number of key channels of a head's tiles
template <DType full_type, DType coded_type>
__global__ void __launch_bounds__(kStepThreads) project_query_kernel(AttentionStep step, const HeadTiles* tiles, const HeadMaps* all_maps, DeviceRows query, int head_dim, int channels,
                                                                       float factor, CodedForm form, std::int64_t first_row, int first_sequence) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  float* memory = reinterpret_cast<float*>(shared_memory);
  const int head = static_cast<int>(blockIdx.x), heads = static_cast<int>(gridDim.x), sequence = first_sequence + static_cast<int>(blockIdx.y);
  const int first_column = static_cast<int>(blockIdx.z) * kProjectColumns, columns = min(kProjectColumns, step.columns() - first_column);
  const int blocks = (columns + kBlockColumns - 1) / kBlockColumns;
  float* plain = memory;                          // [columns, head_dim]
  float* coded = plain + columns * head_dim;      // [columns, channels]
  float* largest = coded + columns * channels;    // [columns]
  float* shifts = largest + columns;              // [columns]
  __shared__ float4 scratch[kStepThreads];
  __shared__ HeadTiles layout;
  PartMaps maps;
  if (form != CodedForm::none) {  // on their way while the queries come
    copy_tiles(tiles + head, &layout);
    maps = all_maps[head].key;
  }
  for (int item = static_cast<int>(threadIdx.x); item < columns * head_dim; item += static_cast<int>(blockDim.x)) {
    const int column = first_column + item / head_dim;
    plain[item] = factor * query.at(first_row + static_cast<std::int64_t>(blockIdx.y) * step.m + column / step.group, head * step.group + column % step.group, item % head_dim);
  }
  __syncthreads();
  detail::largest_of(plain, head_dim, columns, head_dim, largest);
  __syncthreads();
  const std::size_t row = static_cast<std::size_t>(sequence) * static_cast<std::size_t>(heads) + static_cast<std::size_t>(head);
  const int full_units = (head_dim + kPlainUnit - 1) / kPlainUnit;
  const std::size_t block_row = row * static_cast<std::size_t>(step.blocks) + static_cast<std::size_t>(first_column / kBlockColumns);
  detail::write_plain_query<full_type>(plain, head_dim, columns, head_dim, full_units, largest, step.full_queries + block_row * static_cast<std::size_t>(full_units) * 32, blocks, full_units);
  for (int column = static_cast<int>(threadIdx.x); column < blocks * kBlockColumns; column += static_cast<int>(blockDim.x)) {
    step.full_scales[block_row * kBlockColumns + static_cast<std::size_t>(column)] = {column < columns ? largest[column] : 0.0F, 0.0F, 0.0F};
  }
  if (form == CodedForm::none) return;
  const int width = layout.channels(Part::key), lane = static_cast<int>(threadIdx.x) % 32;
  // A thread a channel, and a part of the dot product where there are more threads than channels.
  const int together = max(1, min(width, static_cast<int>(blockDim.x))), parts = static_cast<int>(blockDim.x) / together, part = static_cast<int>(threadIdx.x) / together;
  const int per_part = (head_dim + parts - 1) / parts, begin = part * per_part, end = part < parts ? min(head_dim, begin + per_part) : begin;
  for (int first = 0; first < columns; first += kBlockColumns) {
    const int used = min(kBlockColumns, columns - first);
    for (int base = 0; base < width; base += together) {
      const int channel = base + static_cast<int>(threadIdx.x) % together;
      float4 total = {0.0F, 0.0F, 0.0F, 0.0F};
      if (channel < width) {
        const float* map = maps.reader + channel;
        const float* own = plain + first * head_dim;
        #pragma unroll 16
        for (int d = begin; d < end; ++d) {
          const float value = __ldg(map + d * width);
          total.x = fmaf(own[d], value, total.x);
          if (used > 1) total.y = fmaf(own[head_dim + d], value, total.y);
          if (used > 2) total.z = fmaf(own[2 * head_dim + d], value, total.z);
          if (used > 3) total.w = fmaf(own[3 * head_dim + d], value, total.w);
        }
      }
      scratch[threadIdx.x] = total;
      __syncthreads();
      if (part == 0 && channel < width) {
        for (int i = 1; i < parts; ++i) {
          const float4 other = scratch[static_cast<int>(threadIdx.x) + i * together];
          total = {total.x + other.x, total.y + other.y, total.z + other.z, total.w + other.w};
        }
        coded[first * channels + channel] = total.x;
        if (used > 1) coded[(first + 1) * channels + channel] = total.y;
        if (used > 2) coded[(first + 2) * channels + channel] = total.z;
        if (used > 3) coded[(first + 3) * channels + channel] = total.w;
      }
      __syncthreads();
    }
  }
  const int warps = static_cast<int>(blockDim.x) / 32;
  for (int column = static_cast<int>(threadIdx.x) / 32; column < columns; column += warps) {
    float total = 0.0F;
    for (int d = lane; maps.mean != nullptr && d < head_dim; d += 32) total = fmaf(plain[column * head_dim + d], maps.mean[d], total);
    for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(~0U, total, distance);
    if (lane == 0) shifts[column] = total;
  }
  __syncthreads();
  detail::largest_of(coded, channels, columns, width, largest);
  __syncthreads();
  uint2* target = step.coded_queries + block_row * static_cast<std::size_t>(step.coded_units) * 32;
  if (form == CodedForm::plain) {
    detail::write_plain_query<coded_type>(coded, channels, columns, width, layout.key_units, largest, target, blocks, step.coded_units);
  } else {
    detail::write_code_query(coded, channels, columns, layout, largest, target, blocks, step.coded_units);
  }
  for (int column = static_cast<int>(threadIdx.x) / 32; column < blocks * kBlockColumns; column += warps) {
    ColumnScale scale;
    if (column < columns) {
      scale.unit = largest[column];
      scale.shift = shifts[column];
      if (form == CodedForm::codes) {
        // Codes are mid-rise: a plane of w bits is centred at (2^w - 1) / 2. Summed over the integers that the products use.
        long long twice = 0;
        for (int channel = lane; channel < width; channel += 32) {
          twice -= static_cast<long long>(detail::query_integer(coded[column * channels + channel], largest[column])) * ((1 << layout.key_widths[channel / kCodeUnit]) - 1);
        }
        for (int distance = 16; distance > 0; distance /= 2) twice += __shfl_xor_sync(~0U, twice, distance);
        scale.unit = largest[column] / 32512.0F;
        scale.constant = 0.5F * static_cast<float>(twice) * scale.unit;
      }
    }
    if (lane == 0) step.coded_scales[block_row * kBlockColumns + static_cast<std::size_t>(column)] = scale;
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
