// SPDX-License-Identifier: Apache-2.0
/// @file cuda/turned_keys.cuh  Logits of keys that are stored before their rotary embedding: a tile is lifted to head_dim, turned in registers and meets the queries, once for the group.
///
/// With base position b of a tile, q R(p) k = (R(-b) q) R(p - b) k: a warp turns its queries back once a tile, and rows by small offsets, whose cosines and sines lie in shared
/// memory. Lifted keys are accumulators of one product and operands of the next without leaving their lanes: k = t is channel 2t of a block of eight, k = t + 4 channel
/// 2t + 1. Both sides enter as a high and a low part of tf32: the result is that of f32 arithmetic to about 2^-20.
/// Cost: head_dim x rank products a row and KV head, whatever the group; floor: the tiles' bytes.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/query_operands.cuh"
#include "lowrankkv/cuda/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Numbers of eight channels of a warp's turned queries: eight more than there are, so that blocks stand in other banks.
inline constexpr int kTurnedBlock = 8 * kBlockColumns + 8;
inline constexpr int kNoPlace = INT32_MIN;  ///< the position of no row

/// @brief Numbers in shared memory that a block needs to turn keys: offsets, queries, a lifting map of so many operands a block of channels and lane.
__host__ __device__ constexpr int turn_floats(int head_dim, int operands) {
  return kTurnRows * (head_dim + 2 * kTurnPad) + head_dim * kBlockColumns + 3 * head_dim + operands * (head_dim / 8) * 64;
}
/// @brief The same of a warp: its turned queries.
__host__ __device__ constexpr int turned_floats(int head_dim) { return head_dim / 8 * kTurnedBlock; }
/// @brief Stages of a warp's ring: the keys of a tile, its values.
inline constexpr int kTurnedStages = 2;
/// @brief Warps of a block of a turning kernel, at most.
inline constexpr int kTurnedWarps = 12;
/// @brief Bytes of a block and of each warp.
struct TurnBytes {
  int block = 0, warp = 0;
};
/// @brief The shared memory that turning takes.
constexpr TurnBytes turn_bytes(int head_dim, int operands) {
  constexpr int size = static_cast<int>(sizeof(float));
  return {size * turn_floats(head_dim, operands), size * turned_floats(head_dim)};
}

/// @brief What the warps of a block share: offsets, queries, the lifting map. In shared memory.
struct TurnShared {
  const float2* offsets = nullptr;  ///< [kTurnRows, head_dim / 2 + kTurnPad]
  float* raw = nullptr;             ///< [head_dim, kBlockColumns]: queries, times the softmax scale, channels in turning order
  float* numbers = nullptr;         ///< [3, head_dim]: those of a lifting map
  const uint2* operands = nullptr;  ///< a copy of those of the lifting map

  TurnShared() = default;
  /// @brief Lays it out; all threads copy what does not depend on the queries. The caller synchronises.
  /// @param lift  null: rows at full rank  @param copied  of its operands, for eight channels and a lane: units x parts, or none
  __device__ TurnShared(std::uint8_t* memory, const Rotary& rotary, int head_dim, const LiftMap* lift, int copied) {
    float4* table = reinterpret_cast<float4*>(memory);
    const int size = kTurnRows * (head_dim / 2 + kTurnPad) / 2;
    #pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x); i < size; i += static_cast<int>(blockDim.x)) table[i] = __ldg(reinterpret_cast<const float4*>(rotary.offsets) + i);
    offsets = reinterpret_cast<const float2*>(memory);
    raw = reinterpret_cast<float*>(table + size);
    numbers = raw + head_dim * kBlockColumns;
    uint2* copy = reinterpret_cast<uint2*>(numbers + 3 * head_dim);
    operands = copy;
    if (lift == nullptr) return;
    for (int i = static_cast<int>(threadIdx.x); i < 3 * head_dim; i += static_cast<int>(blockDim.x)) numbers[i] = __ldg(lift->numbers + i);
    #pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < copied * (head_dim / 8) * 16; i += static_cast<int>(blockDim.x)) {
      reinterpret_cast<uint4*>(copy)[i] = __ldg(reinterpret_cast<const uint4*>(lift->operands) + i);
    }
  }

  /// @brief Copies a block of columns of the queries, times `factor`. All threads call it; the caller synchronises.
  __device__ void load_queries(const StepQueries& queries, const Rotary& rotary, const AttentionStep& step, int sequence, int kv_head, int block, int head_dim, float factor) {
    for (int item = static_cast<int>(threadIdx.x); item < kBlockColumns * head_dim; item += static_cast<int>(blockDim.x)) {
      const int own = item / head_dim, column = block * kBlockColumns + own, place = item % head_dim;
      raw[place * kBlockColumns + own] = column < step.columns() ? factor * queries.at(step, sequence, kv_head, column, rotary.channel(place, head_dim)) : 0.0F;
    }
  }

  /// @brief The queries turned back by `base` positions, [head_dim / 8, kTurnedBlock: columns, eight channels each]. All lanes call it; they are synchronised at the end.
  __device__ void turn_back(const Rotary& rotary, int head_dim, int base, float* turned) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    __syncwarp();
    for (int pair = lane; pair < head_dim / 2; pair += 32) {
      const float2 phase = rotary.phase(base, pair, head_dim);
      const float4 x = reinterpret_cast<const float4*>(raw)[pair], y = reinterpret_cast<const float4*>(raw)[pair + head_dim / 2];
      float* first = turned + pair / 8 * kTurnedBlock + pair % 8;
      float* second = first + head_dim / 16 * kTurnedBlock;
      const auto turn = [&](int column, float p, float q) {
        first[8 * column] = p * phase.x + q * phase.y;
        second[8 * column] = q * phase.x - p * phase.y;
      };
      turn(0, x.x, y.x);
      turn(1, x.y, y.y);
      turn(2, x.z, y.z);
      turn(3, x.w, y.w);
    }
    __syncwarp();
  }
};

