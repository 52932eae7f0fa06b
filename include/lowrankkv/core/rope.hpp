// SPDX-License-Identifier: Apache-2.0
/// @file core/rope.hpp  Rotary position embedding: frequencies (with the Llama-3 scaling) and the two pairings.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <vector>

#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Which two channels turn together: (i, i + d/2) as in Hugging Face, or (2i, 2i + 1) as in the original.
enum class RopePairing { half_split, interleaved };

/// @brief The Llama-3 stretching of low frequencies (`rope_scaling` of type `llama3`).
struct Llama3RopeScaling {
  float factor = 8.0F;
  float low_freq_factor = 1.0F;
  float high_freq_factor = 4.0F;
  float original_context = 8192.0F;
};

/// @brief Angles per position: frequency_i = theta^(-2i/d), [head_dim / 2], radians per token.
inline std::vector<double> rope_frequencies(int head_dim, double theta) {
  if (head_dim < 2 || head_dim % 2 != 0) detail::fail<ShapeError>("rope: head_dim must be even, given ", head_dim);
  std::vector<double> frequencies(static_cast<std::size_t>(head_dim / 2));
  for (int i = 0; i < head_dim / 2; ++i) frequencies[static_cast<std::size_t>(i)] = std::pow(theta, -2.0 * i / head_dim);
  return frequencies;
}

/// @brief Applies the Llama-3 scaling: wavelengths beyond original_context / low_freq_factor are stretched by factor,
/// those under original_context / high_freq_factor are left alone, and between the two they are blended.
inline void scale_frequencies(std::vector<double>& frequencies, const Llama3RopeScaling& scaling) {
  const double low = scaling.original_context / scaling.low_freq_factor;
  const double high = scaling.original_context / scaling.high_freq_factor;
  for (double& frequency : frequencies) {
    const double wavelength = 2.0 * std::numbers::pi / frequency;
    if (wavelength > low) {
      frequency /= scaling.factor;
    } else if (wavelength > high) {
      const double blend = (scaling.original_context / wavelength - scaling.low_freq_factor) /
                           (scaling.high_freq_factor - scaling.low_freq_factor);
      frequency = (1.0 - blend) * frequency / scaling.factor + blend * frequency;
    }
  }
}

/// @brief Rotates one row [2 x frequencies.size()] in place to `position`.
inline void apply_rope(float* row, const std::vector<double>& frequencies, std::int64_t position,
                       RopePairing pairing = RopePairing::half_split) {
  const std::size_t half = frequencies.size();
  for (std::size_t i = 0; i < half; ++i) {
    const double angle = frequencies[i] * static_cast<double>(position);
    const float cosine = static_cast<float>(std::cos(angle));
    const float sine = static_cast<float>(std::sin(angle));
    float& first = pairing == RopePairing::half_split ? row[i] : row[2 * i];
    float& second = pairing == RopePairing::half_split ? row[i + half] : row[2 * i + 1];
    const float turned = first * cosine - second * sine;
    second = second * cosine + first * sine;
    first = turned;
  }
}

LOWRANKKV_NAMESPACE_END
