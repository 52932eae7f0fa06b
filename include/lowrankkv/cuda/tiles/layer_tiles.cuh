// SPDX-License-Identifier: Apache-2.0
/// @file cuda/tiles/layer_tiles.cuh  Which tiles a layer's lists are made of, found from maps and
/// policies on the host.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/cuda/runtime/forms.cuh"
#include "lowrankkv/cuda/tiles/tile_layout.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief What the tiles of a layer are, found from maps and policies on the host.
struct LayerTiles {
  CodedForm form = CodedForm::none;
  DType coded_type = DType::f16;  ///< of plain tiles of coefficients
  HeadTiles full;                 ///< of tails and of prompts that are taken in
  HeadTiles listed;               ///< of full rows in pages: the same, or scaled
  std::vector<HeadTiles>
      compressed;  ///< per head, then, with joint values, per group; empty: nothing is compressed
  bool orders = false;  ///< bases move, and channels of codes must stay those of principal axes
                        ///< then: the two below
  std::vector<std::vector<float>>
      units;  ///< per head: keys, values: the quantizer's steps of coefficients of rms 1, 0 where
              ///< there are no bits; empty: no steps
  std::vector<std::vector<float>> rotations;  ///< the same: of axes into channels; empty: none
  int joint_heads = 0;                        ///< of a group whose values are one latent; 0: none
  std::vector<PartTiles> parts;               ///< per head: keys, values
  std::vector<std::vector<float>> steps;      ///< the same
  std::size_t page_bytes = 0;

  int max_units(Part part) const {
    int most = 0;
    for (const HeadTiles& tiles : compressed)
      most = (std::max)(most, part == Part::key ? tiles.key_units : tiles.value_units);
    return most;
  }
  int max_tile_bytes() const {
    int most = 0;
    for (const HeadTiles& tiles : compressed) most = (std::max)(most, tiles.bytes);
    return most;
  }
  /// @brief The same of the tiles of heads.
  int max_head_tile_bytes() const {
    int most = 0;
    for (const HeadTiles& tiles : compressed) most = (std::max)(most, tiles.keys ? tiles.bytes : 0);
    return most;
  }
  /// @brief Channels of a latent as attention sums them, the most of a group of heads; of latents
  /// without bits, whose weights are wanted all the same, a unit's.
  int joint_width() const {
    int most = joint_heads > 0 ? kPlainUnit : 0;
    for (std::size_t part = 1; part < parts.size(); part += 2)
      most = (std::max)(most, static_cast<int>(parts[part].readers.size()));
    for (const HeadTiles& tiles : compressed)
      most = (std::max)(most, tiles.keys || tiles.codes ? 0 : tiles.channels(Part::value));
    return most;
  }
};

/// @brief Of which lists the positions of rows are kept, since they do not follow from counts;
/// whether errors of rows are wanted, or the attention that they have received.
struct ListedRows {
  bool full = false, compressed = false, errors = false, accumulated_scores = false;
  /// @brief Where masses are kept: the list of rows that they choose.
  constexpr RowList scored() const { return compressed ? RowList::compressed : RowList::full; }
  /// @brief Whether rows of a list go when others have received more: full ones too, where errors
  /// choose them among those that masses do.
  constexpr bool has_scores(RowList list) const {
    return accumulated_scores && (list == scored() || errors);
  }
};

/// @brief Rows that the lists of a sequence may have at most.
struct MostRows {
  std::int64_t full = 0, compressed = 0;
  std::int64_t spare_full = 0;  ///< that tables have room for besides: heads differ after tokens
                                ///< have gone from among rows that errors chose
};

/// @brief Units that so many channels fill in a plain tile.
constexpr int plain_units(int channels) { return (channels + kPlainUnit - 1) / kPlainUnit; }

/// @brief Plain tiles of rows with so many channels, where the widest of the layer's heads fill
/// `most_units` units: of about 8 KiB, so that what is done once a tile weighs little; of more
/// where keys are turned when they are read.
inline HeadTiles plain_tiles(int key_channels, int value_channels, int most_units, bool pre_rope) {
  HeadTiles tiles;
  tiles.key_units = plain_units(key_channels);
  tiles.value_units = plain_units(value_channels);
  tiles.rows = kPlainRows * (pre_rope ? rotated_steps(most_units) : plain_steps(most_units));
  tiles.value_offset = tiles.rows / kPlainRows * tiles.key_units * kPlainUnitBytes;
  tiles.bytes = tiles.rows / kPlainRows * (tiles.key_units + tiles.value_units) * kPlainUnitBytes;
  return tiles;
}

