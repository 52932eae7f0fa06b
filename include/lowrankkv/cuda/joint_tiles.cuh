// SPDX-License-Identifier: Apache-2.0
/// @file cuda/joint_tiles.cuh  Joint values: how codes of a latent lie in a tile, and what an attention call over joint values works in.
///
/// The latent of a row serves all heads of a group. It is a list of its own (Tables::compressed, behind those of the heads): plain tiles of sixteen rows, or tiles of codes
/// whose scale groups are blocks of 32 channels, each block a unit in every plane that the group's bits have, so that planes are sums of the same channels.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "lowrankkv/cuda/attention_step.cuh"
#include "lowrankkv/cuda/tile_layout.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief One scale group of a tile of codes of joint values.
struct JointCodes {
  int blocks = 0;  ///< of 32 channels
  int bits = 0;    ///< of their codes: the sum of its planes' widths
  int offset = 0;  ///< byte of the tile where its codes begin

  /// @brief Byte of the tile where a plane of it begins: wider ones come first.
  __host__ __device__ int plane(int width) const {
    int at = offset;
    for (int wider = 8; wider > width; wider /= 2) at += (bits & wider) != 0 ? blocks * code_unit_bytes(wider) : 0;
    return at;
  }
  /// @brief Bits of a code below those that a plane has.
  __host__ __device__ int shift(int width) const { return bits & (width - 1); }
};

/// @brief Scale group `group` of the tiles of a list of joint values.
__host__ __device__ inline JointCodes joint_codes(const HeadTiles& layout, int group) {
  const auto of = [](std::int32_t packed) {
    const unsigned pattern = static_cast<unsigned>(packed);
    JointCodes codes;
    for (int place = 0, width = 8; place < 32; place += 8, width /= 2) {
      const int count = static_cast<int>(pattern >> place & 0xffU);
      codes.blocks = count > codes.blocks ? count : codes.blocks;
      codes.bits += count > 0 ? width : 0;
    }
    return codes;
  };
  JointCodes codes = of(layout.first_value_pattern);
  codes.offset = layout.value_offset;
  if (group == 0) return codes;
  const int begin = codes.offset + codes.blocks * code_unit_bytes(1) * codes.bits;
  codes = of(layout.value_pattern - layout.first_value_pattern);
  codes.offset = begin;
  return codes;
}

/// @brief The code of (row, channel of a block) in a tile of codes of joint values.
__device__ inline unsigned joint_code(const std::uint8_t* tile, const JointCodes& codes, int block, int row, int channel) {
  unsigned code = 0;
  for (int width = 8; width > 0; width /= 2) {
    if ((codes.bits & width) == 0) continue;
    const CodePlace place = value_place(width, row, channel);
    const unsigned word = *reinterpret_cast<const std::uint32_t*>(tile + codes.plane(width) + block * code_unit_bytes(width) + place.word);
    code |= (word >> place.shift & ((1U << width) - 1U)) << codes.shift(width);
  }
  return code;
}

/// @brief Splits of a list of so many rows over joint values, whose partial states are large: points that depend on the list alone.
inline constexpr int kJointSplitRows = 1024, kMaxJointSplits = 64;
__host__ __device__ constexpr int joint_splits(std::int64_t rows) {
  const std::int64_t wanted = (rows + kJointSplitRows - 1) / kJointSplitRows;
  return static_cast<int>(wanted < kMaxJointSplits ? wanted : kMaxJointSplits);
}

inline constexpr int kJointColumns = 32;  ///< columns of a group, those of its heads one after the other, that a block serves
inline constexpr int kJointChunks = 8;    ///< times so many columns, at most, in one launch
inline constexpr int kJointLines = 6;     ///< of a partial state before its values: maximum, sum, sums of weights with the gains of two scale groups, what those and the values count, as powers of 2

/// @brief Times kJointColumns that the columns of a group fill.
inline int joint_chunks(const AttentionStep& step, int heads) { return (heads * step.columns() + kJointColumns - 1) / kJointColumns; }

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
