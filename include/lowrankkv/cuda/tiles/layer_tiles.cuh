// SPDX-License-Identifier: Apache-2.0
/// @file cuda/tiles/layer_tiles.cuh  Tile layouts of a layer's lists, derived on the host from maps
/// and policies.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/scalar.hpp"
#include "lowrankkv/cuda/runtime/forms.cuh"
#include "lowrankkv/cuda/tiles/tile_layout.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief The tile layouts of a layer.
struct LayerTiles {
  CodedForm form = CodedForm::none;
  DType coded_type = DType::f16;  ///< of plain tiles of coefficients
  HeadTiles full;                 ///< of tails and of packed prompts
  /// Of full rows in pages: as `full`, or in 8 bits; of 16 rows, where they are few and keys are
  /// pre-RoPE (kFewFullRows).
  HeadTiles listed;
  /// By head; with joint values, the groups of heads follow. Empty: nothing is compressed.
  std::vector<HeadTiles> compressed;
  /// Bases move, and channels of codes must remain principal axes. Then `units` and `rotations` are
  /// set.
  bool orders = false;
  /// [heads, 2] (keys, values): the quantizer's step of a coefficient of rms 1; 0 where a
  /// coefficient has no bits. Empty: no steps.
  std::vector<std::vector<float>> units;
  /// [heads, 2] (keys, values): rotations from principal axes to channels. Empty: none.
  std::vector<std::vector<float>> rotations;
  int joint_heads = 0;                    ///< heads of a group whose values are one latent; 0: none
  std::vector<PartTiles> parts;           ///< [heads, 2]: keys, values
  std::vector<std::vector<float>> steps;  ///< [heads, 2]: the quantizer's; empty: ones
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
  /// @brief The largest tile of a head's list, without the lists of joint values.
  int max_head_tile_bytes() const {
    int most = 0;
    for (const HeadTiles& tiles : compressed) most = (std::max)(most, tiles.keys ? tiles.bytes : 0);
    return most;
  }
  /// @brief Channels of a latent as attention sums them: the largest number over the groups of
  /// heads. A latent without bits counts as one unit, since its weights are summed all the same. 0
  /// without joint values.
  int joint_width() const {
    int most = joint_heads > 0 ? kPlainUnit : 0;
    for (std::size_t part = 1; part < parts.size(); part += 2)
      most = (std::max)(most, static_cast<int>(parts[part].readers.size()));
    for (const HeadTiles& tiles : compressed)
      most = (std::max)(most, tiles.keys || tiles.codes ? 0 : tiles.channels(Part::value));
    return most;
  }
};

/// @brief Which lists keep the positions of their rows, because positions do not follow from
/// counts. Also whether the errors of rows are needed, and whether rows accumulate attention
/// scores.
struct ListedRows {
  bool full = false, compressed = false, errors = false, accumulated_scores = false;
  /// @brief The scored list: the list whose rows are kept by accumulated attention score.
  /// Meaningful only with accumulated_scores.
  constexpr RowList scored() const { return compressed ? RowList::compressed : RowList::full; }
  /// @brief Whether rows of a list are evicted by accumulated score. Where errors choose full rows
  /// among the rows kept by score, both lists have scores.
  constexpr bool has_scores(RowList list) const {
    return accumulated_scores && (list == scored() || errors);
  }
};

/// @brief Largest numbers of rows of a sequence's lists.
struct MostRows {
  std::int64_t full = 0, compressed = 0;
  /// Additional full rows that tables have room for. Heads come to differ in length when tokens are
  /// removed from lists whose rows errors chose.
  std::int64_t spare_full = 0;
};

/// @brief Units of a plain tile that so many channels fill.
constexpr int plain_units(int channels) { return (channels + kPlainUnit - 1) / kPlainUnit; }

/// @brief The layout of plain tiles of rows with so many channels. Tiles are about 8 KiB, so that
/// per-tile work costs little; they are larger for pre-RoPE keys.
/// @param most_units  units of the widest head of the layer
/// @param pre_rope  whether attention applies RoPE when it reads the keys
inline HeadTiles plain_tiles(int key_channels, int value_channels, int most_units, bool pre_rope) {
  HeadTiles tiles;
  tiles.key_units = plain_units(key_channels);
  tiles.value_units = plain_units(value_channels);
  tiles.rows = kPlainRows * (pre_rope ? rotated_steps(most_units) : plain_steps(most_units));
  tiles.value_offset = tiles.rows / kPlainRows * tiles.key_units * kPlainUnitBytes;
  tiles.bytes = tiles.rows / kPlainRows * (tiles.key_units + tiles.value_units) * kPlainUnitBytes;
  return tiles;
}

/// @brief The layout of plain tiles of 16 rows, from that of more rows.
inline HeadTiles small_tiles(HeadTiles tiles) {
  tiles.value_offset /= tiles.rows / kPlainRows;
  tiles.bytes /= tiles.rows / kPlainRows;
  tiles.rows = kPlainRows;
  return tiles;
}

/// @brief The layout of plain tiles in 8 bits, from that of 16 bits.
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

/// @brief The layout of plain tiles of joint values with so many channels. Tiles have only sixteen
/// rows, since rows are wide.
inline HeadTiles joint_plain_tiles(int channels) {
  HeadTiles tiles;
  tiles.keys = false;
  tiles.value_units = plain_units(channels);
  tiles.rows = kPlainRows;
  tiles.bytes = tiles.value_units * kPlainUnitBytes;
  return tiles;
}

/// @brief The layout of tiles of codes of joint values. All planes of a block hold its channels in
/// the same places (cuda/tiles/joint_layout.cuh).
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

/// @brief The layout of a head whose values are joint: the keys without the values.
inline HeadTiles keys_only(HeadTiles tiles) {
  const std::int32_t less =
      tiles.codes ? tiles.scale_groups * kCodeRows * tiles.gain_bytes() : 0;  // the values' gains
  tiles.values = false;
  tiles.key_offset -= less;
  tiles.value_offset -= less;
  tiles.bytes = tiles.value_offset;
  return tiles;
}

/// @brief The layout of tiles of codes of a head.
/// @param scale_groups  gains of a row's key, and of its value: 1 or 2, the same in all heads
/// @throws CapacityError if keys or values need more than kMaxUnits units
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
