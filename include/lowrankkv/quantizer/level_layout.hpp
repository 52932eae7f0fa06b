// SPDX-License-Identifier: Apache-2.0
/// @file quantizer/level_layout.hpp  How rows lie in a block whose codes of one width stand for
/// levels, with a scale for each group of channels of a row. No Eigen, no CUDA.
///
/// A block of R rows holds, in this order: for each group of channels `scales` lines of R f16
/// numbers, the scales and, if there are two, the minima; then the codes, packed without gaps. Keys
/// have a line of R codes for each channel, values a line of `rank` codes for each row; each line
/// is padded to a whole byte. So logits run over rows and outputs over channels, both in order.
/// Code q stands for level(q) scale + minimum.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/config.hpp"
#include "lowrankkv/quantizer/bit_packing.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief The layout of one head's keys or values.
struct LevelLayout {
  int rank = 0;
  int bits = 8;    ///< of a code, 1 to 8
  int group = 0;   ///< channels that share a scale; the last group has what is left
  int scales = 1;  ///< f16 numbers per row and group: 0; 1: scale; 2: scale and minimum
  /// Levels of the 2^bits codes, ascending or as the format has them; empty: code - centre.
  std::vector<float> levels;
  float centre = 0.0F;
  std::uint64_t format = 0;  ///< tells formats of equal sizes apart in saved sequences

  int num_groups() const { return rank == 0 ? 0 : (rank + group - 1) / group; }
  int channels_of(int index) const { return (std::min)(group, rank - index * group); }
  std::int64_t row_bits() const {
    return std::int64_t{rank} * bits + std::int64_t{16} * num_groups() * scales;
  }
  /// @brief Byte at which scales (which = 0) or minima (1) of a group begin in a block.
  std::size_t scale_line(int index, int which, int rows) const {
    return 2 * static_cast<std::size_t>(index * scales + which) * static_cast<std::size_t>(rows);
  }
  /// @brief Byte at which line `line` of the codes begins: that of a channel (keys) or row
  /// (values).
  std::size_t code_line(bool keys, int line, int rows) const {
    return scale_line(num_groups(), 0, rows) +
           static_cast<std::size_t>(line) * packed_bytes(keys ? rows : rank, bits);
  }
  /// @brief Bytes of a block of `rows` rows: enough for either order of the codes.
  std::size_t block_bytes(int rows) const {
    return (std::max)(code_line(true, rank, rows), code_line(false, rows, rows));
  }
};

LOWRANKKV_NAMESPACE_END
