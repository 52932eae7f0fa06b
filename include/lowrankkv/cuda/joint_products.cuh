// SPDX-License-Identifier: Apache-2.0
/// @file cuda/joint_products.cuh  What a block of attention over joint values keeps where, and products of latents with the weights of all columns.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/code_products.cuh"
#include "lowrankkv/cuda/joint_tiles.cuh"
#include "lowrankkv/cuda/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kJointWarps = 8, kJointThreads = 32 * kJointWarps;  ///< of a block
inline constexpr int kMaxJointStages = 4;                                 ///< tiles that are on their way
inline constexpr int kJointPairs = kJointColumns / kJointWarps;           ///< pairs of a head and a block of its columns that a warp makes weights for, at most

/// @brief One launch over joint values.
struct JointCall {
  std::int32_t first_chunk = 0, chunks = 0;  ///< of columns
  std::int32_t parts = 0;                    ///< in which the channels of latents are shared out
  std::int32_t splits = 0;                   ///< an upper bound over the batch
  std::int32_t stages = 0;
  std::int32_t key_bytes = 0;                ///< set aside for the keys of a head in a stage
  std::int32_t heads = 0;                    ///< that a chunk of columns may touch
  std::int32_t value_bytes = 0;              ///< set aside for latents in a stage
  std::int32_t pairs = 0;                    ///< of heads and blocks that a chunk may touch
};

/// @brief What is known of a column of a pair of a head and a block of its columns.
struct JointPair {
  float unit = 0.0F, constants[2] = {};  ///< as ColumnScale has them
  float top = -INFINITY, weight[2] = {};  ///< of the state so far
};

/// @brief Where a block has what, in bytes of its shared memory.
struct JointMemory {
  int stage_bytes = 0;  ///< from 0 on: stages
  int weights = 0;      ///< two tiles' [scale groups, tiles of eight columns of products, 32 lanes] operands
  int weight_bytes = 0; ///< of one
  int scales = 0;       ///< two tiles' [scale groups, columns]: what an integer weight counts
  int factors = 0;      ///< two tiles' [columns]: what sums so far count
  int raised = 0;       ///< two tiles' [warps]: whether those are not all 1
  int queries = 0;      ///< [pairs, coded units, 32 lanes]
  int states = 0;       ///< [pairs, kBlockColumns] JointPair, of codes: registers are short
  int bytes = 0;

  __host__ __device__ JointMemory(const JointCall& call, int scale_groups, int coded_units) {
    const auto reserve = [&](int size) {
      const int begin = bytes;
      bytes += (size + 15) / 16 * 16;
      return begin;
    };
    stage_bytes = call.heads * call.key_bytes + call.value_bytes;
    weight_bytes = scale_groups == 0 ? kJointColumns / 8 * 512 : scale_groups * (kJointColumns / 4) * 512;
    reserve(call.stages * stage_bytes);
    weights = reserve(2 * weight_bytes);
    scales = reserve(2 * scale_groups * kJointColumns * 4);
    factors = reserve(2 * kJointColumns * 4);
    raised = reserve(2 * kJointWarps * 4);
    queries = reserve(call.pairs * coded_units * 256);
    states = reserve(scale_groups == 0 ? 0 : call.pairs * kBlockColumns * static_cast<int>(sizeof(JointPair)));
  }
};

namespace detail {

/// A power of two.
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }

/// The operands of sixteen channels, half `half` of a block's, of a plane of `bits` bits over the 64 rows of a tile: rows [0, 32), then [32, 64). All codes of a channel count the same.
template <int bits>
__device__ __forceinline__ void plane_operands(const std::uint8_t* unit, int half, uint4& first, uint4& second) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint4* words = reinterpret_cast<const uint4*>(unit) + lane;
  if constexpr (bits == 8) {
    first = words[64 * half];
    second = words[64 * half + 32];
  } else if constexpr (bits == 4) {
    const uint4 w = words[32 * half];
    first = {w.x & 0x0f0f0f0fU, w.x & 0xf0f0f0f0U, w.y & 0x0f0f0f0fU, w.y & 0xf0f0f0f0U};
    second = {w.z & 0x0f0f0f0fU, w.z & 0xf0f0f0f0U, w.w & 0x0f0f0f0fU, w.w & 0xf0f0f0f0U};
  } else if constexpr (bits == 2) {
    const uint4 w = words[0];
    const std::uint32_t low = 0x03030303U << (4 * half), high = 0x0c0c0c0cU << (4 * half);
    first = {w.x & low, w.x & high, w.y & low, w.y & high};
    second = {w.z & low, w.z & high, w.w & low, w.w & high};
  } else {
    const uint2 w = reinterpret_cast<const uint2*>(unit)[lane];
    const std::uint32_t low = 0x01010101U << (2 * half), high = 0x02020202U << (2 * half);
    first = {w.x & low, w.x & high, w.y & low, w.y & high};
    second = {w.x >> 4 & low, w.x >> 4 & high, w.y >> 4 & low, w.y >> 4 & high};
  }
}

/// out[n][r] += weights x sixteen channels of one plane: channels 8 r + lane / 4 of the half, column 4 n + lane % 4. below: bits of a code below the plane's.
template <int bits>
__device__ __forceinline__ void plane_products(const std::uint8_t* unit, int half, int below, const uint4* weights, const float* scales, int tiles, float (&out)[kJointColumns / 4][2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, t = lane % 4;
  uint4 first, second;
  plane_operands<bits>(unit, half, first, second);
  // How many times a code counts for its place in its byte (value_weight()), and for its plane's place in the code.
  const int place = bits == 8 ? 0 : bits == 4 ? 0 : 2 * bits * half;
  const float low = power_of_two(below - place), high = power_of_two(below - place - (bits == 8 ? 0 : bits));
  #pragma unroll
  for (int n = 0; n < kJointColumns / 4; ++n) {
    if (n >= tiles) break;
    const uint4 w = weights[n * 32 + lane];
    const float scale = scales[4 * n + t];
    int c[4];
    mma_codes_new(c, first.x, first.y, first.z, first.w, w.x, w.y);
    mma_codes(c, second.x, second.y, second.z, second.w, w.z, w.w);
    out[n][0] = fmaf(static_cast<float>(c[0] * 256 + c[1]), scale * low, out[n][0]);
    out[n][1] = fmaf(static_cast<float>(c[2] * 256 + c[3]), scale * high, out[n][1]);
  }
}

/// The same of all planes of a scale group's codes.
__device__ __forceinline__ void joint_products(const std::uint8_t* tile, const JointCodes& codes, int block, int half, const uint4* weights, const float* scales, int tiles,
                                               float (&out)[kJointColumns / 4][2]) {
  if ((codes.bits & 8) != 0) plane_products<8>(tile + codes.plane(8) + block * code_unit_bytes(8), half, 0, weights, scales, tiles, out);
  if ((codes.bits & 4) != 0) plane_products<4>(tile + codes.plane(4) + block * code_unit_bytes(4), half, codes.shift(4), weights, scales, tiles, out);
  if ((codes.bits & 2) != 0) plane_products<2>(tile + codes.plane(2) + block * code_unit_bytes(2), half, codes.shift(2), weights, scales, tiles, out);
  if ((codes.bits & 1) != 0) plane_products<1>(tile + codes.plane(1) + block * code_unit_bytes(1), half, 0, weights, scales, tiles, out);
}

}  // namespace detail
}  // namespace cuda
LOWRANKKV_NAMESPACE_END
