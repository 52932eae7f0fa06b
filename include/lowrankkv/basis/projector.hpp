// SPDX-License-Identifier: Apache-2.0
/// @file basis/projector.hpp  Projector: four learned maps per KV head (DLRP).
#pragma once

#include <cstddef>

#include "lowrankkv/basis/per_head.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Basis policy of DLRP: key_down = D_K, query_down = D_Q, value_down = D_V, output_up =
/// D_O.
///
/// All four maps are learned, and only their shapes are related (calibrate/projector.hpp folds them
/// from chains of factors). Works with the Static updater: there is no orthonormal basis to move,
/// and no decoder from which older rows could be re-encoded.
///
/// Attention reads q D_Q (k D_K)^T and p (v D_V) D_O. reconstruct() gives k D_K D_Q^T and
/// v D_V D_O. The paper subtracts no means. A basis that carries means has k - mean and v - mean in
/// the place of k and v, and the means are added back.
struct Projector {
  friend bool operator==(const Projector&, const Projector&) = default;
};

/// @brief Raises ShapeError or ValueError, naming both values, unless the four maps of every head
/// are given and fit.
inline void validate(const Projector&, const LayerBasis& basis, const CacheShape& shape) {
  using detail::check_size;
  using detail::fail;
  detail::check_num_heads(basis, shape);
  const std::size_t dim = static_cast<std::size_t>(shape.head_dim);
  for (const HeadBasis& head : basis.heads) {
    if (head.key_rank < 1 || head.key_rank > shape.head_dim)
      fail<ShapeError>("rank: key_rank ", head.key_rank, ", head_dim ", shape.head_dim);
    if (head.value_rank < 1 || head.value_rank > shape.head_dim)
      fail<ShapeError>("rank: value_rank ", head.value_rank, ", head_dim ", shape.head_dim);
    check_size("key_down", dim * static_cast<std::size_t>(head.key_rank), head.key_down.size());
    check_size("query_down", dim * static_cast<std::size_t>(head.key_rank), head.query_down.size());
    check_size("value_down", dim * static_cast<std::size_t>(head.value_rank),
               head.value_down.size());
    check_size("output_up", dim * static_cast<std::size_t>(head.value_rank), head.output_up.size());
    detail::check_mean("key_mean", true, shape.head_dim, head.key_mean);
    detail::check_mean("value_mean", true, shape.head_dim, head.value_mean);
    detail::check_channels("key", head.key_bits, head.key_rms, head.key_rank);
    detail::check_channels("value", head.value_bits, head.value_rms, head.value_rank);
  }
}

LOWRANKKV_NAMESPACE_END
