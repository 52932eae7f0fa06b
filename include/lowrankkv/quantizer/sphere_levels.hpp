// SPDX-License-Identifier: Apache-2.0
/// @file quantizer/sphere_levels.hpp  Levels for a coordinate of a random direction, by Lloyd's
/// algorithm.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <vector>

#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace detail {

/// The integral of cos^power from 0 to `angle`, by I_m = (cos^(m-1) sin + (m - 1) I_(m-2)) / m.
inline double cosine_integral(int power, double angle) {
  const double sine = std::sin(angle), cosine = std::cos(angle);
  double sum = power % 2 == 0 ? angle : sine;
  double factor = power % 2 == 0 ? cosine : cosine * cosine;  // cos^(m-1) of the next m
  for (int m = 2 + power % 2; m <= power; m += 2) {
    sum = (factor * sine + (m - 1) * sum) / m;
    factor *= cosine * cosine;
  }
  return sum;
}

}  // namespace detail

/// @brief The 2^bits levels, ascending, with the least mean squared error for one coordinate of a
/// vector that is uniform on the unit sphere of `dim` dimensions (TurboQuant section 3.1).
///
/// The coordinate is t = sin(a), the density of a proportional to cos^(dim - 2)(a). Lloyd's
/// algorithm: cells end halfway between levels, and a level is its cell's mean,
/// (cos^(dim-1)(low) - cos^(dim-1)(high)) / (dim - 1) over the integral of cos^(dim-2). Both are
/// exact; levels are repeated until none moves by more than 1e-12. Cost: about 10^3 rounds of
/// 2^bits dim operations.
/// @param dim   at least 2
/// @param bits  1 to 8
/// @throws ShapeError, ValueError
inline std::vector<float> sphere_levels(int dim, int bits) {
  if (dim < 2) detail::fail<ShapeError>("sphere_levels: dim at least 2, given ", dim);
  if (bits < 1 || bits > 8) detail::fail<ValueError>("sphere_levels: bits 1 to 8, given ", bits);
  const std::size_t half = std::size_t{1} << (bits - 1);  // the density is even, so levels are
  std::vector<double> levels(half), edges(half + 1), weights(half + 1);
  const double spread = 3.0 / std::sqrt(static_cast<double>(dim));
  for (std::size_t i = 0; i < half; ++i)
    levels[i] =
        (std::min)(1.0, spread) * (static_cast<double>(i) + 0.5) / static_cast<double>(half);
  edges[half] = std::numbers::pi / 2.0;
  weights[half] = detail::cosine_integral(dim - 2, edges[half]);
  double moved = 1.0;
  for (int round = 0; round < 20000 && moved > 1e-12; ++round) {
    for (std::size_t i = 1; i < half; ++i) {
      edges[i] = std::asin(0.5 * (levels[i - 1] + levels[i]));
      weights[i] = detail::cosine_integral(dim - 2, edges[i]);
    }
    moved = 0.0;
    for (std::size_t i = 0; i < half; ++i) {
      const double low = std::pow(std::cos(edges[i]), dim - 1);
      const double high = i + 1 == half ? 0.0 : std::pow(std::cos(edges[i + 1]), dim - 1);
      const double mean = (low - high) / (dim - 1) / (weights[i + 1] - weights[i]);
      moved = (std::max)(moved, std::abs(mean - levels[i]));
      levels[i] = mean;
    }
  }
  std::vector<float> result;
  for (std::size_t i = half; i-- > 0;) result.push_back(static_cast<float>(-levels[i]));
  for (const double level : levels) result.push_back(static_cast<float>(level));
  return result;
}

LOWRANKKV_NAMESPACE_END
