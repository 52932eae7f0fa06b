// SPDX-License-Identifier: Apache-2.0
/// @file basis/identity.hpp  Identity: rows are coded as they are, in all their channels. No
/// calibration.
#pragma once

#include <cstddef>
#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Basis policy of methods that only quantise: c = x, rank = head_dim. The cache makes the
/// maps itself, and takes an empty LayerBasis. Works with the Static updater.
///
/// A quantizer's rotation is folded into the maps like that of any basis, so that attention reads
/// codes without undoing it.
struct Identity {
  friend bool operator==(const Identity&, const Identity&) = default;
};

/// @brief The identity as the maps of every head. Bytes: 8 head_dim^2 a head.
inline LayerBasis identity_basis(const CacheShape& shape) {
  const std::size_t dim = static_cast<std::size_t>(shape.head_dim);
  HeadBasis head;
  head.key_rank = head.value_rank = shape.head_dim;
  head.key_down.assign(dim * dim, 0.0F);
  for (std::size_t channel = 0; channel < dim; ++channel)
    head.key_down[channel * dim + channel] = 1.0F;
  head.value_down = head.key_down;
  return {std::vector<HeadBasis>(static_cast<std::size_t>(shape.num_kv_heads), head)};
}

/// @brief Raises ShapeError if maps are given: there is nothing to do with them.
inline void validate(const Identity&, const LayerBasis& basis, const CacheShape&) {
  if (!basis.heads.empty())
    detail::fail<ShapeError>("Identity: makes its own maps, expected 0 heads of a basis, given ",
                             basis.heads.size());
}

LOWRANKKV_NAMESPACE_END
