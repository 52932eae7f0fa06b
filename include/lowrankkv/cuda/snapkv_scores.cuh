// SPDX-License-Identifier: Apache-2.0
/// @file cuda/snapkv_scores.cuh  SnapKV scores of a packed prompt: how much attention each row gets from the prompt's last queries.
///
/// score_t = sum over a group's heads h and the last w queries of softmax(scale q_{h,w} K^T)_t, causal; per KV head (cpu/snapkv_scores.hpp).
/// Two passes over the keys, logits are never stored: the first leaves maxima and sums of pieces of 512 rows, the second adds up weights.
/// Queries are rounded to full_type (which loses nothing of an engine's 16-bit queries); sums are f32.
/// Floor: the keys' bytes twice, and 4 w group head_dim flops a row.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lowrankkv/cuda/query_operands.cuh"
#include "lowrankkv/cuda/row_source.cuh"
#include "lowrankkv/cuda/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kScoreColumns = 64;  ///< query rows of a KV head (queries x group) at a time
inline constexpr int kScorePiece = 512;   ///< rows whose maxima and sums stand together
inline constexpr int kScoreRows = 128;    ///< rows of a block of score_rows_kernel: sixteen a warp

/// @brief The queries that score a prompt: the last `count` of its tokens, which is `total` rows long.
struct ScoreQueries {
  DeviceRows rows;                ///< [count, num_qo_heads, head_dim]
  std::int32_t count = 0, group = 1, total = 0;
  float factor = 1.0F;            ///< softmax scale times log2(e)

  __host__ __device__ std::int32_t columns() const { return count * group; }
  __host__ __device__ std::int32_t pieces() const { return (total + kScorePiece - 1) / kScorePiece; }
  /// @brief The last `most` of them, at most.
  ScoreQueries last(int most) const {
    ScoreQueries fewer = *this;
    fewer.count = (std::min)(count, most);
    fewer.rows = rows.from(count - fewer.count);
    return fewer;
  }
  /// @brief Rows that a column's query sees.
  __device__ int seen(int column) const { return total - count + column / group + 1; }
};

/// @brief Shared memory of the scoring kernels in bytes.
inline std::size_t score_bytes(int head_dim) { return sizeof(uint2) * static_cast<std::size_t>(head_dim / kPlainUnit * (kScoreColumns / 8) * 32); }

namespace detail {

/// Columns [first, first + kScoreColumns) as operands of mma.m16n8k16 [units, kScoreColumns / 8, 32]; those that are not there are zeros.
template <DType type>
__device__ void load_score_queries(const ScoreQueries& queries, int head, int head_dim, int first, uint2* operands) {
  for (int item = static_cast<int>(threadIdx.x); item < head_dim / kPlainUnit * (kScoreColumns / 8) * 32; item += kStoreThreads) {
    const int lane = item % 32, block = item / 32 % (kScoreColumns / 8), unit = item / 32 / (kScoreColumns / 8), column = first + 8 * block + lane / 4;
    float x[4] = {};
    if (column < queries.columns()) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = queries.factor * queries.rows.at(column / queries.group, head * queries.group + column % queries.group, unit * kPlainUnit + 2 * (lane % 4) + i % 2 + 8 * (i / 2));
    }
    operands[item] = {static_cast<std::uint32_t>(to_bits(type, x[0])) | static_cast<std::uint32_t>(to_bits(type, x[1])) << 16,
                      static_cast<std::uint32_t>(to_bits(type, x[2])) | static_cast<std::uint32_t>(to_bits(type, x[3])) << 16};
  }
}

/// logits[i]: rows g, g + 8 of sixteen (i / 2) and columns 2t, 2t + 1 (i % 2) of a block of eight.
template <DType type, int max_units>
__device__ __forceinline__ void score_logits(const uint4 (&keys)[max_units], int units, const uint2* operands, int block, float (&logits)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  logits[0] = logits[1] = logits[2] = logits[3] = 0.0F;
  #pragma unroll
  for (int unit = 0; unit < max_units; ++unit) {
    if (unit >= units) break;
    const uint2 b = operands[(unit * (kScoreColumns / 8) + block) * 32 + lane];
    mma_plain<type>(logits, keys[unit], b.x, b.y);
  }
}

}  // namespace detail

