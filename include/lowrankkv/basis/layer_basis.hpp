// SPDX-License-Identifier: Apache-2.0
/// @file basis/layer_basis.hpp  The projection maps of one layer, as calibration computes them and
/// a cache takes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief The linear maps of one KV head. All matrices are f32, row-major.
///
/// Encode: c_k = (k - key_mean) key_down, c_v = (v - value_mean) value_down.
/// Decode: k = c_k query_down^T + key_mean, v = c_v output_up + value_mean.
struct HeadBasis {
  int key_rank = 0;               ///< coefficients of a key
  int value_rank = 0;             ///< coefficients of a value
  std::vector<float> key_down;    ///< [head_dim, key_rank]
  std::vector<float> query_down;  ///< [head_dim, key_rank]; empty: the same as key_down
  std::vector<float> value_down;  ///< [head_dim, value_rank]
  std::vector<float> output_up;   ///< [value_rank, head_dim]; empty: the transpose of value_down
  std::vector<float> key_mean;    ///< [head_dim]; empty: not centred
  std::vector<float> value_mean;  ///< [head_dim]; empty: not centred
  /// Metric of query-aware keys: R, the root of the queries' second moment, and its inverse,
  /// [head_dim, head_dim] each. Then key_down = R U and query_down = R^-1 U with U orthonormal.
  /// Empty: the plain metric.
  std::vector<float> key_metric;
  std::vector<float> key_metric_inverse;
  /// The same for values: value_down = R U, output_up = U^T R^-1.
  std::vector<float> value_metric;
  std::vector<float> value_metric_inverse;

  /// For quantizers with individual bits per channel: the bits of each channel, non-increasing, and
  /// the calibrated root mean square of its coefficients. [key_rank] and [value_rank]; empty where
  /// not needed.
  std::vector<std::uint8_t> key_bits, value_bits;
  std::vector<float> key_rms, value_rms;
  /// Residual norms, ||k - k^|| in the key metric and ||v - v^||, above which an updater acts
  /// (calibrated percentiles: calibrate::set_residual_thresholds()). Infinity: never. NaN: not set,
  /// which an updater that reads them refuses.
  float key_threshold = std::numeric_limits<float>::quiet_NaN();
  float value_threshold = std::numeric_limits<float>::quiet_NaN();

  /// @brief Bytes of all arrays.
  std::size_t bytes() const {
    return key_bits.size() + value_bits.size() + 4 * (key_rms.size() + value_rms.size()) +
           4 * (key_down.size() + query_down.size() + value_down.size() + output_up.size() +
                key_mean.size() + value_mean.size() + key_metric.size() +
                key_metric_inverse.size() + value_metric.size() + value_metric_inverse.size());
  }
};

/// @brief The maps of all KV heads of one layer; ranks may differ from head to head.
struct LayerBasis {
  std::vector<HeadBasis> heads;  ///< one per KV head
};

LOWRANKKV_NAMESPACE_END
