// SPDX-License-Identifier: Apache-2.0
/// @file quantizer/ggml_blocks.hpp  GgmlBlocks: the formats q8_0 and q4_0 of ggml, which llama.cpp
/// offers for its KV cache.
#pragma once

#include "lowrankkv/config.hpp"
#include "lowrankkv/quantizer/level_layout.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Quantizer policy: blocks of 32 channels of a row, each with one scale d in f16.
///
/// 8 bits (q8_0): d = max |x| / 127, q = round(x / d), x^ = q d. |x - x^| <= d / 2, up to the
/// rounding of d. 4 bits (q4_0): d = m / -8 for the x of largest magnitude m, with its sign;
/// q = floor(x / d + 8.5), at most 15; x^ = (q - 8) d. Values of the sign other than m's reach only
/// 7 of its 8 steps: |x - x^| <= |d|. Codes are chosen with d before its rounding, as ggml does.
///
/// A row whose channels are not a multiple of 32 has a last block of what is left; ggml has no such
/// rows. Bytes of a row: head_dim bits / 8, and 2 for each block. The order in memory is the
/// library's own (level_layout.hpp), the decoded numbers are ggml's.
/// @tparam bits  8 or 4
template <int bits>
struct GgmlBlocks {
  static_assert(bits == 8 || bits == 4, "lowrankkv: GgmlBlocks has 8 (q8_0) or 4 (q4_0) bits");
  static constexpr int block = 32;  ///< channels
  friend bool operator==(const GgmlBlocks&, const GgmlBlocks&) = default;
};

/// @brief The layout of rows of `rank` coefficients.
template <int bits>
LevelLayout ggml_layout(const GgmlBlocks<bits>&, int rank) {
  return {rank, bits, GgmlBlocks<bits>::block, 1, {}, static_cast<float>(1 << (bits - 1)), 1};
}

LOWRANKKV_NAMESPACE_END
