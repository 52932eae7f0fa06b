// SPDX-License-Identifier: Apache-2.0
// What the CPU's tests of undo.hpp share: maps of random ranks, and a configuration whose lists
// fill several pages.
#pragma once

#include "compressed_kv_cache/undo.hpp"
#include "lowrankkv/presets.hpp"
#include "support/random_layer.hpp"

namespace undo {

inline CacheConfig config() {
  CacheConfig config;
  config.shape = {4, 2, 16};
  config.max_sequences = 5;
  config.max_tokens = 600;
  config.page_bytes = 512;
  config.flush_interval = 8;
  config.publish_interval = 16;
  config.prefill_chunk = 64;
  return config;
}

inline LayerBasis basis(int joint_heads = 0) {
  support::Random random(5);
  const int dim = config().shape.head_dim, rank = 9;
  LayerBasis maps = support::random_basis(random, config().shape, {.centred = false}, 7, 6);
  if (joint_heads > 0) {
    const auto joint = support::random_orthonormal(random, joint_heads * dim, rank);
    for (int head = 0; head < joint_heads; ++head) {
      HeadBasis& own = maps.heads[static_cast<std::size_t>(head)];
      own.value_rank = rank;
      own.value_down = support::row_major(joint.middleRows(head * dim, dim));
    }
  }
  return maps;
}
inline LayerBasis basis_with_bits() {
  LayerBasis maps = basis();
  for (HeadBasis& head : maps.heads) {
    head.key_bits.assign(static_cast<std::size_t>(head.key_rank), 4);
    head.value_bits.assign(static_cast<std::size_t>(head.value_rank), 3);
    head.key_rms.assign(static_cast<std::size_t>(head.key_rank), 1.0F);
    head.value_rms.assign(static_cast<std::size_t>(head.value_rank), 1.0F);
  }
  return maps;
}

}  // namespace undo
