// SPDX-License-Identifier: Apache-2.0
/// @file cuda/scores/snapkv_scores.cuh  SnapKV scores of a packed prompt: how much attention each
/// row gets from the prompt's last queries.
///
/// score_t = sum over a group's heads h and the last w queries of softmax(scale q_{h,w} K^T)_t,
/// causal, per KV head (cpu/snapkv_scores.hpp). Two passes over the keys; logits are never stored.
/// The first pass computes maxima and sums of pieces of 512 rows, which are merged. The second pass
/// adds up weights. Queries times the scale of the softmax are rounded to full_type; sums are f32.
/// So scores differ from those of f32 by up to 10^-3 of themselves in f16 and 10^-2 in bf16, and of
/// rows whose scores are that close another one may be chosen: in f16 in 2 to 5 of 100 selections,
/// in bf16 in a third of those among 1000 rows (normal queries and keys of 128 channels). Floor:
/// the keys' bytes twice; per row 4 w group head_dim flops and 2 w group exponentials.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lowrankkv/cuda/attention/post_rope/query_operands.cuh"
#include "lowrankkv/cuda/state/row_source.cuh"
#include "lowrankkv/cuda/tiles/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// Query rows of a KV head (queries x group) that are processed at a time.
inline constexpr int kScoreColumns = 64;
inline constexpr int kScorePiece = 512;  ///< rows that share a maximum and a sum
/// A maximum is raised only when a weight would exceed 2^8.
inline constexpr float kScoreHeadroom = 8.0F;

/// @brief Steps of sixteen rows that a warp takes at once, if keys have `units` units. Their
/// operands stay in registers.
__host__ __device__ constexpr int score_steps(int units) { return units <= 8 ? 2 : 1; }
/// @brief Rows of a block of score_rows_kernel.
__host__ __device__ constexpr int score_rows(int units) {
  return kStoreThreads / 32 * score_steps(units) * kPlainRows;
}

/// @brief The queries that score a prompt: those of the last `count` of its `total` tokens.
struct ScoreQueries {
  DeviceRows rows;  ///< [count, num_qo_heads, head_dim]
  std::int32_t count = 0, group = 1, total = 0;
  float factor = 1.0F;  ///< softmax scale times log2(e)

  __host__ __device__ std::int32_t columns() const { return count * group; }
  /// @brief Groups of kScoreColumns columns.
  __host__ __device__ std::int32_t groups() const {
    return (columns() + kScoreColumns - 1) / kScoreColumns;
  }
  __host__ __device__ std::int32_t pieces() const {
    return (total + kScorePiece - 1) / kScorePiece;
  }
  /// @brief The last `most` of the queries, or all if there are fewer.
  ScoreQueries last(int most) const {
    ScoreQueries fewer = *this;
    fewer.count = (std::min)(count, most);
    fewer.rows = rows.from(count - fewer.count);
    return fewer;
  }
  /// @brief Rows that all queries see.
  __device__ int seen_by_all() const { return total - count + 1; }
  /// @brief Rows that a column's query sees.
  __device__ int seen(int column) const { return total - count + column / group + 1; }
};

/// @brief Bytes of the operands of a group of columns, in device memory and in the shared memory of
/// a score kernel.
inline std::size_t score_bytes(int head_dim) {
  return sizeof(uint2) * static_cast<std::size_t>(head_dim / kPlainUnit * (kScoreColumns / 8) * 32);
}

/// @brief Writes the queries as operands of mma.m16n8k16, [heads, groups, units, kScoreColumns / 8,
/// 32]. Columns that do not exist are zeros. Grid: groups x heads x parts of the work.
template <DType type>
__global__ void __launch_bounds__(kStoreThreads)
    score_operands_kernel(ScoreQueries queries, int head_dim, uint2* operands) {
  const int head = static_cast<int>(blockIdx.y),
            first = static_cast<int>(blockIdx.x) * kScoreColumns,
            size = head_dim / kPlainUnit * (kScoreColumns / 8) * 32;
  uint2* own = operands + (static_cast<std::size_t>(head) * gridDim.x + blockIdx.x) *
                              static_cast<std::size_t>(size);
  for (int item = static_cast<int>(blockIdx.z) * kStoreThreads + static_cast<int>(threadIdx.x);
       item < size; item += static_cast<int>(gridDim.z) * kStoreThreads) {
    const int lane = item % 32, block = item / 32 % (kScoreColumns / 8),
              unit = item / 32 / (kScoreColumns / 8), column = first + 8 * block + lane / 4;
    float x[4] = {};
    if (column < queries.columns()) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[i] =
            queries.factor *
            queries.rows.at(column / queries.group, head * queries.group + column % queries.group,
                            unit * kPlainUnit + 2 * (lane % 4) + i % 2 + 8 * (i / 2));
    }
    own[item] = {static_cast<std::uint32_t>(to_bits(type, x[0])) |
                     static_cast<std::uint32_t>(to_bits(type, x[1])) << 16,
                 static_cast<std::uint32_t>(to_bits(type, x[2])) |
                     static_cast<std::uint32_t>(to_bits(type, x[3])) << 16};
  }
}

