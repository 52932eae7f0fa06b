// SPDX-License-Identifier: Apache-2.0
/// @file cuda/tiles/tile_layout.cuh  Memory layout of tiles: tensor-core operands that the lanes of
/// a warp load without rearrangement.
///
/// A plain tile holds 16, 32 or 64 rows of one KV head in f16 or bf16. The keys come first, then
/// the values. Each part is stored 16 rows after 16 rows, in units of 16 channels. A unit is one A
/// operand of mma.m16n8k16, lane after lane, 16 bytes a lane. Its matrix is rows x channels for
/// keys, channels x rows for values.
///
/// A scaled plain tile holds the same in 8 bits. First come the steps of its rows in f16, those of
/// the keys, then those of the values. The units follow, with one byte in place of every 16-bit
/// element. Code c of a row of step s stands for (c - 127.5) s.
///
/// A tile of codes holds 64 rows. First come 64 gains of the keys and 64 of the values, 8 bits each
/// or f16. With two scale groups every row has two gains, and the gains of the second group follow
/// those of the first. Then come the codes of the keys and those of the values, scale group after
/// scale group, in units of 32 planes. All planes of a unit have one width: 8, 4, 2 or 1 bits; a
/// unit takes 256 bytes per bit.
///
/// A unit of codes holds operands of mma.m16n8k32 (u8 x s8). One AND turns four codes into an
/// operand register, without shifts or conversions. A code at bit p of its byte is scaled by 2^p.
/// Codes of equal p are chosen so that removing this factor costs nothing. For keys, p depends on
/// the row: the factor is removed from the row's logits. For values, p depends on the channel, and
/// the factor is removed from the output; for 1 bit, p also depends on the half of the rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/config.hpp"
#include "lowrankkv/cuda/runtime/forms.cuh"
#include "lowrankkv/quantizer/code_layout.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Byte offset of element (row, channel) in a unit of a plain tile.
__host__ __device__ constexpr int plain_place(Part part, int row, int channel) {
  const int m = part == Part::key ? row : channel,
            k = part == Part::key ? channel : row;  // A is [m, k]
  return 16 * (m % 8 * 4 + k % 8 / 2) + 4 * (m / 8 + 2 * (k / 8)) + 2 * (k % 2);
}

/// @brief Tile layout of one list of one KV head, or of the joint values of a group of heads.
struct HeadTiles {
  bool codes = false;                      ///< tiles of codes; else plain ones
  bool scaled = false;                     ///< plain tiles in 8 bits
  ScaleKind gains = ScaleKind::norm_log8;  ///< of rows, tiles of codes only
  /// Whether rows have keys, values. With joint values, lists of heads have only keys, lists of
  /// groups only values.
  bool keys = true, values = true;
  std::int32_t rows = 0;  ///< of a tile
  /// Of a tile: a multiple of 128; in tiles of codes of keys alone, or of joint values, a multiple
  /// of 64.
  std::int32_t bytes = 0;
  std::int32_t tiles_per_page = 0;
  std::int32_t key_units = 0, value_units = 0;
  std::int32_t key_offset = 0, value_offset = 0;  ///< byte offsets of their units in a tile
  /// Bits of the codes of every unit of keys. Tiles of codes only.
  std::uint8_t key_widths[kMaxUnits] = {};
  /// The same for values. Joint values, which may have more units, keep their numbers of blocks
  /// here: blocks_of().
  std::uint8_t value_widths[kMaxUnits] = {};
  std::int32_t key_pattern = 0, value_pattern = 0;  ///< code_pattern() of the widths
  /// Gains of a row's key, and of its value: 1 or 2. Tiles of codes only.
  std::int32_t scale_groups = 1;
  /// Units of the first scale group: all of them, if there is only one group.
  std::int32_t first_key_units = 0, first_value_units = 0;
  /// code_pattern() of the widths of these units.
  std::int32_t first_key_pattern = 0, first_value_pattern = 0;

