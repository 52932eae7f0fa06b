// SPDX-License-Identifier: Apache-2.0
/// @file quantizer/transform_layout.hpp  TransformCode's layout and steps for one head's keys or
/// values. No Eigen, no CUDA.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/quantizer/code_layout.hpp"
#include "lowrankkv/quantizer/transform_code.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief The layout of rows whose channels have these bits, non-increasing. @throws ShapeError
/// unless `bits` has one entry per channel
inline CodeLayout transform_layout(const TransformCode& policy, int rank,
                                   std::span<const std::uint8_t> bits) {
  if (bits.size() != static_cast<std::size_t>(rank)) {
    detail::fail<ShapeError>("TransformCode: the basis has bits for ", bits.size(),
                             " channels, rank ", rank, "; see budgeted.hpp");
  }
  CodeLayout result{rank, {bits.begin(), bits.end()}, {}, ScaleKind::norm_log8, 1.0F};
  int coded = 0;
  for (const std::uint8_t width : bits) {
    if (width == 0) break;  // sorted: only zeros follow
    ++coded;
  }
  if (coded > 0) result.groups.push_back({0, coded});
  // Every channel counts alike: a coefficient's share of the norm is in units of its rms. In steps
  // the few channels with most bits would decide the gain of all.
  for (std::size_t width = 0; width < result.norm_weights.size(); ++width)
    result.norm_weights[width] = gaussian_step(static_cast<int>(width));
  if (coded > 0) result.reference_norm = std::sqrt(static_cast<float>(coded)) / policy.step_scale;
  return result;
}

/// @brief The quantiser's step of every channel of root mean square `rms`; 1 for channels without
/// bits. @throws ShapeError unless `rms` has one entry per channel
inline std::vector<float> transform_steps(const TransformCode& policy,
                                          std::span<const std::uint8_t> bits,
                                          std::span<const float> rms) {
  if (rms.size() != bits.size())
    detail::fail<ShapeError>("TransformCode: the basis has rms for ", rms.size(),
                             " channels, rank ", bits.size());
  std::vector<float> steps;
  for (std::size_t channel = 0; channel < rms.size(); ++channel)
    steps.push_back(bits[channel] == 0
                        ? 1.0F
                        : policy.step_scale * gaussian_step(bits[channel]) * rms[channel]);
  return steps;
}

LOWRANKKV_NAMESPACE_END
