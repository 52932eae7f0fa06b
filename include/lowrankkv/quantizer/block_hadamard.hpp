// SPDX-License-Identifier: Apache-2.0
/// @file quantizer/block_hadamard.hpp  BlockHadamard: STAR-KV's mixed-precision codes of two separately rotated blocks.
#pragma once

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Quantizer policy (STAR-KV section 4.4): the channels of largest energy form a small block with high_bits, the others
/// one with low_bits; each block is rotated by a flat orthogonal matrix (folded into the maps) and has an f16 scale a token.
/// |c - c^| <= scale / 2 in the rotated coordinates, scale = max |c| / 2^(b-1) over the block.
struct BlockHadamard {
  float outlier_share = 0.2F;  ///< of the channels, those in the block with high_bits
  int high_bits = 4;           ///< 2 to 8
  int low_bits = 3;            ///< 2 to 8
  bool rotate = true;          ///< false: no rotation, for ablation
  friend bool operator==(const BlockHadamard&, const BlockHadamard&) = default;
};

LOWRANKKV_NAMESPACE_END
