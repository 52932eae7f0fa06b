// SPDX-License-Identifier: Apache-2.0
/// @file cuda/attention/post_rope/query_operands.cuh  Queries as operands of tensor-core products:
/// high and low parts in 16 bits each, or 16-bit integers as two bytes.
///
/// The f32 numbers lie in shared memory as [block of columns, channel, kBlockColumns].
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/state/attention_step.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief The queries of an attention call. Rows [first_row + i m, first_row + (i + 1) m) belong to
/// sequence i of the launch.
struct StepQueries {
  DeviceRows rows;
  std::int64_t first_row = 0;
  float factor = 1.0F;  ///< softmax scale times log2(e): logits are in units of log2

  /// @brief One channel of a column of a sequence of the launch, times the factor.
  __device__ float at(const AttentionStep& step, int sequence, int kv_head, int column,
                      int channel) const {
    return factor * rows.at(row(step, sequence, column), kv_head * step.group + column % step.group,
                            channel);
  }
  /// @brief Channels first, first + 32, ... of a column, below `channels`, times the factor.
  template <int count>
  __device__ void gather(const AttentionStep& step, int sequence, int kv_head, int column,
                         int first, int channels, float (&values)[count]) const {
    rows.gather(row(step, sequence, column), kv_head * step.group + column % step.group, first, 32,
                channels, values);
#pragma unroll
    for (int i = 0; i < count; ++i) values[i] *= factor;
  }
  __device__ std::int64_t row(const AttentionStep& step, int sequence, int column) const {
    return first_row + static_cast<std::int64_t>(sequence) * step.m + column / step.group;
  }
};

namespace detail {

/// Two numbers rounded to 16 bits each; if `low`, their rounding errors instead.
template <DType type>
__device__ __forceinline__ std::uint32_t pair_of(float first, float second, bool low) {
  if constexpr (type == DType::f16) {
    const __half2 high = __floats2half2_rn(first, second);
    const float2 back = __half22float2(high);
    const __half2 rest = __floats2half2_rn(first - back.x, second - back.y);
    return low ? *reinterpret_cast<const std::uint32_t*>(&rest)
               : *reinterpret_cast<const std::uint32_t*>(&high);
  } else {
    const __nv_bfloat162 high = __floats2bfloat162_rn(first, second);
    const float2 back = __bfloat1622float2(high);
    const __nv_bfloat162 rest = __floats2bfloat162_rn(first - back.x, second - back.y);
    return low ? *reinterpret_cast<const std::uint32_t*>(&rest)
               : *reinterpret_cast<const std::uint32_t*>(&high);
  }
}

/// A lane's operand of mma.m16n8k16 for unit `unit`: the columns of a block, divided by their
/// largest magnitudes. Channels from `width` on are zeros.
template <DType type>
__device__ __forceinline__ uint2 plain_operand(const float* values, int width, int unit, int lane,
                                               const int* largest) {
  const int column = lane / 8, first = unit * kPlainUnit + 2 * (lane % 4);
  const float scale = __int_as_float(largest[column]),
              inverse = scale > 0.0F ? __fdividef(1.0F, scale) : 0.0F;
  const bool low = lane / 4 % 2 == 1;
  const float* own = values + first * kBlockColumns + column;
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    x[i] = first + i % 2 + 8 * (i / 2) < width
               ? own[(i % 2 + 8 * (i / 2)) * kBlockColumns] * inverse
               : 0.0F;
  return {pair_of<type>(x[0], x[1], low), pair_of<type>(x[2], x[3], low)};
}

/// A lane's operand of mma.m16n8k32: the columns of a block as 16-bit integers, divided into two
/// signed bytes.
/// @param sum  takes the sum of the integers of the lane's eight channels
__device__ __forceinline__ uint2 code_operand(const float* values, int unit, int lane,
                                              const int* largest, int& sum) {
  const int column = lane / 8, first = unit * kCodeUnit + 4 * (lane % 4);
  const float scale = __int_as_float(largest[column]),
              to_integer = scale > 0.0F ? __fdividef(32512.0F, scale) : 0.0F;
  const bool low = lane / 4 % 2 == 1;
  const float* own = values + first * kBlockColumns + column;
  std::uint32_t words[2] = {0, 0};
  sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int value = __float2int_rn(own[(i % 4 + 16 * (i / 4)) * kBlockColumns] * to_integer);
    sum += value;
    // value = 256 high + low with both bytes signed: high = (value + 128) >> 8, and low is the low
    // byte of value.
    const std::uint32_t byte = static_cast<std::uint32_t>(low ? value : (value + 128) >> 8) & 0xffU;
    words[i / 4] |= byte << (8 * (i % 4));
  }
  return {words[0], words[1]};
}

}  // namespace detail

/// @brief Writes the operands of `column_blocks` blocks of columns, from block `first_block` on, of
/// raw queries to shared memory [units, column_blocks, 32], and each column's scale to `largest`.
/// All threads call it; they are synchronised at the end.
/// @param raw  shared memory of column_blocks x head_dim x kBlockColumns floats
/// @param largest  shared memory of column_blocks x kBlockColumns words: the largest magnitudes, as
///   bits of f32
template <DType type, int column_blocks>
__device__ inline void make_plain_queries(const StepQueries& queries, const AttentionStep& step,
                                          int sequence, int kv_head, int first_block, int head_dim,
                                          float* raw, int* largest, uint2* shared) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x),
            lane = thread % 32;
  // One warp per column.
  for (int own = thread / 32; own < column_blocks * kBlockColumns; own += threads / 32) {
    const int column = first_block * kBlockColumns + own;
    float top = 0.0F;
#pragma unroll 1
    for (int first = lane; first < head_dim; first += 128) {
      float values[4] = {};
      if (column < step.columns())
        queries.gather(step, sequence, kv_head, column, first, head_dim, values);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + 32 * i >= head_dim) break;
        raw[(own / kBlockColumns * head_dim + first + 32 * i) * kBlockColumns +
            own % kBlockColumns] = values[i];
        top = fmaxf(top, fabsf(values[i]));
      }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      top = fmaxf(top, __shfl_xor_sync(~0U, top, distance));
    if (lane == 0) largest[own] = __float_as_int(top);
  }
  __syncthreads();
  for (int item = thread; item < column_blocks * head_dim / kPlainUnit * 32; item += threads) {
    const int block = item / 32 % column_blocks, unit = item / 32 / column_blocks;
    shared[item] = detail::plain_operand<type>(raw + block * head_dim * kBlockColumns, head_dim,
                                               unit, lane, largest + block * kBlockColumns);
  }
  __syncthreads();
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
