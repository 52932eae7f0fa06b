// SPDX-License-Identifier: Apache-2.0
/// @file core/device_tiles.hpp  Sizes of the Cuda backend's tiles, for byte budgets that are made
/// on the host. tests/cuda/tiles/tile_layout.cu compares them with the tiles.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief The size of a tile of one KV head's list.
struct DeviceTile {
  int rows = 0;
  std::int64_t bytes = 0;

  /// @brief Rows of a page: of the tiles that are whole in it. 0: a tile is larger.
  std::int64_t rows_per_page(std::size_t page_bytes) const {
    return static_cast<std::int64_t>(page_bytes) / bytes * rows;
  }
};

/// @brief A list of full rows beside compressed ones that never has more rows than this has few: it
/// has small tiles, so that little is unused behind its last row.
inline constexpr int kFewFullRows = 256;

/// @brief Tile of rows at full rank.
/// @param full_row_bits  CacheConfig::full_row_bits: 0 (16 bits) or 8
/// @param pre_rope  whether keys are stored before RoPE
/// @param few  whether the list has at most kFewFullRows rows
inline DeviceTile full_row_tile(int head_dim, int full_row_bits, bool pre_rope, bool few) {
  constexpr int kUnit = 16, kUnitBytes = 512;  // rows and channels of a unit, its bytes in 16 bits
  const int units = (head_dim + kUnit - 1) / kUnit;
  int steps = units <= 2 ? 4 : units <= 4 ? 2 : 1;
  if (pre_rope) steps = few ? 1 : units <= 8 ? 4 : 2;
  const std::int64_t elements = std::int64_t{steps} * 2 * units * kUnitBytes;
  if (full_row_bits == 0) return {steps * kUnit, elements};
  const std::int64_t row_steps = std::int64_t{4} * steps * kUnit;  // f16, of keys and of values
  return {steps * kUnit, (row_steps + 127) / 128 * 128 + elements / 2};
}

/// @brief How the codes of one part of a row (a head's keys, or its values) lie in units.
///
/// A code of b bits is cut into planes: slices of 8, 4, 2 or 1 of its bits. A unit holds 32 planes
/// of one width. A code of 6 bits may be a plane of 4 bits and one of 2, or three of 2.
struct CodeUnits {
  int eights = 0, fours = 0, twos = 0, ones = 0;  ///< units of planes of 8, 4, 2 and 1 bits

  constexpr int count() const { return eights + fours + twos + ones; }
  /// @brief Bits that they take of a row.
  constexpr int row_bits() const { return 32 * (8 * eights + 4 * fours + 2 * twos + ones); }
  friend constexpr bool operator==(const CodeUnits&, const CodeUnits&) = default;
};

/// @brief The most units that kernels support for one part of a head.
inline constexpr int kMaxCodeUnits = 16;

/// @brief The units that take the fewest bits; of these, the fewest units. Where these are more
/// than kMaxCodeUnits, the fewest bits with so few units; if there are none, as many as it takes.
/// @param bits  of every channel, 0 to 8
///
/// Planes are cut from codes widest first: of all ways to fill given units that leaves the least
/// for units of 1 bit. So the counts of codes by their bits decide what fits.
constexpr CodeUnits code_units(std::span<const std::uint8_t> bits) {
  int total = 0, eights = 0, fours = 0, twos = 0;  // of planes that codes could be cut into
  for (const int own : bits) {
    total += own;
    eights += own / 8;
    fours += own / 4;
    twos += own / 2;
  }
  CodeUnits best;
  for (int size = (total + 31) / 32; size <= 8 * (static_cast<int>(bits.size()) + 31) / 32 + 8;
       ++size) {
    bool found = false;
    for (CodeUnits units; 8 * units.eights <= size; ++units.eights) {
      const int in_eights = (std::min)(eights, 32 * units.eights);
      for (units.fours = 0; 8 * units.eights + 4 * units.fours <= size; ++units.fours) {
        const int in_fours = (std::min)(fours - 2 * in_eights, 32 * units.fours),
                  left = size - 8 * units.eights - 4 * units.fours;
        for (units.twos = left / 2; units.twos >= 0; --units.twos) {
          units.ones = left - 2 * units.twos;
          const int in_twos = (std::min)(twos - 4 * in_eights - 2 * in_fours, 32 * units.twos);
          if (total - 8 * in_eights - 4 * in_fours - 2 * in_twos > 32 * units.ones) continue;
          if (!found || units.count() < best.count()) best = units;
          found = true;
          break;
        }
      }
    }
    if (found && best.count() <= kMaxCodeUnits) return best;
  }
  return best;
}

/// @brief Tile of codes of rows with one gain of 8 bits a part (TransformCode).
/// @param row_bits  of the units of keys and values together (CodeUnits::row_bits())
constexpr DeviceTile code_tile(std::int64_t row_bits) {
  constexpr int kRows = 64;
  return {kRows, 2 * kRows + kRows / 8 * row_bits};
}
/// @brief The same.
/// @param key, value  bits of every channel
constexpr DeviceTile code_tile(std::span<const std::uint8_t> key,
                               std::span<const std::uint8_t> value) {
  return code_tile(code_units(key).row_bits() + code_units(value).row_bits());
}

LOWRANKKV_NAMESPACE_END
