// SPDX-License-Identifier: Apache-2.0
/// @file basis/per_head.hpp  PerHead: each KV head has its own key and value maps (OjaKV,
/// SubSpace-G).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/scalar.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief The metric in which a key basis is orthonormal.
enum class KeyMetric {
  /// Minimises ||k - k^||^2; key_down = query_down = U.
  plain,
  /// Minimises E ||(k - k^) R||^2; key_down = R U, query_down = R^-1 U. R is the root of the
  /// queries' second moment, or of the loss's quadratic form in the error of a key.
  query_aware,
};

/// @brief The metric in which a value basis is orthonormal.
enum class ValueMetric {
  plain,  ///< minimises ||v - v^||^2; value_down = U, output_up = U^T
  /// Minimises E ||(v - v^) R||^2 for a metric R; value_down = R U, output_up = U^T R^-1.
  output_aware,
};

/// @brief Basis policy: one orthonormal basis per KV head for keys and one for values.
struct PerHead {
  KeyMetric key_metric = KeyMetric::plain;
  ValueMetric value_metric = ValueMetric::plain;
  /// Subtract the means that the basis carries before projecting. A part of a head without a mean
  /// has nothing to subtract. false: the basis must carry none, as in the papers.
  bool centred = true;
  float orthonormal_tolerance = 1e-3F;  ///< largest entry of |U^T U - I| that is accepted
  friend bool operator==(const PerHead&, const PerHead&) = default;
};

