// SPDX-License-Identifier: Apache-2.0
// A small cache of one KV head, and prompts of normal rows for it.
#pragma once

#include <random>
#include <vector>

#include "lowrankkv/presets.hpp"
#include "support/random_layer.hpp"

namespace support::small {

using namespace lowrankkv;

inline const CacheShape kShape{2, 1, 32};

inline std::vector<float> rows(std::mt19937_64& random, int tokens, int heads, float scale = 1.0F) {
  std::normal_distribution<float> normal(0.0F, scale);
  std::vector<float> all(static_cast<std::size_t>(tokens * heads * 32));
  for (float& value : all) value = normal(random);
  return all;
}
inline LayerBasis basis() {
  support::Random random(7);
  return support::random_basis(random, kShape, {.centred = false}, 8, 8);
}
template <class Cache>
void ingest(Cache& cache, std::mt19937_64& random, int n, float scale = 1.0F) {
  const auto q = rows(random, n, 2), k = rows(random, n, 1, scale), v = rows(random, n, 1, scale);
  cache.ingest(0, {k.data(), n, 1, 32}, {v.data(), n, 1, 32}, {q.data(), n, 2, 32});
}

}  // namespace support::small
