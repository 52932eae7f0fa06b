// SPDX-License-Identifier: Apache-2.0
// What a coder in float64 stores of rows: codes of two scale groups, joint values.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "cuda/support/star_kv.cuh"
#include "lowrankkv/quantizer/flat_rotation.hpp"

namespace star {

/// What codes of two blocks make of `count` coefficients in float64: rotated, scaled, rounded, and
/// back. Cost: count^2.
inline void code_f64(const BlockHadamard& policy, std::vector<double>& coefficients) {
  const int count = static_cast<int>(coefficients.size()),
            high = std::min(count, static_cast<int>(std::lround(policy.outlier_share *
                                                                static_cast<float>(count))));
  const auto rotate = [](const double* from, int size, std::vector<double>& to) {
    const std::vector<float> matrix = flat_rotation(size);  // symmetric: its own inverse
    to.assign(static_cast<std::size_t>(size), 0.0);
    for (int i = 0; i < size; ++i) {
      for (int j = 0; j < size; ++j)
        to[static_cast<std::size_t>(i)] +=
            static_cast<double>(matrix[static_cast<std::size_t>(i * size + j)]) * from[j];
    }
  };
  for (const auto& [first, size, bits] :
       {std::tuple{0, high, policy.high_bits}, std::tuple{high, count - high, policy.low_bits}}) {
    if (size == 0) continue;
    std::vector<double> rotated(coefficients.begin() + first, coefficients.begin() + first + size),
        back;
    if (policy.rotate) rotate(coefficients.data() + first, size, rotated);
    double largest = 0.0;
    for (const double x : rotated) largest = std::max(largest, std::abs(x));
    const double wanted = std::min(std::ldexp(largest, 1 - bits), 65504.0);
    float scale = round_to(DType::f16, static_cast<float>(wanted));
    for (int step = 0; static_cast<double>(scale) < wanted; ++step)
      scale = round_to(DType::f16, static_cast<float>(wanted * (1.0 + std::ldexp(1.0 + step, -11)) +
                                                      std::ldexp(1.0, -24)));
    for (double& x : rotated) {
      const double half = std::ldexp(1.0, bits - 1);
      x = scale == 0.0F
              ? 0.0
              : (std::clamp(std::floor(x / static_cast<double>(scale)), -half, half - 1.0) + 0.5) *
                    static_cast<double>(scale);
    }
    if (policy.rotate)
      rotate(rotated.data(), size, back);
    else
      back = rotated;
    std::copy(back.begin(), back.end(), coefficients.begin() + first);
  }
}

/// Values of joint heads as they should be stored, the same.
inline std::vector<float> joint_f64(const StarSettings& settings, const support::RandomLayer& layer,
                                    DType type, const std::vector<float>& rows, std::int64_t first,
                                    std::int64_t end) {
  const int dim = layer.shape.head_dim, heads = layer.shape.num_kv_heads,
            members = settings.heads_per_group > 0 ? settings.heads_per_group : heads;
  std::vector<float> result;
  for (const float x : rows) result.push_back(round_to(type, x));
  for (std::int64_t token = first; token < end; ++token) {
    for (int leader = 0; leader < heads; leader += members) {
      const int rank = layer.basis.heads[static_cast<std::size_t>(leader)].value_rank;
      std::vector<double> coefficients(static_cast<std::size_t>(rank), 0.0);
      for (const bool decodes : {false, true}) {
        if (decodes && settings.coded) code_f64(settings.quantizer, coefficients);
        for (double& x : coefficients)
          x = decodes && !settings.coded
                  ? static_cast<double>(round_to(DType::f16, static_cast<float>(x)))
                  : x;
        for (int h = leader; h < leader + members; ++h) {
          const HeadBasis& head = layer.basis.heads[static_cast<std::size_t>(h)];
          float* row = result.data() + (token * heads + h) * dim;
          for (int i = 0; i < dim; ++i) {
            const double mean = head.value_mean.empty()
                                    ? 0.0
                                    : static_cast<double>(
                                          head.value_mean[static_cast<std::size_t>(i)]),
                         own = static_cast<double>(row[i]) - mean;
            const float* map = head.value_down.data() + i * rank;
            double sum = mean;
            for (std::size_t c = 0; c < coefficients.size(); ++c) {
              if (decodes)
                sum += coefficients[c] * static_cast<double>(map[c]);
              else
                coefficients[c] += own * static_cast<double>(map[c]);
            }
            if (decodes) row[i] = static_cast<float>(sum);
          }
        }
      }
    }
  }
  return result;
}

/// Rows [tokens, heads, dim] as they should be stored, those from `first` to `end`; orthonormal
/// bases.
inline std::vector<float> stored_f64(const StarSettings& settings,
                                     const support::RandomLayer& layer, DType type,
                                     const std::vector<float>& rows, bool key, std::int64_t first,
                                     std::int64_t end) {
  const int dim = layer.shape.head_dim, heads = layer.shape.num_kv_heads;
  std::vector<float> result;
  for (const float x : rows) result.push_back(round_to(type, x));
  for (std::int64_t token = first; token < end; ++token) {
    for (int h = 0; h < heads; ++h) {
      const HeadBasis& head = layer.basis.heads[static_cast<std::size_t>(h)];
      const std::vector<float>&map = key ? head.key_down : head.value_down,
            &mean = key ? head.key_mean : head.value_mean;
      const int rank = key ? head.key_rank : head.value_rank;
      float* row = result.data() + (token * heads + h) * dim;
      const auto mean_at = [&](int i) {
        return mean.empty() ? 0.0 : static_cast<double>(mean[static_cast<std::size_t>(i)]);
      };
      std::vector<double> coefficients(static_cast<std::size_t>(rank), 0.0);
      for (int i = 0; i < dim; ++i) {
        for (int c = 0; c < rank; ++c)
          coefficients[static_cast<std::size_t>(c)] +=
              (static_cast<double>(row[i]) - mean_at(i)) *
              static_cast<double>(map[static_cast<std::size_t>(i * rank + c)]);
      }
      code_f64(settings.quantizer, coefficients);
      for (int i = 0; i < dim; ++i) {
        double sum = mean_at(i);
        for (int c = 0; c < rank; ++c)
          sum += coefficients[static_cast<std::size_t>(c)] *
                 static_cast<double>(map[static_cast<std::size_t>(i * rank + c)]);
        row[i] = static_cast<float>(sum);
      }
    }
  }
  return result;
}

}  // namespace star