/// @brief Maximum and sum of 2^(logit - maximum) of every piece of rows: target [heads, columns, pieces]. Grid: pieces x heads x groups of columns.
template <DType type, int max_units>
__global__ void __launch_bounds__(kStoreThreads) score_sums_kernel(Tables tables, RowSource source, ScoreQueries queries, float2* target) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  uint2* operands = reinterpret_cast<uint2*>(shared_memory);
  __shared__ float2 states[kStoreThreads / 32][kScoreColumns];
  constexpr int kBlocks = kScoreColumns / 8;
  const int head = static_cast<int>(blockIdx.y), first_column = static_cast<int>(blockIdx.z) * kScoreColumns, units = tables.head_dim / kPlainUnit;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const SourceRows rows(tables, source, 0, head);
  detail::load_score_queries<type>(queries, head, tables.head_dim, first_column, operands);
  __syncthreads();
  float top[kBlocks][2], sum[kBlocks][2];
  #pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) {
    top[i / 2][i % 2] = -INFINITY;
    sum[i / 2][i % 2] = 0.0F;
  }
  for (int step = warp; step < kScorePiece / kPlainRows; step += kStoreThreads / 32) {
    const int row = static_cast<int>(blockIdx.x) * kScorePiece + step * kPlainRows;
    if (row >= queries.total) break;
    uint4 keys[max_units];
    const uint4* words = rows.words(Part::key, row / kPlainRows);
    #pragma unroll
    for (int unit = 0; unit < max_units; ++unit) keys[unit] = unit < units ? words[32 * unit] : uint4{};
    #pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      float logits[4];
      detail::score_logits<type, max_units>(keys, units, operands, block, logits);
      #pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int seen = queries.seen(min(first_column + 8 * block + 2 * t + i, queries.columns() - 1));
        const float low = row + g < seen ? logits[i] : -INFINITY, high = row + g + 8 < seen ? logits[2 + i] : -INFINITY;
        const float best = fmaxf(top[block][i], fmaxf(low, high)), base = best == -INFINITY ? 0.0F : best;
        sum[block][i] = sum[block][i] * exp2_fast(top[block][i] - base) + exp2_fast(low - base) + exp2_fast(high - base);
        top[block][i] = best;
      }
    }
  }
  #pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float best = column_max(top[block][i]);
      const float total = column_sum(best == -INFINITY ? 0.0F : sum[block][i] * exp2_fast(top[block][i] - best));
      if (g == 0) states[warp][8 * block + 2 * t + i] = {best, total};
    }
  }
  __syncthreads();
  const int column = static_cast<int>(threadIdx.x);
  if (column >= kScoreColumns || first_column + column >= queries.columns()) return;
  float best = -INFINITY, total = 0.0F;
  for (int i = 0; i < kStoreThreads / 32; ++i) best = fmaxf(best, states[i][column].x);
  for (int i = 0; i < kStoreThreads / 32; ++i) total += states[i][column].x == -INFINITY ? 0.0F : states[i][column].y * exp2f(states[i][column].x - best);
  target[(static_cast<std::size_t>(head) * static_cast<std::size_t>(queries.columns()) + static_cast<std::size_t>(first_column + column)) * static_cast<std::size_t>(queries.pieces()) + blockIdx.x] = {best, total};
}

/// @brief scores [heads, total]. Grid: kScoreRows rows x heads.
template <DType type, int max_units>
__global__ void __launch_bounds__(kStoreThreads) score_rows_kernel(Tables tables, RowSource source, ScoreQueries queries, const float2* sums, float* scores) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  uint2* operands = reinterpret_cast<uint2*>(shared_memory);
  __shared__ float lse[kScoreColumns];  // of log2
  constexpr int kBlocks = kScoreColumns / 8;
  const int head = static_cast<int>(blockIdx.y), units = tables.head_dim / kPlainUnit, pieces = queries.pieces();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int row = static_cast<int>(blockIdx.x) * kScoreRows + warp * kPlainRows;
  const SourceRows rows(tables, source, 0, head);
  uint4 keys[max_units];
  const uint4* words = rows.words(Part::key, row / kPlainRows);
  #pragma unroll
  for (int unit = 0; unit < max_units; ++unit) keys[unit] = unit < units && row < queries.total ? words[32 * unit] : uint4{};
  float own[2] = {};
  for (int first_column = 0; first_column < queries.columns(); first_column += kScoreColumns) {
    __syncthreads();
    detail::load_score_queries<type>(queries, head, tables.head_dim, first_column, operands);
    for (int column = warp; column < kScoreColumns && first_column + column < queries.columns(); column += kStoreThreads / 32) {
      const float2* own_sums = sums + (static_cast<std::size_t>(head) * static_cast<std::size_t>(queries.columns()) + static_cast<std::size_t>(first_column + column)) * static_cast<std::size_t>(pieces);
      float best = -INFINITY, total = 0.0F;
      for (int i = lane; i < pieces; i += 32) best = fmaxf(best, own_sums[i].x);
      for (int distance = 16; distance > 0; distance /= 2) best = fmaxf(best, __shfl_xor_sync(~0U, best, distance));
      for (int i = lane; i < pieces; i += 32) total += own_sums[i].x == -INFINITY ? 0.0F : own_sums[i].y * exp2f(own_sums[i].x - best);
      for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(~0U, total, distance);
      if (lane == 0) lse[column] = best + log2f(total);
    }
    __syncthreads();
    #pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (first_column + 8 * block >= queries.columns()) break;
      float logits[4];
      detail::score_logits<type, max_units>(keys, units, operands, block, logits);
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = first_column + 8 * block + 2 * t + i % 2, at = row + g + 8 * (i / 2);
        if (column < queries.columns() && at < queries.seen(column)) own[i / 2] += exp2_fast(logits[i] - lse[8 * block + 2 * t + i % 2]);
      }
    }
  }
  #pragma unroll
  for (int half = 0; half < 2; ++half) {
    own[half] += __shfl_xor_sync(~0U, own[half], 1);
    own[half] += __shfl_xor_sync(~0U, own[half], 2);
    const int at = row + g + 8 * half;
    if (t == 0 && at < queries.total) scores[static_cast<std::size_t>(head) * static_cast<std::size_t>(queries.total) + static_cast<std::size_t>(at)] = own[half];
  }
}

/// @brief pooled[head, i] over the window of `kernel` neighbours of the first `count` scores of every head [heads, stride]: averages divide by
/// `kernel` also at the edges, maxima run over the neighbours that exist. Grid: 256 rows x heads.
template <class = void>
__global__ void pool_scores_kernel(const float* scores, int stride, int count, int kernel, bool maximum, float* pooled) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= count) return;
  const float* own = scores + static_cast<std::size_t>(blockIdx.y) * static_cast<std::size_t>(stride);
  float value = maximum ? -INFINITY : 0.0F;
  for (int i = max(0, row - kernel / 2); i < min(count, row + kernel / 2 + 1); ++i) value = maximum ? fmaxf(value, own[i]) : value + own[i];
  pooled[static_cast<std::size_t>(blockIdx.y) * static_cast<std::size_t>(stride) + static_cast<std::size_t>(row)] = maximum ? value : value / static_cast<float>(kernel);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
