// SPDX-License-Identifier: Apache-2.0
// Rotary embeddings that tests try, and rows rotated by the plain function of core/rope.hpp.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "lowrankkv/core/rope.hpp"

namespace support {

/// Independent numbers of a standard normal distribution.
inline std::vector<float> gaussian_rows(std::mt19937_64& random, std::int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> rows(static_cast<std::size_t>(count));
  for (float& x : rows) x = normal(random);
  return rows;
}

/// Rows [n, heads, dim] rotated to positions first, first + 1, ...
inline std::vector<float> rotate_rows(std::vector<float> rows, int heads, int dim,
                                      const lowrankkv::RopeConfig& rope, std::int64_t first = 0) {
  const std::vector<double> frequencies = lowrankkv::rope_frequencies(rope, dim);
  for (std::size_t row = 0; row < rows.size() / static_cast<std::size_t>(dim); ++row) {
    lowrankkv::apply_rope(rows.data() + row * static_cast<std::size_t>(dim), frequencies,
                          first + static_cast<std::int64_t>(row) / heads, rope.pairing);
  }
  return rows;
}

/// The rotary embedding of pre-RoPE keys.
inline lowrankkv::RopeConfig pre_rope(
    lowrankkv::RopePairing pairing = lowrankkv::RopePairing::half_split, double theta = 10000.0) {
  return {.keys = lowrankkv::Rope::pre, .pairing = pairing, .theta = theta};
}

/// Both pairings, a frequency scaling, a part of the channels, frequencies as given.
inline std::vector<lowrankkv::RopeConfig> rope_variants() {
  using namespace lowrankkv;
  RopeConfig scaled = pre_rope(RopePairing::half_split, 500000.0);
  scaled.scaling = Llama3RopeScaling{8.0F, 1.0F, 4.0F, 256.0F};
  RopeConfig partial = pre_rope(RopePairing::interleaved);
  partial.rotary_dim = 12;
  RopeConfig given = pre_rope();
  for (int pair = 0; pair < 16; ++pair) given.frequencies.push_back(0.5 / (1.0 + pair));
  return {pre_rope(), pre_rope(RopePairing::interleaved, 1e6), scaled, partial, given};
}

}  // namespace support
