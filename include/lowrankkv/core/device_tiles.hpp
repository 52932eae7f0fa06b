// SPDX-License-Identifier: Apache-2.0
/// @file core/device_tiles.hpp  Sizes of the Cuda backend's tiles, for byte budgets that are made
/// on the host. tests/cuda/tiles/tile_layout.cu compares them with the tiles.
#pragma once

#include <array>
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

/// @brief Tile of rows at full rank.
/// @param full_row_bits  CacheConfig::full_row_bits: 0 (16 bits) or 8
/// @param pre_rope  whether keys are stored before RoPE
inline DeviceTile full_row_tile(int head_dim, int full_row_bits, bool pre_rope) {
  constexpr int kUnit = 16, kUnitBytes = 512;  // rows and channels of a unit, its bytes in 16 bits
  const int units = (head_dim + kUnit - 1) / kUnit, steps = pre_rope ? (units <= 8 ? 4 : 2)
                                                                     : (units <= 2   ? 4
                                                                        : units <= 4 ? 2
                                                                                     : 1);
  const std::int64_t elements = std::int64_t{steps} * 2 * units * kUnitBytes;
  if (full_row_bits == 0) return {steps * kUnit, elements};
  const std::int64_t row_steps = std::int64_t{4} * steps * kUnit;  // f16, of keys and of values
  return {steps * kUnit, (row_steps + 127) / 128 * 128 + elements / 2};
}

namespace detail {

/// Bytes of the codes of 64 rows of one part: planes of 8, 4, 2 and 1 bits, each padded to 32
/// channels. Codes of 8 bits are one plane or two, whichever pads less.
inline std::int64_t plane_bytes(std::span<const std::uint8_t> bits) {
  struct Planes {
    std::int64_t bits = 0, padding = 0;
  };
  const auto planes = [&](bool whole_bytes) {
    std::array<int, 9> counts{};  // of channels, by the plane's bits
    for (const std::uint8_t own : bits) {
      int left = own;
      for (const int width : {8, 4, 2, 1}) {
        if (width == 8 && !whole_bytes) continue;
        for (; left >= width; left -= width) ++counts[static_cast<std::size_t>(width)];
      }
    }
    Planes all;
    for (const int width : {8, 4, 2, 1}) {
      const int count = counts[static_cast<std::size_t>(width)], padded = (count + 31) / 32 * 32;
      all.bits += std::int64_t{padded} * width;
      all.padding += std::int64_t{padded - count} * width;
    }
    return all;
  };
  const Planes whole = planes(true), split = planes(false);
  return 64 / 8 * (whole.padding <= split.padding ? whole.bits : split.bits);
}

}  // namespace detail

/// @brief Tile of codes of rows with one gain of 8 bits a part (TransformCode).
/// @param key, value  bits of every channel
inline DeviceTile code_tile(std::span<const std::uint8_t> key,
                            std::span<const std::uint8_t> value) {
  constexpr int kRows = 64;
  return {kRows, 2 * kRows + detail::plane_bytes(key) + detail::plane_bytes(value)};
}

LOWRANKKV_NAMESPACE_END
