// SPDX-License-Identifier: Apache-2.0
/// @file quantizer/block_hadamard.hpp  BlockHadamard: STAR-KV's mixed-precision codes of two
/// separately rotated blocks of channels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/config.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/quantizer/code_layout.hpp"
#include "lowrankkv/quantizer/flat_rotation.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Quantizer policy of STAR-KV section 4.4: the channels of largest energy form a small
/// block with high_bits, all other channels a block with low_bits.
///
/// Each block is rotated by a flat orthogonal matrix (folded into the maps) and has one f16 scale
/// per token. |c - c^| <= scale / 2 in the rotated coordinates, scale = max |c| / 2^(b-1) over the
/// block.
struct BlockHadamard {
  float outlier_share = 0.2F;  ///< share of the channels that get high_bits
  int high_bits = 4;           ///< 2 to 8
  int low_bits = 3;            ///< 2 to 8
  bool rotate = true;          ///< false: no rotation, for ablation
  friend bool operator==(const BlockHadamard&, const BlockHadamard&) = default;
};

/// @brief Checks the parameters. @throws ValueError naming the value
inline void check_block_hadamard(const BlockHadamard& policy) {
  using detail::fail;
  if (!(policy.outlier_share >= 0.0F && policy.outlier_share <= 1.0F))
    fail<ValueError>("BlockHadamard: outlier_share is in [0, 1], given ", policy.outlier_share);
  for (const int bits : {policy.high_bits, policy.low_bits}) {
    if (bits < 2 || bits > 8) fail<ValueError>("BlockHadamard: bits are 2 to 8, given ", bits);
  }
}

/// @brief The layout of rows of `rank` coefficients: one scale group per block. A block without
/// channels is left out.
inline CodeLayout block_hadamard_layout(const BlockHadamard& policy, int rank) {
  const int high = (std::min)(
      rank, static_cast<int>(std::lround(policy.outlier_share * static_cast<float>(rank))));
  CodeLayout result{rank, {}, {}, ScaleKind::largest_f16, 1.0F};
  for (int channel = 0; channel < rank; ++channel)
    result.bits.push_back(
        static_cast<std::uint8_t>(channel < high ? policy.high_bits : policy.low_bits));
  if (high > 0) result.groups.push_back({0, high});
  if (high < rank) result.groups.push_back({high, rank - high});
  return result;
}

/// @brief The rotation [rank, rank] of the coefficients of a layout, block by block. Empty: none.
inline std::vector<float> block_hadamard_rotation(const BlockHadamard& policy,
                                                  const CodeLayout& layout) {
  if (!policy.rotate) return {};
  const std::size_t rank = static_cast<std::size_t>(layout.rank);
  std::vector<float> result(rank * rank, 0.0F);
  for (const ScaleGroup& group : layout.groups) {
    const std::vector<float> block = flat_rotation(group.count);
    for (int row = 0; row < group.count; ++row) {
      std::copy_n(block.begin() + row * group.count, group.count,
                  result.begin() + (group.first + row) * layout.rank + group.first);
    }
  }
  return result;
}

LOWRANKKV_NAMESPACE_END