  /// @brief Joint values: number of blocks of a scale group whose codes have so many bits, 1 to 8
  /// (cuda/tiles/joint_layout.cuh).
  __host__ __device__ int blocks_of(int group, int bits) const {
    return value_widths[8 * group + bits - 1];
  }
  /// @brief Bytes of a gain.
  __host__ __device__ std::int32_t gain_bytes() const {
    return gains == ScaleKind::norm_log8 ? 1 : 2;
  }
  /// @brief Byte offset of a row's gain for one scale group in a tile of codes.
  __host__ __device__ std::int32_t gain_place(Part part, int row, int group = 0) const {
    return (((part == Part::key || !keys ? 0 : scale_groups) + group) * kCodeRows + row) *
           gain_bytes();
  }
  /// @brief Bits of the codes of a unit.
  __host__ __device__ int width(Part part, int unit) const {
    return part == Part::key ? key_widths[unit] : value_widths[unit];
  }
  __host__ __device__ std::int32_t units(Part part) const {
    return part == Part::key ? key_units : value_units;
  }
  /// @brief Units of the first scale group.
  __host__ __device__ std::int32_t first_units(Part part) const {
    return part == Part::key ? first_key_units : first_value_units;
  }
  /// @brief Numbers of a column's partial state besides its maximum, its sum and its first sum of
  /// weights: the values, and with two scale groups a second sum of weights.
  __host__ __device__ std::int32_t state_lines() const {
    return channels(Part::value) + scale_groups - 1;
  }
  __host__ __device__ std::int32_t unit_channels() const { return codes ? kCodeUnit : kPlainUnit; }
  __host__ __device__ std::int32_t channels(Part part) const {
    return unit_channels() * (part == Part::key ? key_units : value_units);
  }
  /// @brief Pages that so many rows need.
  std::int64_t pages_for(std::int64_t row_count) const {
    const std::int64_t per_page = std::int64_t{rows} * tiles_per_page;
    return (row_count + per_page - 1) / per_page;
  }
  __host__ __device__ std::int32_t offset(Part part) const {
    return part == Part::key ? key_offset : value_offset;
  }
  /// @brief Byte offset of element (row, channel) in a plain tile.
  __host__ __device__ std::int32_t plain_byte(Part part, int row, int channel) const {
    const int unit =
        row / kPlainRows * (part == Part::key ? key_units : value_units) + channel / kPlainUnit;
    const int place = plain_place(part, row % kPlainRows, channel % kPlainUnit);
    return offset(part) +
           (scaled ? (unit * kPlainUnitBytes + place) / 2 : unit * kPlainUnitBytes + place);
  }
  /// @brief Byte offset of the step of a row's key, or of its value, in a scaled plain tile.
  __host__ __device__ std::int32_t step_byte(Part part, int row) const {
    return 2 * ((part == Part::key ? 0 : rows) + row);
  }
};

/// @brief Rows of a plain tile, in multiples of 16, when its keys or values fill so many units.
__host__ __device__ constexpr int plain_steps(int units) {
  return units <= 2 ? 4 : units <= 4 ? 2 : 1;
}
/// @brief As plain_steps(), for pre-RoPE keys: tiles are larger, since there is more work per tile.
__host__ __device__ constexpr int rotated_steps(int units) { return units <= 8 ? 4 : 2; }

/// @brief Bytes of a unit of codes of so many bits each.
__host__ __device__ constexpr int code_unit_bytes(int bits) {
  return kCodeRows * kCodeUnit / 8 * bits;
}

/// @brief Packs the counts of units of 8, 4, 2 and 1 bits into one number.
__host__ __device__ constexpr int code_pattern(int n8, int n4, int n2, int n1) {
  return n8 | n4 << 8 | n2 << 16 | n1 << 24;
}
/// @brief The packed counts of a list of widths.
__host__ __device__ constexpr int code_pattern(const std::uint8_t* widths, int units) {
  int pattern = 0;
  for (int unit = 0; unit < units; ++unit)
    pattern += widths[unit] == 8   ? code_pattern(1, 0, 0, 0)
               : widths[unit] == 4 ? code_pattern(0, 1, 0, 0)
               : widths[unit] == 2 ? code_pattern(0, 0, 1, 0)
                                   : code_pattern(0, 0, 0, 1);
  return pattern;
}

/// @brief Where a code lies in its unit: the byte offset of its 32-bit word, and the code's lowest
/// bit in this word.
struct CodePlace {
  int word = 0;
  int shift = 0;
};

/// @brief Place of the code of (row, channel) in a unit of keys. Channel k is in register k / 16,
/// lane k % 16 / 4 of its row, byte k % 4.
__host__ __device__ constexpr CodePlace key_place(int bits, int row, int channel) {
  const int block = row / 16, half = row % 16 / 8, lane = row % 8 * 4 + channel % 16 / 4,
            deep = channel / 16, byte = 8 * (channel % 4);
  if (bits == 8) return {512 * block + 16 * lane + 4 * (half + 2 * deep), byte};
  if (bits == 4)
    return {512 * (block / 2) + 16 * lane + 4 * (half + 2 * deep), byte + 4 * (block % 2)};
  if (bits == 2) return {16 * lane + 4 * (half + 2 * deep), byte + 2 * block};
  return {8 * lane + 4 * deep, byte + 2 * block + half};
}