namespace detail {

/// Copies a head's operands of one group of columns to shared memory. All threads of the block call
/// it; the caller synchronises.
__device__ inline void load_operands(const uint2* operands, int head, int groups, int group,
                                     int units, uint2* shared) {
  const int words = units * (kScoreColumns / 8) * 16;  // of 16 bytes
  const uint4* from =
      reinterpret_cast<const uint4*>(operands) +
      static_cast<std::size_t>(head * groups + group) * static_cast<std::size_t>(words);
  for (int word = static_cast<int>(threadIdx.x); word < words; word += kStoreThreads)
    reinterpret_cast<uint4*>(shared)[word] = __ldg(from + word);
}

/// Loads the keys of `steps` groups of sixteen rows from `row` on; zeros where there are no rows.
template <int steps, int max_units>
__device__ __forceinline__ void load_score_keys(const SourceRows& rows, int row, int total,
                                                int units, uint4 (&keys)[steps][max_units]) {
#pragma unroll
  for (int s = 0; s < steps; ++s) {
    const int first = row + kPlainRows * s;
    const uint4* words = rows.words(Part::key, first / kPlainRows);
#pragma unroll
    for (int unit = 0; unit < max_units; ++unit)
      keys[s][unit] = unit < units && first < total ? words[32 * unit] : uint4{};
  }
}

/// logits[s][i] += logits of rows g, g + 8 (i / 2) of the sixteen rows s and of columns 2t, 2t + 1
/// (i % 2) of a block of eight columns.
template <DType type, int steps, int max_units>
__device__ __forceinline__ void score_logits(const uint4 (&keys)[steps][max_units], int units,
                                             const uint2* operands, int block,
                                             float (&logits)[steps][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int unit = 0; unit < max_units; ++unit) {
    if (unit >= units) break;
    const uint2 b = operands[(unit * (kScoreColumns / 8) + block) * 32 + lane];
#pragma unroll
    for (int s = 0; s < steps; ++s) mma_plain<type>(logits[s], keys[s][unit], b.x, b.y);
  }
}

}  // namespace detail

/// @brief Maximum and sum of 2^(logit - maximum) of every piece of rows: target [heads, columns,
/// pieces]. Maxima may be too low by up to kScoreHeadroom. Grid: groups of columns x pieces x
/// heads.
template <DType type, int max_units>
__global__ void __launch_bounds__(kStoreThreads, 2)
    score_sums_kernel(LayerView tables, RowSource source, ScoreQueries queries,
                      const uint2* operands, float2* target) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  uint2* own_operands = reinterpret_cast<uint2*>(shared_memory);
  __shared__ float2 states[kStoreThreads / 32][kScoreColumns];
  constexpr int kBlocks = kScoreColumns / 8, kSteps = score_steps(max_units);
  const int group = static_cast<int>(blockIdx.x), piece = static_cast<int>(blockIdx.y),
            head = static_cast<int>(blockIdx.z), first_column = group * kScoreColumns,
            units = tables.head_dim / kPlainUnit;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            g = lane / 4, t = lane % 4;
  const SourceRows rows(tables, source, 0, head);
  detail::load_operands(operands, head, static_cast<int>(gridDim.x), group, units, own_operands);
  __syncthreads();
  float top[kBlocks][2], sum[kBlocks][2];