namespace detail {

/// Turns eight pairs of channels, the first of each in x, the second in y: [steps][rows g, g + 8, pairs 2t and 2t + 1 each].
template <int steps>
__device__ __forceinline__ void turn_rows(const float2* table, const int (&offsets)[steps][2], int block, float (&x)[steps][4], float (&y)[steps][4]) {
  const float2* own = table + 8 * block + 2 * (static_cast<int>(threadIdx.x) % 4);
  #pragma unroll
  for (int i = 0; i < steps; ++i) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float4 both = *reinterpret_cast<const float4*>(own + offsets[i][r]);
      const float x0 = x[i][2 * r], x1 = x[i][2 * r + 1], y0 = y[i][2 * r], y1 = y[i][2 * r + 1];
      x[i][2 * r] = x0 * both.x - y0 * both.y;
      y[i][2 * r] = y0 * both.x + x0 * both.y;
      x[i][2 * r + 1] = x1 * both.z - y1 * both.w;
      y[i][2 * r + 1] = y1 * both.z + x1 * both.w;
    }
  }
}

/// s += the products of eight channels of lifted, turned rows with a warp's turned queries: columns as the queries' high and low parts.
template <int steps>
__device__ __forceinline__ void add_products(const float* turned, int block, const float (&x)[steps][4], float (&s)[steps][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float2 b = *reinterpret_cast<const float2*>(turned + block * kTurnedBlock + 8 * (lane / 8) + 2 * (lane % 4));
  if (lane / 4 % 2 == 1) b = {beyond_tf32(b.x), beyond_tf32(b.y)};
  #pragma unroll
  for (int i = 0; i < steps; ++i) {
    mma_tf32(s[i], {beyond_tf32(x[i][0]), beyond_tf32(x[i][2]), beyond_tf32(x[i][1]), beyond_tf32(x[i][3])}, b.x, b.y);
    mma_tf32(s[i], {x[i][0], x[i][2], x[i][1], x[i][3]}, b.x, b.y);
  }
}

}  // namespace detail

/// @brief Logits s of a tile of 16 x steps rows, as the accumulators of products with high and low parts of queries in neighbouring columns. A warp.
/// @param places    positions of this lane's rows 16 step + 8 half + lane / 4, or kNoPlace where nobody sees a row
/// @param lift      (block, x, y): fills x, y [steps][4] with the first and the second channels of pairs [8 block, 8 block + 8), in turning order, of the rows
/// @tparam unroll    of the loop over blocks
template <int steps, int unroll, class Lift>
__device__ __forceinline__ void turned_logits(const Rotary& rotary, const TurnShared& shared, int head_dim, float* turned, const int (&places)[steps][2], Lift&& lift, float (&s)[steps][4]) {
  std::uint32_t pending = 0;  // rows that have no logit yet
  #pragma unroll
  for (int i = 0; i < steps; ++i) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      pending |= places[i][r] != kNoPlace ? 1U << (2 * i + r) : 0U;
      s[i][2 * r] = s[i][2 * r + 1] = 0.0F;
    }
  }
  const int stride = head_dim / 2 + kTurnPad;
  while (__any_sync(~0U, pending != 0)) {  // once, unless rows stand far apart
    int first = INT32_MAX;
    #pragma unroll
    for (int i = 0; i < 2 * steps; ++i) first = min(first, pending >> i & 1U ? places[i / 2][i % 2] : INT32_MAX);
    const int base = __reduce_min_sync(~0U, first);
    shared.turn_back(rotary, head_dim, base, turned);
    int offsets[steps][2];
    std::uint32_t near = 0;
    #pragma unroll
    for (int i = 0; i < steps; ++i) {
      #pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool meets = (pending >> (2 * i + r) & 1U) != 0 && places[i][r] - base < kTurnRows;
        near |= meets ? 1U << (2 * i + r) : 0U;
        offsets[i][r] = meets ? (places[i][r] - base) * stride : 0;
        asm volatile("" : "+r"(offsets[i][r]));  // kept, not found again for every block
      }
    }
    float part[steps][4] = {};
    #pragma unroll(unroll)
    for (int block = 0; block < head_dim / 16; ++block) {
      float x[steps][4], y[steps][4];
      lift(block, x, y);
      detail::turn_rows<steps>(shared.offsets, offsets, block, x, y);
      detail::add_products<steps>(turned, block, x, part);
      detail::add_products<steps>(turned, block + head_dim / 16, y, part);
    }
    #pragma unroll
    for (int i = 0; i < steps; ++i) {
      #pragma unroll
      for (int r = 0; r < 2; ++r) {
        if ((near >> (2 * i + r) & 1U) == 0) continue;
        s[i][2 * r] = part[i][2 * r];
        s[i][2 * r + 1] = part[i][2 * r + 1];
      }
    }
    pending &= ~near;
  }
}

