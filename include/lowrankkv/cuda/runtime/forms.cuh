// SPDX-License-Identifier: Apache-2.0
/// @file cuda/runtime/forms.cuh  The storage forms of rows, and the tile and block sizes that all
/// kernels share.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "lowrankkv/config.hpp"
#include "lowrankkv/core/device_tiles.hpp"
#include "lowrankkv/quantizer/code_layout.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// Bytes: pages are aligned to it, and their sizes are multiples of it.
inline constexpr int kPageAlignment = 128;
inline constexpr int kPlainRows = 16;  ///< rows of a unit of a plain tile
inline constexpr int kPlainUnit = 16;  ///< channels of a unit of a plain tile
inline constexpr int kPlainUnitBytes = 2 * kPlainRows * kPlainUnit;
inline constexpr int kCodeRows = 64;  ///< rows of a tile of codes
inline constexpr int kCodeUnit = 32;  ///< channels of a unit of a tile of codes
/// Largest number of units of codes of one head's keys, or of its values.
inline constexpr int kMaxUnits = kMaxCodeUnits;
inline constexpr int kMaxHeadDim = 256;  ///< of keys and values
/// Threads of the blocks that process flushed rows.
inline constexpr int kStoreThreads = 256;
/// Rows that such a block processes at a time: one tile of codes, up to four plain tiles.
inline constexpr int kStoreRows = 64;

/// @brief Form of the compressed rows that attention reads.
enum class CodedForm : std::uint8_t { none, plain, codes };

/// @brief What a channel of a tile of codes holds: bits [shift, shift + width) of the code of
/// coefficient `source`, which has `bits` bits. A code wider than one unit's width is spread over
/// several channels. source < 0: padding.
struct TileChannel {
  std::int16_t source = -1;
  std::uint8_t bits = 0;
  std::uint8_t shift = 0;
  std::uint8_t width = 0;
};

/// @brief How coefficients of one head's keys, or of its values, map to channels of tiles, and
/// back.
struct PartTiles {
  std::vector<TileChannel> channels;  ///< tiles of codes: one entry a channel; plain tiles: empty
  std::vector<std::uint8_t> widths;   ///< of the units of codes
  /// The channels as attention sums them. Empty unless they differ from `channels`: joint values,
  /// whose planes are sums of the same channels.
  std::vector<TileChannel> readers;
  ScaleKind gains = ScaleKind::norm_log8;
  /// By scale group: what a gain of 1 stands for, in quantizer steps. This is the norm of a row's
  /// coefficients, or the largest of them.
  float reference[2] = {1.0F, 1.0F};
  std::array<float, 9> norm_weights{};  ///< CodeLayout::norm_weights
  int padding_bits = 0;                 ///< of a row, added by rounding up to whole units
  /// Number of coefficients that have bits. They are the first ones, and gains cover only them.
  int coded = 0;
  int first_coded = 0;  ///< coded coefficients of the first scale group
  int first_units = 0;  ///< units of the first scale group
  /// Every channel holds one whole code, so that the basis itself reads tiles. For bases that move.
  bool by_basis = false;
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
