// SPDX-License-Identifier: Apache-2.0
/// @file cuda/tiles/joint_layout.cuh  Joint values: the tile layout of latent codes, and the sizes
/// of attention's partial states.
///
/// All heads of a group share one latent per row. Latents are stored in lists of their own, whose
/// layouts follow those of the heads in LayerView::compressed. Their tiles are plain tiles of
/// sixteen rows, or tiles of codes. In a tile of codes, a scale group consists of blocks of 32
/// channels of equal bits, blocks of most bits first. A block has one unit in every plane that its
/// bits have, so that all planes are sums of the same channels.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "lowrankkv/cuda/runtime/forms.cuh"
#include "lowrankkv/cuda/tiles/tile_layout.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief One block of a tile of codes of joint values.
struct JointBlock {
  int bits = 0;  ///< of its codes: the sum of its planes' widths
  /// Byte offsets in the tile of the block's units of 8, 4, 2 and 1 bits; only those set in `bits`
  /// are meaningful.
  int at[4] = {};

  /// @brief Lowest bit of a code that the plane of `width` bits holds.
  __host__ __device__ int shift(int width) const { return bits & (width - 1); }
};

/// @brief Number of blocks of a scale group, in tiles of joint values.
__host__ __device__ inline int joint_blocks(const HeadTiles& layout, int group) {
  int blocks = 0;
  for (int bits = 8; bits > 0; --bits) blocks += layout.blocks_of(group, bits);
  return blocks;
}

/// @brief Block `index` of a tile of joint values, counted over both scale groups. Cost: a few
/// dozen operations.
__host__ __device__ inline JointBlock joint_block(const HeadTiles& layout, int index) {
  const int first = joint_blocks(layout, 0), group = index < first ? 0 : 1;
  if (group == 1) index -= first;
  JointBlock block;
  int before = 0;  // blocks, of more bits
  for (block.bits = 8; before + layout.blocks_of(group, block.bits) <= index; --block.bits)
    before += layout.blocks_of(group, block.bits);
  int begin = layout.value_offset;
  for (int bits = 8; group == 1 && bits > 0; --bits)
    begin += layout.blocks_of(0, bits) * code_unit_bytes(bits);
  for (int plane = 0, width = 8; plane < 4; ++plane, width /= 2) {
    int all = 0, earlier = 0;  // units of the plane
    for (int bits = 8; bits > 0; --bits) {
      if ((bits & width) == 0) continue;
      all += layout.blocks_of(group, bits);
      earlier += bits > block.bits    ? layout.blocks_of(group, bits)
                 : bits == block.bits ? index - before
                                      : 0;
    }
    block.at[plane] = begin + earlier * code_unit_bytes(width);
    begin += all * code_unit_bytes(width);
  }
  return block;
}

/// @brief Reassembles the code of (row, channel of a block) from the planes of a tile of joint
/// values.
__device__ inline unsigned joint_code(const std::uint8_t* tile, const JointBlock& block, int row,
                                      int channel) {
  unsigned code = 0;
  for (int plane = 0, width = 8; plane < 4; ++plane, width /= 2) {
    if ((block.bits & width) == 0) continue;
    const CodePlace place = value_place(width, row, channel);
    const unsigned word =
        *reinterpret_cast<const std::uint32_t*>(tile + block.at[plane] + place.word);
    code |= (word >> place.shift & ((1U << width) - 1U)) << block.shift(width);
  }
  return code;
}

/// @brief Rows of a split of a list of joint values, and the most splits: longer lists have
/// kMaxJointSplits splits, since partial states are large. Split points depend on the list alone.
inline constexpr int kJointSplitRows = 1024, kMaxJointSplits = 64;
/// @brief Number of splits of a list of joint values with so many rows.
__host__ __device__ constexpr int joint_splits(std::int64_t rows) {
  const std::int64_t wanted = (rows + kJointSplitRows - 1) / kJointSplitRows;
  return static_cast<int>(wanted < kMaxJointSplits ? wanted : kMaxJointSplits);
}

/// Columns of a group that a thread block serves. The columns of a group are those of its heads,
/// head after head.
inline constexpr int kJointColumns = 32;
/// Largest number of chunks of kJointColumns columns in one launch.
inline constexpr int kJointChunks = 8;
/// Lines of a partial state ahead of its values: maximum; sum; for each of two scale groups the sum
/// of weights times gains; for each the power of 2 that scales this sum and the values (its
/// exponent).
inline constexpr int kJointLines = 6;

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