/// @brief Two numbers of a word of f16 or bf16.
template <DType type>
__device__ __forceinline__ float2 two_numbers(std::uint32_t word) {
  if constexpr (type == DType::f16) return __half22float2(*reinterpret_cast<const __half2*>(&word));
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000U)};
}

/// @brief Eight pairs of channels, in turning order, of rows at full rank, from a plain tile's keys.
template <DType type, int steps>
__device__ __forceinline__ void read_pairs(const Rotary& rotary, const std::uint8_t* keys, int key_units, int block, float (&x)[steps][4], float (&y)[steps][4]) {
  const bool turn = 8 * block < rotary.pairs, split = turn && !rotary.interleaved;
  const int a = split ? block : 2 * block, b = split ? block + rotary.pairs / 8 : 2 * block + 1;  // blocks of eight channels
  const auto read = [&](int i, int from, float (&into)[4]) {
    const uint2 words = *reinterpret_cast<const uint2*>(keys + ((i * key_units + from / 2) * 32 + static_cast<int>(threadIdx.x) % 32) * 16 + from % 2 * 8);
    const float2 low = two_numbers<type>(words.x), high = two_numbers<type>(words.y);
    into[0] = low.x;
    into[1] = low.y;
    into[2] = high.x;
    into[3] = high.y;
  };
  #pragma unroll
  for (int i = 0; i < steps; ++i) {
    read(i, a, x[i]);
    read(i, b, y[i]);
    if (!turn || !rotary.interleaved) continue;
    #pragma unroll
    for (int r = 0; r < 4; r += 2) {  // lanes have the pairs t of the first block and t of the second
      const float second = x[i][r + 1];
      x[i][r + 1] = y[i][r];
      y[i][r] = second;
    }
  }
}

/// @brief Eight pairs of channels of rows of plain coefficients, times 2^k: what `operands` were multiplied by.
/// @param operands  of the map, of so many parts  @param words  (step, unit) -> the tile's keys as operands
template <DType type, int steps, int max_units, class Parts, class Words>
__device__ __forceinline__ void lift_pairs(const TurnShared& shared, const uint2* operands, Parts parts, int head_dim, Words&& words, int key_units, int block, float (&x)[steps][4], float (&y)[steps][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, blocks = head_dim / 8, a = block, b = block + blocks / 2;
  const float4* means = reinterpret_cast<const float4*>(shared.numbers) + lane % 4;
  const float4 first = means[4 * a], second = means[4 * b];
  #pragma unroll
  for (int unit = 0; unit < max_units; ++unit) {
    if (unit == 0 || unit < key_units) {  // there is one
      #pragma unroll
      for (int part = 0; part < parts; ++part) {
        const uint2* own = operands + (unit * blocks * 32 + lane) * parts + part;
        const uint2 p = own[a * 32 * parts], q = own[b * 32 * parts];
        #pragma unroll
        for (int i = 0; i < steps; ++i) {
          const uint4 keys = words(i, unit);
          if (unit == 0 && part == 0) {
            mma_plain_onto<type>(x[i], keys, p.x, p.y, first);
            mma_plain_onto<type>(y[i], keys, q.x, q.y, second);
          } else {
            mma_plain<type>(x[i], keys, p.x, p.y);
            mma_plain<type>(y[i], keys, q.x, q.y);
          }
        }
      }
    }
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
