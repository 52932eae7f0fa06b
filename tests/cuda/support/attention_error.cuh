// SPDX-License-Identifier: Apache-2.0
// Attention of a sequence against float64 attention over what is stored of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cuda/support/device_cache.cuh"
#include "cuda/support/device_tools.cuh"
#include "cuda/support/random_layer.hpp"

namespace support {

/// How far an answer of a sequence's last token is from float64. Pre-RoPE keys are rotated to the
/// positions that the cache gives.
template <class Cache>
double attention_error(const lowrankkv::CacheConfig& config, const DeviceCache<Cache>& device,
                       SequenceId seq, const std::vector<float>& query, const Answer& answer) {
  std::vector<float> key, value;
  device.reconstruct(seq, key, value);
  std::vector<double> expected, lse;
  attend_f64(
      config.shape, config.scale(),
      rotated(config, key, [&](std::int64_t token) { return device.cache.position(seq, token); }),
      value, query, expected, lse);
  return std::max(
      distance(answer.out, expected),
      furthest(answer.lse, lse) / std::max(1.0, furthest(lse, std::vector<double>(lse.size()))));
}

}  // namespace support
