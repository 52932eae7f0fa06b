// SPDX-License-Identifier: Apache-2.0
/// @file quantizer/rotated_levels.hpp  RotatedLevels: TurboQuant's scalar codes of randomly rotated
/// rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "lowrankkv/config.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/quantizer/flat_rotation.hpp"
#include "lowrankkv/quantizer/level_layout.hpp"
#include "lowrankkv/quantizer/sphere_levels.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Quantizer policy of TurboQuant (arXiv 2504.19874), the form for the mean squared error:
/// y = x R, q_i the level nearest to y_i / ||y||, x^ = ||y|| level(q) R^T.
///
/// R is random and fixed by the seed: a diagonal of random signs times a flat orthogonal matrix
/// (flat_rotation.hpp: Hadamard where head_dim is a power of two), in place of the paper's QR of a
/// Gaussian matrix; this is the accepted fast form. R is folded into the maps. Levels are Lloyd's
/// for a coordinate of a random direction. The norm is in f16 and saturates at 65504.
///
/// E ||x - x^||^2 over R is about 0.117, 0.034, 0.0093 of ||x||^2 at 2, 3, 4 bits. Bytes of a row:
/// head_dim bits / 8 + 2.
struct RotatedLevels {
  int bits = 4;             ///< 1 to 8
  std::uint64_t seed = 17;  ///< of the signs
  friend bool operator==(const RotatedLevels&, const RotatedLevels&) = default;
};

/// @brief Checks the parameters. @throws ValueError naming the value
inline void check_rotated_levels(const RotatedLevels& policy) {
  if (policy.bits < 1 || policy.bits > 8)
    detail::fail<ValueError>("RotatedLevels: bits are 1 to 8, given ", policy.bits);
}

/// @brief The layout of rows of `rank` coefficients. @throws ShapeError for rank < 2
inline LevelLayout rotated_layout(const RotatedLevels& policy, int rank) {
  if (rank == 1)
    detail::fail<ShapeError>("RotatedLevels: rank ", rank,
                             ", a direction needs 2 channels at least");
  std::vector<float> levels = rank == 0 ? std::vector<float>() : sphere_levels(rank, policy.bits);
  return {rank, policy.bits, rank, 1, std::move(levels), 0.0F, 3};
}

/// @brief The rotation R [rank, rank], row-major: R_ij = s_i H_ij, the signs s_i from the bits of
/// SplitMix64.
inline std::vector<float> random_rotation(std::uint64_t seed, int rank) {
  std::vector<float> rotation = flat_rotation(rank);
  std::uint64_t state = seed;
  for (int row = 0; row < rank; ++row) {
    state += 0x9e3779b97f4a7c15U;
    std::uint64_t mixed = state;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9U;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebU;
    mixed ^= mixed >> 31;
    if ((mixed & 1U) == 0) continue;
    for (int col = 0; col < rank; ++col) {
      float& entry = rotation[static_cast<std::size_t>(row) * static_cast<std::size_t>(rank) +
                              static_cast<std::size_t>(col)];
      entry = -entry;
    }
  }
  return rotation;
}

LOWRANKKV_NAMESPACE_END