/// @brief Plain tiles in 8 bits.
inline HeadTiles scaled_tiles(HeadTiles tiles) {
  constexpr std::int32_t kAlignment = 128;
  const std::int32_t steps = tiles.rows / kPlainRows;
  tiles.scaled = true;
  tiles.key_offset =
      (tiles.step_byte(Part::value, tiles.rows) + kAlignment - 1) / kAlignment * kAlignment;
  tiles.value_offset = tiles.key_offset + steps * tiles.key_units * kPlainUnitBytes / 2;
  tiles.bytes = tiles.value_offset + steps * tiles.value_units * kPlainUnitBytes / 2;
  return tiles;
}

/// @brief Plain tiles of so many channels of joint values. Sixteen rows: they are wide.
inline HeadTiles joint_plain_tiles(int channels) {
  HeadTiles tiles;
  tiles.keys = false;
  tiles.value_units = plain_units(channels);
  tiles.rows = kPlainRows;
  tiles.bytes = tiles.value_units * kPlainUnitBytes;
  return tiles;
}

/// @brief Tiles of codes of joint values: the planes of a block have their channels in the same
/// places (cuda/tiles/joint_layout.cuh).
inline HeadTiles joint_code_tiles(const PartTiles& value, int scale_groups) {
  static_assert(kMaxUnits == 2 * 8);  // blocks are counted by scale group and bits
  HeadTiles tiles;
  tiles.codes = true;
  tiles.keys = false;
  tiles.rows = kCodeRows;
  tiles.gains = value.gains;
  tiles.scale_groups = scale_groups;
  tiles.value_units = static_cast<std::int32_t>(value.widths.size());
  tiles.first_value_units = value.first_units;
  tiles.value_pattern = code_pattern(value.widths.data(), tiles.value_units);
  tiles.first_value_pattern = code_pattern(value.widths.data(), value.first_units);
  tiles.value_offset = tiles.key_offset = scale_groups * kCodeRows * tiles.gain_bytes();
  tiles.bytes = tiles.value_offset;
  for (const std::uint8_t width : value.widths) tiles.bytes += code_unit_bytes(width);
  for (std::size_t channel = 0; channel < value.readers.size(); channel += kCodeUnit) {
    const TileChannel& first = value.readers[channel];
    ++tiles.value_widths[(scale_groups == 2 && first.source >= value.first_coded ? 8 : 0) +
                         first.bits - 1];
  }
  return tiles;
}

/// @brief The tiles of a head whose values are joint: its keys alone.
inline HeadTiles keys_only(HeadTiles tiles) {
  const std::int32_t less =
      tiles.codes ? tiles.scale_groups * kCodeRows * tiles.gain_bytes() : 0;  // the values' gains
  tiles.values = false;
  tiles.key_offset -= less;
  tiles.value_offset -= less;
  tiles.bytes = tiles.value_offset;
  return tiles;
}

/// @brief Tiles of codes. @param scale_groups  gains of a row and part, 1 or 2: the same in all
/// heads  @throws CapacityError beyond kMaxUnits
inline HeadTiles code_tiles(const PartTiles& key, const PartTiles& value, int scale_groups) {
  HeadTiles tiles;
  tiles.codes = true;
  tiles.rows = kCodeRows;
  for (const PartTiles* part : {&key, &value}) {
    if (part->widths.size() > kMaxUnits)
      ::lowrankkv::detail::fail<CapacityError>("tiles: codes fill ", part->widths.size(),
                                               " units of ", kCodeUnit, " channels, at most ",
                                               kMaxUnits);
  }
  tiles.key_units = static_cast<std::int32_t>(key.widths.size());
  tiles.value_units = static_cast<std::int32_t>(value.widths.size());
  std::copy(key.widths.begin(), key.widths.end(), tiles.key_widths);
  std::copy(value.widths.begin(), value.widths.end(), tiles.value_widths);
  tiles.key_pattern = code_pattern(tiles.key_widths, tiles.key_units);
  tiles.value_pattern = code_pattern(tiles.value_widths, tiles.value_units);
  tiles.gains = key.gains;
  tiles.scale_groups = scale_groups;
  tiles.first_key_units = scale_groups == 1 ? tiles.key_units : key.first_units;
  tiles.first_value_units = scale_groups == 1 ? tiles.value_units : value.first_units;
  tiles.first_key_pattern = code_pattern(tiles.key_widths, tiles.first_key_units);
  tiles.first_value_pattern = code_pattern(tiles.value_widths, tiles.first_value_units);
  tiles.key_offset = 2 * scale_groups * kCodeRows * tiles.gain_bytes();
  tiles.value_offset = tiles.key_offset;
  for (const std::uint8_t width : key.widths) tiles.value_offset += code_unit_bytes(width);
  tiles.bytes = tiles.value_offset;
  for (const std::uint8_t width : value.widths) tiles.bytes += code_unit_bytes(width);
  return tiles;
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
