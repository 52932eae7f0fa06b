// SPDX-License-Identifier: Apache-2.0
// A calibrated model of random activations.
#pragma once

#include <cmath>
#include <cstddef>
#include <random>
#include <vector>

#include "lowrankkv/calibrate/layer_moments.hpp"

namespace support {

/// Normal numbers whose size decays over the channels of a row.
inline std::vector<float> activations(std::mt19937_64& random, int count, double decay = 0.0,
                                      int dim = 1) {
  std::normal_distribution<double> normal;
  std::vector<float> rows(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < rows.size(); ++i)
    rows[i] = static_cast<float>(normal(random) *
                                 std::exp(-decay * static_cast<double>(static_cast<int>(i) % dim)));
  return rows;
}

/// A calibrated model of such activations.
inline std::vector<lowrankkv::calibrate::LayerMoments> random_model(
    std::mt19937_64& random, const lowrankkv::CacheShape& shape, int layers, int tokens,
    float key_constant = 0.0F) {
  using namespace lowrankkv;
  std::vector<calibrate::LayerMoments> model(static_cast<std::size_t>(layers),
                                             calibrate::LayerMoments(shape));
  for (auto& layer : model) {
    const auto q =
        activations(random, tokens * shape.num_qo_heads * shape.head_dim, 0.03, shape.head_dim);
    auto k =
        activations(random, tokens * shape.num_kv_heads * shape.head_dim, 0.06, shape.head_dim);
    for (std::size_t i = 0; i < k.size(); i += static_cast<std::size_t>(shape.head_dim))
      k[i] += key_constant;
    const auto v =
        activations(random, tokens * shape.num_kv_heads * shape.head_dim, 0.09, shape.head_dim);
    const QueryView query(q.data(), tokens, shape.num_qo_heads, shape.head_dim);
    const KeyView key(k.data(), tokens, shape.num_kv_heads, shape.head_dim);
    const ValueView value(v.data(), tokens, shape.num_kv_heads, shape.head_dim);
    layer.add(query, key, value);
    layer.coding().add(query, key, value, tokens * 3 / 4);
    layer.coding().add_residual_stream({q.data(), tokens, shape.num_qo_heads * shape.head_dim});
  }
  return model;
}

}  // namespace support
