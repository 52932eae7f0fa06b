// SPDX-License-Identifier: Apache-2.0
// A layer of two KV heads with four query heads each, and random bases for it.
#pragma once

#include "support/random_layer.hpp"

namespace support::grouped {

inline constexpr lowrankkv::CacheShape kShape{8, 2, 64};

inline lowrankkv::LayerBasis basis(int key_rank = 24, int value_rank = 32) {
  Random random(1);
  return random_basis(random, kShape, {.centred = false}, key_rank, value_rank);
}

}  // namespace support::grouped
