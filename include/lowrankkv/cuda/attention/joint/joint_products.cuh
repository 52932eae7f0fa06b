// SPDX-License-Identifier: Apache-2.0
/// @file cuda/attention/joint/joint_products.cuh  Shared-memory layout of a block of attention over
/// joint values, and latents as operands of products with the weights of all columns.
///
/// Codes become operands of 16-bit products without a conversion: a code read as the bits of an f16
/// is exactly 2^-24 times its value.
#pragma once

#include <cstdint>
#include <type_traits>

#include "lowrankkv/cuda/state/attention_step.cuh"
#include "lowrankkv/cuda/tiles/joint_layout.cuh"
#include "lowrankkv/cuda/tiles/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Warps of a block. Codes take more registers a warp.
__host__ __device__ constexpr int joint_warps(int scale_groups) {
  return scale_groups > 0 ? 12 : 16;
}
/// @brief Most warps of a block of attend_joint_kernel, and warps of fold_joint_kernel.
inline constexpr int kMostJointWarps = 16, kFoldWarps = 8;
inline constexpr int kMaxJointStages = 4;          ///< iterations in flight
inline constexpr float kCodeUnitExponent = 24.0F;  ///< log2 of the code over its operand

/// @brief Parameters of one launch over joint values.
struct JointCall {
  std::int32_t first_chunk = 0, chunks = 0;  ///< of columns
  std::int32_t parts = 0;                    ///< parts of the channels of latents
  std::int32_t splits = 0;                   ///< upper bound over the batch
  std::int32_t steps = 0;                    ///< times sixteen rows of an iteration
  std::int32_t stages = 0;
  std::int32_t buffers = 0;      ///< of weights: 2, or 1 if shared memory is short
  std::int32_t key_bytes = 0;    ///< reserved for the keys of a head in a stage
  std::int32_t heads = 0;        ///< most heads that a chunk of columns covers
  std::int32_t value_bytes = 0;  ///< reserved for latents in a stage
  std::int32_t pairs = 0;        ///< most pairs (head, block) of a chunk
};

/// @brief Scale and running state of a column of a pair (head, block of its columns).
struct JointPair {
  float unit = 0.0F, constants[2] = {};  ///< as in ColumnScale
  float top = -INFINITY;                 ///< maximum of the state so far
  /// By scale group: weights with gains are relative to 2^reference.
  float reference[2] = {-120.0F, -120.0F};
};

/// @brief Layout of a block's shared memory, as byte offsets.
struct JointMemory {
  int stage_bytes = 0;  ///< the stages begin at byte 0
  /// [buffers, groups of gains, steps, tiles of eight columns, 32 lanes] operands
  int weights = 0;
  int weight_bytes = 0;  ///< of one buffer
  int factors = 0;       ///< [buffers, groups of gains, columns]: factors of the sums so far
  int raised = 0;        ///< [buffers, warps]: whether some factor is not 1
  int queries = 0;       ///< [pairs, coded units, 32 lanes]
  /// [pairs, kBlockColumns] JointPair; only for codes, where registers are short
  int states = 0;
  int bytes = 0;

  __host__ __device__ JointMemory(const JointCall& call, int scale_groups, int coded_units) {
    const auto reserve = [&](int size) {
      const int begin = bytes;
      bytes += (size + 15) / 16 * 16;
      return begin;
    };
    const int groups = scale_groups == 2 ? 2 : 1;
    stage_bytes = call.heads * call.key_bytes + call.value_bytes;
    weight_bytes = groups * call.steps * (kJointColumns / 8) * 512;
    reserve(call.stages * stage_bytes);
    weights = reserve(call.buffers * weight_bytes);
    factors = reserve(call.buffers * groups * kJointColumns * 4);
    raised = reserve(call.buffers * kMostJointWarps * 4);
    queries = reserve(call.pairs * coded_units * 256);
    states = reserve(
        scale_groups == 0 ? 0 : call.pairs * kBlockColumns * static_cast<int>(sizeof(JointPair)));
  }
};

namespace detail {

/// The operand, channels x rows, of rows [16 m, 16 m + 16) and the sixteen channels in half `half`
/// of a block of codes. Bytes of a word are rows 2t, 2t + 8, 2t + 1, 2t + 9 (tile_layout.cuh).
/// @tparam planes  widths of the planes that exist, as a bit mask; 0: given by `bits`
/// @param at  byte offsets of the block's units of 8, 4, 2 and 1 bits in the tile
template <int planes>
__device__ __forceinline__ uint4 joint_operand(const std::uint8_t* tile, const int* at, int bits,
                                               int half, int m) {
  const auto has = [&](int width) {
    return planes != 0 ? (planes & width) != 0 : (bits & width) != 0;
  };
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (has(8)) {
    const std::uint32_t* words = reinterpret_cast<const std::uint32_t*>(tile + at[0] + 1024 * half +
                                                                        512 * (m / 2) + 16 * lane) +
                                 2 * (m % 2);
    const std::uint32_t low = words[0], high = words[1];
    return {low & 0x00ff00ffU, high & 0x00ff00ffU, low >> 8 & 0x00ff00ffU, high >> 8 & 0x00ff00ffU};
  }
  const std::uint32_t four =
      has(4) ? reinterpret_cast<const std::uint32_t*>(tile + at[1] + 512 * half + 16 * lane)[m]
             : 0U;
  const std::uint32_t two =
      has(2) ? reinterpret_cast<const std::uint32_t*>(tile + at[2] + 16 * lane)[m] >> (4 * half)
             : 0U;
  const std::uint32_t one =
      has(1) ? reinterpret_cast<const std::uint32_t*>(tile + at[3] + 8 * lane)[m % 2] >>
                   (4 * (m / 2) + 2 * half)
             : 0U;
  // Channels g and g + 8 of rows 2t, 2t + 1; then of the rows eight further on.
  std::uint32_t all[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int second = i % 2, byte = 8 * (i / 2);
    if (has(4)) all[i] = four >> (4 * second + byte) & 0x000f000fU;
    if (has(2)) all[i] = all[i] * 4U + (two >> (2 * second + byte) & 0x00030003U);
    if (has(1)) all[i] = all[i] * 2U + (one >> (second + byte) & 0x00010001U);
  }
  return {all[0], all[1], all[2], all[3]};
}

/// out[n] += sixteen channels x the weights of eight columns, for one step of rows: first the high
/// parts of the weights, then the low parts.
template <DType type>
__device__ __forceinline__ void add_products(const uint4& a,
                                             const uint4 (&weights)[kJointColumns / 8], int tiles,
                                             float (&out)[kJointColumns / 8][4]) {
  const auto add = [&](auto all) {
#pragma unroll
    for (int n = 0; n < kJointColumns / 8; ++n) {
      if (decltype(all)::value || n < tiles) mma_plain<type>(out[n], a, weights[n].x, weights[n].y);
    }
#pragma unroll
    for (int n = 0; n < kJointColumns / 8; ++n) {
      if (decltype(all)::value || n < tiles) mma_plain<type>(out[n], a, weights[n].z, weights[n].w);
    }
  };
  if (tiles == kJointColumns / 8)
    add(std::true_type{});
  else
    add(std::false_type{});
}

}  // namespace detail
}  // namespace cuda
LOWRANKKV_NAMESPACE_END