#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) top[i / 2][i % 2] = sum[i / 2][i % 2] = 0.0F;
  for (int step = warp * kSteps; step < kScorePiece / kPlainRows;
       step += kStoreThreads / 32 * kSteps) {
    const int row = piece * kScorePiece + step * kPlainRows;
    if (row >= queries.total) break;
    uint4 keys[kSteps][max_units];
    detail::load_score_keys(rows, row, queries.total, units, keys);
    const bool masked = row + kSteps * kPlainRows > queries.seen_by_all(),
               first_rows = step == warp * kSteps;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      float logits[kSteps][4];  // relative to the maxima so far
#pragma unroll
      for (int i = 0; i < 4 * kSteps; ++i) logits[i / 4][i % 4] = -top[block][i % 2];
      detail::score_logits<type>(keys, units, own_operands, block, logits);
      if (masked) {
#pragma unroll
        for (int i = 0; i < 4 * kSteps; ++i) {
          const int column = min(first_column + 8 * block + 2 * t + i % 2, queries.columns() - 1);
          if (row + 8 * (i / 2) + g >= queries.seen(column)) logits[i / 4][i % 4] = -INFINITY;
        }
      }
      float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int i = 0; i < 4 * kSteps; ++i)
        highest[i % 2] = fmaxf(highest[i % 2], logits[i / 4][i % 4]);
      // The first rows set the maximum. A column that sees none of them sees none of the later rows
      // either.
      if (first_rows || __any_sync(~0U, fmaxf(highest[0], highest[1]) > kScoreHeadroom)) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float by =
              highest[i] > (first_rows ? -INFINITY : kScoreHeadroom) ? highest[i] : 0.0F;
          sum[block][i] = first_rows ? 0.0F : sum[block][i] * exp2_fast(-by);
          top[block][i] += by;
#pragma unroll
          for (int s = 0; s < 2 * kSteps; ++s) logits[s / 2][s % 2 * 2 + i] -= by;
        }
      }
#pragma unroll
      for (int i = 0; i < 4 * kSteps; ++i) sum[block][i % 2] += exp2_fast(logits[i / 4][i % 4]);
    }
  }
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float own = sum[block][i] > 0.0F ? top[block][i] : -INFINITY, best = column_max(own);
      const float total =
          column_sum(own == -INFINITY ? 0.0F : sum[block][i] * exp2_fast(own - best));
      if (g == 0) states[warp][8 * block + 2 * t + i] = {best, total};
    }
  }
  __syncthreads();
  const int column = static_cast<int>(threadIdx.x);
  if (column >= kScoreColumns || first_column + column >= queries.columns()) return;
  float best = -INFINITY, total = 0.0F;
  for (int i = 0; i < kStoreThreads / 32; ++i) best = fmaxf(best, states[i][column].x);
  for (int i = 0; i < kStoreThreads / 32; ++i)
    total += states[i][column].x == -INFINITY
                 ? 0.0F
                 : states[i][column].y * exp2f(states[i][column].x - best);
  target[(static_cast<std::size_t>(head) * static_cast<std::size_t>(queries.columns()) +
          static_cast<std::size_t>(first_column + column)) *
             static_cast<std::size_t>(queries.pieces()) +
         static_cast<std::size_t>(piece)] = {best, total};
}

/// @brief lse [heads, groups, kScoreColumns] = log2 of a column's whole sum; infinite if there is
/// no column, so that its weights are 0. Grid: groups of eight columns x heads.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    score_lse_kernel(ScoreQueries queries, const float2* sums, float* lse) {
  const int lane = static_cast<int>(threadIdx.x) % 32,
            column = static_cast<int>(blockIdx.x) * (kStoreThreads / 32) +
                     static_cast<int>(threadIdx.x) / 32,
            head = static_cast<int>(blockIdx.y);
  float best = -INFINITY, total = 0.0F;
  if (column < queries.columns()) {
    const float2* own = sums + static_cast<std::size_t>(head * queries.columns() + column) *
                                   static_cast<std::size_t>(queries.pieces());
    for (int i = lane; i < queries.pieces(); i += 32) {
      const float2 piece = own[i];
      const float higher = fmaxf(best, piece.x);
      if (higher > -INFINITY)
        total = total * exp2f(best - higher) + piece.y * exp2f(piece.x - higher);
      best = higher;
    }
    const float top = best;
    for (int distance = 16; distance > 0; distance /= 2)
      best = fmaxf(best, __shfl_xor_sync(~0U, best, distance));
    total *= exp2f(top - best);
    for (int distance = 16; distance > 0; distance /= 2)
      total += __shfl_xor_sync(~0U, total, distance);
  }
  if (lane == 0)
    lse[head * queries.groups() * kScoreColumns + column] =
        column < queries.columns() ? best + log2f(total) : INFINITY;
}

