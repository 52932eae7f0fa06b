// SPDX-License-Identifier: Apache-2.0
/// @file cpu/simd/code_tiles.hpp  Where the packed codes of a block of rows are, for kernels that
/// unpack them in registers: pieces of rows, and runs of channels of one width.
#pragma once

#include <cstddef>

#include "lowrankkv/cpu/simd/stored_tiles.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu::simd {

/// Bytes from the one with lane 0's code on that a kernel may load of a channel of a piece, if they
/// lie in the block.
inline constexpr std::ptrdiff_t kCodeBytes = 16;
/// f32 of scratch memory that a kernel needs for a piece of values.
inline constexpr int kCodeScratch = 4 * kPieceRows;

/// @brief kPieceRows lanes of a block (quantizer/code_layout.hpp), of which `count` rows from lane
/// `begin` on are wanted. Lane i is row `row` + i of the block, which begins, or ends, within the
/// piece if not all lanes are wanted.
struct CodePiece {
  const std::byte* block = nullptr;
  const std::byte* end = nullptr;   ///< of the block: nothing from there on is read
  const std::byte* next = nullptr;  ///< the block of a row further on, to be fetched ahead
  int row = 0;                      ///< above -kPieceRows; of keys a multiple of kPieceRows
  int next_row = 0;                 ///< that row
  int begin = 0;
  int count = 0;
  int column = 0;  ///< of the logit, the weight and the scale of the first row that is wanted
};

/// @brief Consecutive channels whose codes have one width. Code q of b bits stands for (q - 2^(b-1)
/// + 1/2) times its row's scale.
struct CodeRun {
  int bits = 0;     ///< 1 to 8
  int channel = 0;  ///< the first one
  int count = 0;
  std::ptrdiff_t first = 0;       ///< byte of the block at which its line of codes begins
  std::ptrdiff_t line_bytes = 0;  ///< from a channel's line to the next one's
};

/// @brief Codes of channels that share a scale in each row, for at most kBlockRows rows. Lane i of
/// a piece of values has rows whose column is i modulo kPieceRows.
struct CodeBlock {
  const CodePiece* pieces = nullptr;
  int num_pieces = 0;
  const float* scales = nullptr;  ///< by column
  const CodeRun* runs = nullptr;
  int num_runs = 0;
  float* scratch = nullptr;  ///< values: kCodeScratch f32 a piece
};

}  // namespace cpu::simd
LOWRANKKV_NAMESPACE_END