namespace detail {

/// max_ij |(A^T B - I)_ij| for A, B [dim, rank] row-major.
inline double biorthogonality_error(const std::vector<float>& a, const std::vector<float>& b,
                                    int dim, int rank) {
  double worst = 0.0;
  std::vector<double> products(static_cast<std::size_t>(rank));
  for (int i = 0; i < rank; ++i) {
    std::fill(products.begin(), products.end(), 0.0);
    products[static_cast<std::size_t>(i)] = -1.0;
    for (int c = 0; c < dim; ++c) {
      const double own = a[static_cast<std::size_t>(c * rank + i)];
      for (int j = 0; j < rank; ++j)
        products[static_cast<std::size_t>(j)] += own * b[static_cast<std::size_t>(c * rank + j)];
    }
    for (const double product : products)
      worst = (std::max)(worst, std::isfinite(product) ? std::abs(product) : 1e300);
  }
  return worst;
}

inline void check_size(const char* what, std::size_t expected, std::size_t given) {
  if (expected != given)
    fail<ShapeError>("basis: ", what, " has ", given, " elements, expected ", expected);
}

/// Raises ShapeError unless a mean is absent, or given for all channels under a policy that
/// subtracts means.
inline void check_mean(const char* what, bool centred, int head_dim,
                       const std::vector<float>& mean) {
  if (!mean.empty())
    check_size(what, centred ? static_cast<std::size_t>(head_dim) : 0, mean.size());
}

/// Raises ShapeError or ValueError unless bits and rms of the channels are each absent, or given
/// and usable for every channel.
inline void check_channels(const char* what, const std::vector<std::uint8_t>& bits,
                           const std::vector<float>& rms, int rank) {
  const std::size_t channels = static_cast<std::size_t>(rank);
  if (!bits.empty() && bits.size() != channels)
    fail<ShapeError>("basis: ", what, "_bits has ", bits.size(), " elements, rank ", rank);
  if (!rms.empty() && rms.size() != channels)
    fail<ShapeError>("basis: ", what, "_rms has ", rms.size(), " elements, rank ", rank);
  for (const std::uint8_t width : bits) {
    if (width > 8) fail<ValueError>("basis: ", what, "_bits holds ", int{width}, ", at most 8");
  }
  for (std::size_t i = 1; i < bits.size(); ++i) {
    if (bits[i] > bits[i - 1])
      fail<ValueError>("basis: ", what, "_bits rises from ", int{bits[i - 1]}, " to ", int{bits[i]},
                       "; channels are sorted");
  }
  for (const float value : rms) {
    if (!(value >= 1e-20F) || !(value <= 1e20F))
      fail<ValueError>("basis: ", what, "_rms holds ", value, ", 1e-20 to 1e20 expected");
  }
}

/// Raises ValueError unless the maps of one part are biorthogonal, and with a metric: biorthogonal
/// also in f16, and the metric's product with its inverse is the identity.
inline void check_metric(const char* part, const std::vector<float>& down,
                         const std::vector<float>& up, const std::vector<float>& metric,
                         const std::vector<float>& inverse, int head_dim, int rank,
                         float tolerance) {
  const double error = biorthogonality_error(down, up, head_dim, rank);
  if (error > static_cast<double>(tolerance)) {
    fail<ValueError>("basis: not orthonormal: max |U^T U - I| is ", error, " for ", part,
                     "s, tolerance ", tolerance);
  }
  if (metric.empty()) return;
  // One map may be tiny where the other is large. Values that f16 cannot resolve would decode to 0.
  std::vector<float> down_stored = down, up_stored = up;
  for (float& value : down_stored) value = round_to(DType::f16, value);
  for (float& value : up_stored) value = round_to(DType::f16, value);
  const double stored_error = biorthogonality_error(down_stored, up_stored, head_dim, rank);
  if (stored_error > 0.05)
    fail<ValueError>("basis: in f16 the ", part, " maps' product differs from I by ", stored_error,
                     ", limit 0.05; scale the metric to mean 1");
  const double metric_error = biorthogonality_error(metric, inverse, head_dim, head_dim);
  if (metric_error > 0.05)
    fail<ValueError>("basis: ", part, "_metric times its inverse differs from I by ", metric_error,
                     ", limit 0.05");
}

/// Raises ShapeError or ValueError unless the key maps of `head` fit the policy.
inline void validate_keys(const PerHead& policy, const HeadBasis& head, int head_dim) {
  const std::size_t dim = static_cast<std::size_t>(head_dim);
  if (head.key_rank < 1 || head.key_rank > head_dim)
    fail<ShapeError>("rank: key_rank ", head.key_rank, ", head_dim ", head_dim);
  const std::size_t keys = dim * static_cast<std::size_t>(head.key_rank);
  check_size("key_down", keys, head.key_down.size());
  const bool aware = policy.key_metric == KeyMetric::query_aware;
  check_size("query_down", aware ? keys : 0, head.query_down.size());
  check_size("key_metric", aware ? dim * dim : 0, head.key_metric.size());
  check_size("key_metric_inverse", aware ? dim * dim : 0, head.key_metric_inverse.size());
  check_mean("key_mean", policy.centred, head_dim, head.key_mean);
  check_channels("key", head.key_bits, head.key_rms, head.key_rank);
  check_metric("key", head.key_down, aware ? head.query_down : head.key_down, head.key_metric,
               head.key_metric_inverse, head_dim, head.key_rank, policy.orthonormal_tolerance);
}

/// Raises ShapeError or ValueError unless output_up, metric, mean, bits and rms of the values of
/// `head` fit the policy. The value map itself is checked elsewhere.
inline void check_values(const PerHead& policy, const HeadBasis& head, int head_dim) {
  const std::size_t dim = static_cast<std::size_t>(head_dim);
  const bool aware = policy.value_metric == ValueMetric::output_aware;
  if (!aware && !head.output_up.empty())
    fail<ValueError>("basis: output_up is derived from value_down in the plain metric, but ",
                     head.output_up.size(), " elements are given, 0 expected");
  check_size("output_up", aware ? dim * static_cast<std::size_t>(head.value_rank) : 0,
             head.output_up.size());
  check_size("value_metric", aware ? dim * dim : 0, head.value_metric.size());
  check_size("value_metric_inverse", aware ? dim * dim : 0, head.value_metric_inverse.size());
  check_mean("value_mean", policy.centred, head_dim, head.value_mean);
  check_channels("value", head.value_bits, head.value_rms, head.value_rank);
}

/// output_up [rank, dim] transposed to [dim, rank], or value_down if output_up is empty.
inline std::vector<float> value_decoder(const HeadBasis& head, int head_dim) {
  if (head.output_up.empty()) return head.value_down;
  std::vector<float> rotated(head.output_up.size());
  for (int channel = 0; channel < head_dim; ++channel) {
    for (int k = 0; k < head.value_rank; ++k) {
      rotated[static_cast<std::size_t>(channel * head.value_rank + k)] =
          head.output_up[static_cast<std::size_t>(k * head_dim + channel)];
    }
  }
  return rotated;
}

/// Raises ShapeError or ValueError unless `head` is a basis that PerHead can use.
inline void validate_head(const PerHead& policy, const HeadBasis& head, int head_dim) {
  if (head.value_rank < 1 || head.value_rank > head_dim)
    fail<ShapeError>("rank: value_rank ", head.value_rank, ", head_dim ", head_dim);
  validate_keys(policy, head, head_dim);
  check_size("value_down",
             static_cast<std::size_t>(head_dim) * static_cast<std::size_t>(head.value_rank),
             head.value_down.size());
  check_values(policy, head, head_dim);
  check_metric("value", head.value_down, value_decoder(head, head_dim), head.value_metric,
               head.value_metric_inverse, head_dim, head.value_rank, policy.orthonormal_tolerance);
}

/// Raises ValueError if a map or mean is not finite, or too large for `epoch_type`.
inline void check_storable(const LayerBasis& basis, DType epoch_type) {
  const float limit = max_finite(epoch_type);
  for (const HeadBasis& head : basis.heads) {
    for (const auto* values : {&head.key_down, &head.query_down, &head.value_down, &head.output_up,
                               &head.key_mean, &head.value_mean}) {
      for (const float value : *values) {
        if (!(std::abs(value) <= limit))
          fail<ValueError>("basis: a map or mean holds ", value, ", epoch_type ",
                           name_of(epoch_type), " holds at most ", limit);
      }
    }
  }
}

/// Raises ShapeError unless the basis has maps for every head.
inline void check_num_heads(const LayerBasis& basis, const CacheShape& shape) {
  if (basis.heads.empty() && shape.num_kv_heads > 0) {
    fail<ShapeError>("num_kv_heads: cache ", shape.num_kv_heads,
                     ", basis 0: this policy compresses and needs a calibrated basis "
                     "(calibrate::LayerMoments makes one)");
  }
  check_equal("num_kv_heads", "cache", shape.num_kv_heads, "basis",
              static_cast<int>(basis.heads.size()));
}

}  // namespace detail

/// @brief Raises ShapeError or ValueError, naming both values, unless `basis` fits the shape and
/// the policy.
inline void validate(const PerHead& policy, const LayerBasis& basis, const CacheShape& shape) {
  detail::check_num_heads(basis, shape);
  for (const HeadBasis& head : basis.heads) detail::validate_head(policy, head, shape.head_dim);
}

LOWRANKKV_NAMESPACE_END
