// SPDX-License-Identifier: Apache-2.0
/// @file cpu/residual_norms.hpp  Norms of rows and of compression residuals, as upper bounds in
/// f16.
#pragma once

#include <cmath>
#include <cstddef>

#include "lowrankkv/core/scalar.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief The smallest f16 that is not below 1.001 `norm`; infinity if there is none, or if `norm`
/// is not a number.
inline Half norm_not_below(double norm) {
  // The f32 arithmetic of projections and attention is inexact. The bound must cover its rounding.
  const float wide = static_cast<float>(1.001 * norm);
  const Half half = half_not_below(wide);
  return to_float(half) >= wide ? half : Half{0x7c00U};
}

/// @brief ||row||, summed in f64.
inline double norm_of(const float* row, int dim) {
  double sum = 0.0;
  for (int channel = 0; channel < dim; ++channel)
    sum += static_cast<double>(row[channel]) * row[channel];
  return std::sqrt(sum);
}
/// @brief ||a - b||, summed in f64.
inline double distance_of(const float* a, const float* b, int dim) {
  double sum = 0.0;
  for (int channel = 0; channel < dim; ++channel) {
    const double difference = static_cast<double>(a[channel]) - b[channel];
    sum += difference * difference;
  }
  return std::sqrt(sum);
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
