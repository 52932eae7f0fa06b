// SPDX-License-Identifier: Apache-2.0
/// @file cuda/tiles/joint_layout.cuh  Joint values: how codes of a latent lie in a tile, and what
/// an attention call over joint values works in.
///
/// The latent of a row serves all heads of a group. It is a list of its own (LayerView::compressed,
/// behind those of the heads): plain tiles of sixteen rows, or tiles of codes whose scale groups
/// are blocks of 32 channels of equal bits, most first, each block a unit in every plane that its
/// bits have, so that planes are sums of the same channels.
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
  int at[4] =
      {};  ///< bytes of the tile where its units of 8, 4, 2 and 1 bits begin, of those that it has

  /// @brief Bits of a code below those that a plane has.
  __host__ __device__ int shift(int width) const { return bits & (width - 1); }
};

/// @brief Blocks of a scale group of the tiles of a list of joint values.
__host__ __device__ inline int joint_blocks(const HeadTiles& layout, int group) {
  int blocks = 0;
  for (int bits = 8; bits > 0; --bits) blocks += layout.blocks_of(group, bits);
  return blocks;
}

/// @brief Block `index` of those tiles, counted over both scale groups. Cost: a few dozen
/// operations.
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

/// @brief The code of (row, channel of a block) in a tile of codes of joint values.
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

/// @brief Splits of a list of so many rows over joint values, whose partial states are large:
/// points that depend on the list alone.
inline constexpr int kJointSplitRows = 1024, kMaxJointSplits = 64;
__host__ __device__ constexpr int joint_splits(std::int64_t rows) {
  const std::int64_t wanted = (rows + kJointSplitRows - 1) / kJointSplitRows;
  return static_cast<int>(wanted < kMaxJointSplits ? wanted : kMaxJointSplits);
}

inline constexpr int kJointColumns =
    32;  ///< columns of a group, those of its heads one after the other, that a block serves
inline constexpr int kJointChunks = 8;  ///< times so many columns, at most, in one launch
inline constexpr int kJointLines =
    6;  ///< of a partial state before its values: maximum, sum, sums of weights with the gains of
        ///< two scale groups, what those and the values count, as powers of 2

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
