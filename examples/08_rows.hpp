// SPDX-License-Identifier: Apache-2.0
// Stands for the model of example 08: queries, keys and values of its layers, as a text gives them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "lowrankkv/core/cache_config.hpp"

inline constexpr lowrankkv::CacheShape kShape{4, 2, 64};  // query heads, KV heads, head_dim
inline constexpr int kLayers = 2;

/// One layer's rows of a text [tokens, heads, head_dim]: as in models, few directions of a head
/// have most of the energy, and a head attends to some tokens far more than to others.
struct LayerRows {
  LayerRows(int layer, std::int64_t tokens, unsigned text)
      : query(rows(layer, tokens, kShape.num_qo_heads, 4.0F, 10 * text + 1)),
        key(rows(layer, tokens, kShape.num_kv_heads, 2.0F, 10 * text + 2)),
        value(rows(layer, tokens, kShape.num_kv_heads, 1.0F, 10 * text + 3)) {}

  const std::vector<float> query, key, value;

 private:
  static std::vector<float> rows(int layer, std::int64_t tokens, int heads, float size,
                                 unsigned seed) {
    std::mt19937 random(1000U * static_cast<unsigned>(layer) + seed);
    std::normal_distribution<float> normal;
    std::vector<float> all;
    for (std::int64_t row = 0; row < tokens * heads; ++row) {
      for (int channel = 0; channel < kShape.head_dim; ++channel)
        all.push_back(size * normal(random) * std::exp(-0.15F * static_cast<float>(channel)));
    }
    return all;
  }
};