/// @brief Writes scores [heads, total]. Grid: pieces of score_rows(max_units) rows x heads.
template <DType type, int max_units>
__global__ void __launch_bounds__(kStoreThreads, 2)
    score_rows_kernel(LayerView tables, RowSource source, ScoreQueries queries,
                      const uint2* operands, const float* lse, float* scores) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  uint2* own_operands = reinterpret_cast<uint2*>(shared_memory);
  constexpr int kBlocks = kScoreColumns / 8, kSteps = score_steps(max_units);
  const int head = static_cast<int>(blockIdx.y), units = tables.head_dim / kPlainUnit,
            groups = queries.groups();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            g = lane / 4, t = lane % 4;
  const int row = static_cast<int>(blockIdx.x) * score_rows(max_units) + warp * kSteps * kPlainRows;
  const SourceRows rows(tables, source, 0, head);
  uint4 keys[kSteps][max_units];
  detail::load_score_keys(rows, row, queries.total, units, keys);
  const bool masked = row + kSteps * kPlainRows > queries.seen_by_all();
  float own[2 * kSteps] = {};
  for (int group = 0; group < groups; ++group) {
    __syncthreads();
    detail::load_operands(operands, head, groups, group, units, own_operands);
    __syncthreads();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float2 base = __ldg(reinterpret_cast<const float2*>(
                                    lse + (head * groups + group) * kScoreColumns + 8 * block) +
                                t);
      float logits[kSteps][4];
#pragma unroll
      for (int i = 0; i < 4 * kSteps; ++i) logits[i / 4][i % 4] = i % 2 == 0 ? -base.x : -base.y;
      detail::score_logits<type>(keys, units, own_operands, block, logits);
      if (masked) {
#pragma unroll
        for (int i = 0; i < 4 * kSteps; ++i) {
          const int column =
              min(group * kScoreColumns + 8 * block + 2 * t + i % 2, queries.columns() - 1);
          if (row + 8 * (i / 2) + g >= queries.seen(column)) logits[i / 4][i % 4] = -INFINITY;
        }
      }
#pragma unroll
      for (int i = 0; i < 4 * kSteps; ++i) own[i / 2] += exp2_fast(logits[i / 4][i % 4]);
    }
  }
#pragma unroll
  for (int s = 0; s < 2 * kSteps; ++s) {
    own[s] += __shfl_xor_sync(~0U, own[s], 1);
    own[s] += __shfl_xor_sync(~0U, own[s], 2);
    const int at = row + 8 * s + g;
    if (t == 0 && at < queries.total)
      scores[static_cast<std::size_t>(head) * static_cast<std::size_t>(queries.total) +
             static_cast<std::size_t>(at)] = own[s];
  }
}

/// @brief pooled[head, i] = average or maximum over the window of `kernel` neighbours of score i,
/// among the first `count` scores of every head [heads, stride]. Averages divide by `kernel` at the
/// edges too; maxima run over the neighbours that exist. Grid: pieces of 256 rows x heads.
template <class = void>
__global__ void pool_scores_kernel(const float* scores, int stride, int count, int kernel,
                                   bool maximum, float* pooled) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= count) return;
  const float* own =
      scores + static_cast<std::size_t>(blockIdx.y) * static_cast<std::size_t>(stride);
  float value = maximum ? -INFINITY : 0.0F;
  for (int i = max(0, row - kernel / 2); i < min(count, row + kernel / 2 + 1); ++i)
    value = maximum ? fmaxf(value, own[i]) : value + own[i];
  pooled[static_cast<std::size_t>(blockIdx.y) * static_cast<std::size_t>(stride) +
         static_cast<std::size_t>(row)] = maximum ? value : value / static_cast<float>(kernel);
}

/// @brief Replaces the scores [heads, stride] of the heads of a group by their sum, added head
/// after head. Rows of the group's heads are kept, compressed or dropped together. Grid: pieces of
/// 256 rows x groups.
template <class = void>
__global__ void group_scores_kernel(float* scores, std::int32_t stride, int rows, int members) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= rows) return;
  float* own = scores +
               static_cast<std::size_t>(static_cast<int>(blockIdx.y) * members) *
                   static_cast<std::size_t>(stride) +
               static_cast<std::size_t>(row);
  float sum = own[0];
  for (int member = 1; member < members; ++member)
    sum += own[static_cast<std::size_t>(member) * static_cast<std::size_t>(stride)];
  for (int member = 0; member < members; ++member)
    own[static_cast<std::size_t>(member) * static_cast<std::size_t>(stride)] = sum;
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
