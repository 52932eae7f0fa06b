// SPDX-License-Identifier: Apache-2.0
/// @file core/rope.hpp  Rotary position embedding: frequencies (with the Llama-3 scaling), the two
/// pairings, and the configuration of a cache.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <optional>
#include <vector>

#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Which two channels are rotated together: (i, i + d/2) as in Hugging Face, or (2i, 2i + 1)
/// as in the original.
enum class RopePairing : std::uint8_t { half_split, interleaved };

/// @brief The Llama-3 stretching of low frequencies (`rope_scaling` of type `llama3`).
struct Llama3RopeScaling {
  float factor = 8.0F;           ///< by which low frequencies are divided
  float low_freq_factor = 1.0F;  ///< wavelengths above original_context / this are divided
  /// Wavelengths below original_context / this stay; between the two bounds both are blended.
  float high_freq_factor = 4.0F;
  float original_context = 8192.0F;  ///< tokens that the model was first trained on

  friend bool operator==(const Llama3RopeScaling&, const Llama3RopeScaling&) = default;
};

/// @brief Angles per position: frequency_i = theta^(-2i/d), [head_dim / 2], radians per token.
inline std::vector<double> rope_frequencies(int head_dim, double theta) {
  if (head_dim < 2 || head_dim % 2 != 0)
    detail::fail<ShapeError>("rope: head_dim must be even, given ", head_dim);
  std::vector<double> frequencies(static_cast<std::size_t>(head_dim / 2));
  for (int i = 0; i < head_dim / 2; ++i)
    frequencies[static_cast<std::size_t>(i)] = std::pow(theta, -2.0 * i / head_dim);
  return frequencies;
}

/// @brief The form in which keys arrive and are stored. Queries always arrive post-RoPE.
enum class Rope : std::uint8_t {
  /// Post-RoPE: the cache needs no positions, and attention runs in coefficient space.
  post,
  /// Pre-RoPE: such keys compress better and can be moved to other positions. Attention up-projects
  /// and rotates the keys that it reads.
  pre
};

/// @brief The rotary embedding of a layer, for caches that store pre-RoPE keys (Rope::pre).
struct RopeConfig {
  Rope keys = Rope::post;                         ///< form in which keys arrive and are stored
  RopePairing pairing = RopePairing::half_split;  ///< which channels are rotated together
  double theta = 10000.0;                         ///< base of the frequencies
  std::optional<Llama3RopeScaling> scaling{};     ///< of the frequencies; empty: no scaling
  int rotary_dim = 0;  ///< the first rotary_dim channels are rotated, an even number; 0: head_dim
  /// Radians per token of each pair, for embeddings that theta and scaling cannot express (YaRN,
  /// ...). Empty: computed from theta and scaling.
  std::vector<double> frequencies{};

  friend bool operator==(const RopeConfig&, const RopeConfig&) = default;
};

/// @brief Applies the Llama-3 scaling: wavelengths beyond original_context / low_freq_factor are
/// stretched by `factor`, wavelengths under original_context / high_freq_factor are left alone, and
/// wavelengths between the two bounds are blended.
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

/// @brief The frequencies of a configuration, [rotary_dim / 2]. @throws ShapeError, ValueError if
/// the configuration does not fit a layer of head_dim
inline std::vector<double> rope_frequencies(const RopeConfig& config, int head_dim) {
  const int given = 2 * static_cast<int>(config.frequencies.size());
  const int rotary_dim = config.rotary_dim != 0 ? config.rotary_dim : given != 0 ? given : head_dim;
  if (given != 0 && given != rotary_dim)
    detail::fail<ShapeError>("rope: rotary_dim ", rotary_dim, ", frequencies for ", given);
  for (const double frequency : config.frequencies) {
    if (!std::isfinite(frequency))
      detail::fail<ValueError>("rope: a frequency is ", frequency, ", finite expected");
  }
  if (rotary_dim < 2 || rotary_dim > head_dim || rotary_dim % 2 != 0)
    detail::fail<ShapeError>("rope: rotary_dim ", rotary_dim, ", head_dim ", head_dim,
                             "; an even number up to it expected");
  if (!(std::isfinite(config.theta) && config.theta > 0.0))
    detail::fail<ValueError>("rope: theta is positive, given ", config.theta);
  if (given != 0) return config.frequencies;
  std::vector<double> frequencies = rope_frequencies(rotary_dim, config.theta);
  if (config.scaling) {
    const Llama3RopeScaling& scaling = *config.scaling;
    if (!(scaling.factor > 0.0F && scaling.low_freq_factor > 0.0F &&
          scaling.high_freq_factor > scaling.low_freq_factor && scaling.original_context > 0.0F)) {
      detail::fail<ValueError>("rope: scaling by factor ", scaling.factor, ", low_freq_factor ",
                               scaling.low_freq_factor, ", high_freq_factor ",
                               scaling.high_freq_factor, ", original_context ",
                               scaling.original_context, "; positive, low below high expected");
    }
    scale_frequencies(frequencies, scaling);
  }
  return frequencies;
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
    const float rotated = first * cosine - second * sine;
    second = second * cosine + first * sine;
    first = rotated;
  }
}

LOWRANKKV_NAMESPACE_END
