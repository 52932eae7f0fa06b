// SPDX-License-Identifier: Apache-2.0
/// @file cuda/basis/folded_basis.cuh  Folds a quantizer's rotations into the calibrated bases.
#pragma once

#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/basis/rotate_maps.hpp"
#include "lowrankkv/concepts/impl.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief The calibrated bases, rotated if the quantizer has rotations. All four maps are rotated,
/// so that attention is unchanged.
template <class Quantizer>
LayerBasis folded_basis(LayerBasis basis, const Quantizer& quantizer, int head_dim) {
  if constexpr (requires { Impl<Quantizer, Cuda>::rotation(quantizer, 1); }) {
    std::vector<float> keys, values;
    int key_rank = 0, value_rank = 0;  // ranks of `keys` and `values`
    for (HeadBasis& head : basis.heads) {
      if (head.key_rank != key_rank)
        keys = Impl<Quantizer, Cuda>::rotation(quantizer, key_rank = head.key_rank);
      if (head.value_rank != value_rank)
        values = Impl<Quantizer, Cuda>::rotation(quantizer, value_rank = head.value_rank);
      head.key_down = rotated_columns(head.key_down, head_dim, head.key_rank, keys);
      head.query_down = rotated_columns(head.query_down, head_dim, head.key_rank, keys);
      head.value_down = rotated_columns(head.value_down, head_dim, head.value_rank, values);
      head.output_up = rotated_rows(head.output_up, head.value_rank, head_dim, values);
    }
  }
  return basis;
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