/// @brief Place of the code of (row, channel) in a unit of values. The bytes of a word are rows 2t,
/// 2t + 8, 2t + 1, 2t + 9 of 16 rows: the order in which the logits' registers hold the weights.
__host__ __device__ constexpr CodePlace value_place(int bits, int row, int channel) {
  const int step = row / 32, half = row / 16 % 2, byte = 8 * (2 * (row % 2) + row % 16 / 8),
            lane = channel % 8 * 4 + row % 8 / 2;
  if (bits == 8)
    return {1024 * (channel / 16) + 512 * step + 16 * lane + 4 * (2 * half + channel % 16 / 8),
            byte};
  if (bits == 4)
    return {512 * (channel / 16) + 16 * lane + 4 * (2 * step + half),
            byte + 4 * (channel % 16 / 8)};
  if (bits == 2) return {16 * lane + 4 * (2 * step + half), byte + 2 * (channel / 8)};
  return {8 * lane + 4 * half, byte + 4 * step + channel / 8};
}

/// @brief Row and channel of a code in its unit.
struct CodeIndex {
  int row = 0;
  int channel = 0;
};

/// @brief Row and channel of the code in bits [bits q, bits (q + 1)) of byte `byte` of word `word`
/// of a unit of keys: the inverse of key_place().
__host__ __device__ constexpr CodeIndex key_code(int bits, int word, int q, int byte) {
  const int lane = bits == 1 ? word / 2 : word / 4 % 32, low = bits == 1 ? word % 2 : word % 4,
            high = bits == 1 ? 0 : word / 128;
  const int block = bits == 8   ? high
                    : bits == 4 ? 2 * high + q
                    : bits == 2 ? q
                                : q / 2,
            half = bits == 1 ? q % 2 : low % 2, deep = bits == 1 ? low : low / 2;
  return {16 * block + 8 * half + lane / 4, 16 * deep + 4 * (lane % 4) + byte};
}
/// @brief Row and channel of a code in a unit of values: the inverse of value_place(). Arguments as
/// for key_code().
__host__ __device__ constexpr CodeIndex value_code(int bits, int word, int q, int byte) {
  const int lane = bits == 1 ? word / 2 : word / 4 % 32, low = bits == 1 ? word % 2 : word % 4,
            high = bits == 1 ? 0 : word / 128;
  const int step = bits == 8   ? high % 2
                   : bits == 1 ? q / 4
                               : low / 2,
            half = bits == 8   ? low / 2
                   : bits == 1 ? low
                               : low % 2;
  const int eighth = bits == 8   ? 2 * (high / 2) + low % 2
                     : bits == 4 ? 2 * high + q
                     : bits == 2 ? q
                                 : q % 4;
  return {32 * step + 16 * half + 2 * (lane % 4) + byte / 2 + 8 * (byte % 2),
          8 * eighth + lane / 4};
}

/// @brief The factor 2^p by which sums over a tile scale a value channel, from its place in its
/// byte. Maps of values are divided by it.
__host__ __device__ constexpr int value_weight(int bits, int channel) {
  const int eighth = channel % kCodeUnit / 8;
  return 1 << (bits == 8 ? 0 : bits == 4 ? 4 * (eighth % 2) : bits * eighth);
}

/// @brief The value channel, of 4 or 2 bits, whose code lies just below this channel's code in its
/// byte. -1: there is none, or the sums over a tile do not contain it.
__host__ __device__ constexpr int channel_below(int bits, int channel) {
  return (bits == 4 && channel % 16 >= 8) || (bits == 2 && channel % kCodeUnit >= 8) ? channel - 8
                                                                                     : -1;
}

/// @brief Rows of a split of a list, and the most splits: longer lists have kMaxSplits equal
/// splits. Split points depend on the list alone, so that results do not depend on the batch.
inline constexpr int kSplitRows = 2048;
inline constexpr int kMaxSplits = 32;
/// @brief Number of splits of a list with so many rows.
__host__ __device__ constexpr int splits_of(std::int64_t rows) {
  const std::int64_t wanted = (rows + kSplitRows - 1) / kSplitRows;
  return static_cast<int>(wanted < kMaxSplits ? wanted : kMaxSplits);
}
/// @brief Number of splits of a list with so many full rows. Short lists of post-RoPE keys have
/// finer splits, since a block waits for its tiles one after the other.
/// @param pre_rope  whether attention applies RoPE when it reads the keys
__host__ __device__ constexpr int full_splits_of(std::int64_t rows, bool pre_rope) {
  constexpr std::int64_t size = 256, most = 8;
  const std::int64_t fine = (rows + size - 1) / size < most ? (rows + size - 1) / size : most;
  return pre_rope || splits_of(rows) > fine ? splits_of(rows) : static_cast<int>(fine);
}
/// @brief Number of splits of a segment of `rows` rows in a list of `total` rows. They are as large
/// as the splits of the list.
__host__ __device__ constexpr int segment_splits(std::int64_t rows, std::int64_t total) {
  const std::int64_t share = (total + kMaxSplits - 1) / kMaxSplits,
                     size = share > kSplitRows ? share : kSplitRows;
  return static_cast<int>((rows + size - 1) / size);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
