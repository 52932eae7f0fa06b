// SPDX-License-Identifier: Apache-2.0
/// @file cuda/runtime/forms.cuh  The forms that rows are stored in, and the sizes that all kernels
/// share.
#pragma once

#include <cstdint>
#include <vector>

#include "lowrankkv/config.hpp"
#include "lowrankkv/quantizer/code_layout.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kPageAlignment = 128;  ///< bytes: of pages, their sizes are multiples of it
inline constexpr int kPlainRows = 16;       ///< rows of a unit of a plain tile
inline constexpr int kPlainUnit = 16;       ///< its channels
inline constexpr int kPlainUnitBytes = 2 * kPlainRows * kPlainUnit;
inline constexpr int kCodeRows = 64;  ///< rows of a tile of codes
inline constexpr int kCodeUnit = 32;  ///< channels of its units
inline constexpr int kMaxUnits = 16;  ///< units of codes that keys, or values, of one head may have
inline constexpr int kMaxHeadDim = 256;    ///< of keys and values
inline constexpr int kStoreThreads = 256;  ///< of the blocks that handle leaving rows
inline constexpr int kStoreRows =
    64;  ///< rows that such a block takes at a time: a tile of codes, up to four plain ones

/// @brief Form of the compressed rows that queries are to meet.
enum class CodedForm : std::uint8_t { none, plain, codes };

/// @brief What a channel of a tile of codes holds: bits [shift, shift + width) of the code, of
/// `bits` bits, of coefficient `source`. A code wider than one unit's width stands in several
/// channels. source < 0: padding.
struct TileChannel {
  std::int16_t source = -1;
  std::uint8_t bits = 0;
  std::uint8_t shift = 0;
  std::uint8_t width = 0;
};

/// @brief How keys, or values, of one head become channels of tiles, and back.
struct PartTiles {
  std::vector<TileChannel> channels;  ///< tiles of codes: one entry a channel; plain tiles: empty
  std::vector<std::uint8_t> widths;   ///< of the units of codes
  std::vector<TileChannel>
      readers;  ///< channels as attention sums them, where those are not the tile's: joint values,
                ///< whose planes are sums of the same channels
  ScaleKind gains = ScaleKind::norm_log8;
  float reference[2] = {1.0F, 1.0F};  ///< by scale group: what a gain of 1 stands for: the norm of
                                      ///< a row's coefficients, in steps, or the largest of them
  int padding_bits = 0;               ///< of a row: what rounding to whole units costs
  int coded = 0;        ///< coefficients that have bits: the first so many; gains are of them
  int first_coded = 0;  ///< of those, the ones of the first scale group
  int first_units = 0;  ///< of the units, the ones of the first scale group
  bool by_basis =
      false;  ///< a channel is a coefficient, so that the basis itself reads tiles: bases that move
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
