// SPDX-License-Identifier: Apache-2.0
/// @file basis/per_head.hpp  PerHead: every KV head has key and value maps of its own (OjaKV, SubSpace-G).
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
  plain,        ///< minimises ||k - k^||^2; key_down = query_down = U
  query_aware,  ///< minimises E ||q (k - k^)||^2; key_down = R U, query_down = R^-1 U
};

/// @brief Basis policy: one orthonormal basis per KV head for keys and one for values.
struct PerHead {
  KeyMetric key_metric = KeyMetric::plain;
  bool centred = false;              ///< subtract the calibrated means before projecting
  float orthonormal_tolerance = 1e-3F;  ///< largest entry of |U^T U - I| that is accepted
  friend bool operator==(const PerHead&, const PerHead&) = default;
};

namespace detail {

/// max_ij |(A^T B - I)_ij| for A, B [dim, rank] row-major.
inline double biorthogonality_error(const std::vector<float>& a, const std::vector<float>& b, int dim, int rank) {
  double worst = 0.0;
  for (int i = 0; i < rank; ++i) {
    for (int j = 0; j < rank; ++j) {
      double product = i == j ? -1.0 : 0.0;
      for (int c = 0; c < dim; ++c) {
        product += static_cast<double>(a[static_cast<std::size_t>(c * rank + i)]) * b[static_cast<std::size_t>(c * rank + j)];
      }
      worst = (std::max)(worst, std::isfinite(product) ? std::abs(product) : 1e300);
    }
  }
  return worst;
}

inline void check_size(const char* what, std::size_t expected, std::size_t given) {
  if (expected != given) fail<ShapeError>("basis: ", what, " has ", given, " elements, expected ", expected);
}

/// Raises ShapeError or ValueError unless the channels' bits and rms are absent, or there for every channel and usable.
inline void check_channels(const char* what, const std::vector<std::uint8_t>& bits, const std::vector<float>& rms, int rank) {
  const std::size_t channels = static_cast<std::size_t>(rank);
  if (!bits.empty() && bits.size() != channels) fail<ShapeError>("basis: ", what, "_bits has ", bits.size(), " elements, rank ", rank);
  if (!rms.empty() && rms.size() != channels) fail<ShapeError>("basis: ", what, "_rms has ", rms.size(), " elements, rank ", rank);
  for (const std::uint8_t width : bits) {
    if (width > 8) fail<ValueError>("basis: ", what, "_bits holds ", int{width}, ", at most 8");
  }
  for (std::size_t i = 1; i < bits.size(); ++i) {
    if (bits[i] > bits[i - 1]) fail<ValueError>("basis: ", what, "_bits rises from ", int{bits[i - 1]}, " to ", int{bits[i]}, "; channels are sorted");
  }
  for (const float value : rms) {
    if (!(value > 0.0F) || !std::isfinite(value)) fail<ValueError>("basis: ", what, "_rms holds ", value, ", finite and positive expected");
  }
}

/// Raises ShapeError or ValueError unless the key maps of `head` fit the policy.
inline void validate_keys(const PerHead& policy, const HeadBasis& head, int head_dim) {
  const std::size_t dim = static_cast<std::size_t>(head_dim);
  if (head.key_rank < 1 || head.key_rank > head_dim) fail<ShapeError>("rank: key_rank ", head.key_rank, ", head_dim ", head_dim);
  const std::size_t keys = dim * static_cast<std::size_t>(head.key_rank);
  check_size("key_down", keys, head.key_down.size());
  const bool aware = policy.key_metric == KeyMetric::query_aware;
  check_size("query_down", aware ? keys : 0, head.query_down.size());
  check_size("key_metric", aware ? dim * dim : 0, head.key_metric.size());
  check_size("key_metric_inverse", aware ? dim * dim : 0, head.key_metric_inverse.size());
  check_size("key_mean", policy.centred ? dim : 0, head.key_mean.size());
  check_channels("key", head.key_bits, head.key_rms, head.key_rank);
  const double error = biorthogonality_error(head.key_down, aware ? head.query_down : head.key_down, head_dim, head.key_rank);
  if (error > policy.orthonormal_tolerance) {
    fail<ValueError>("basis: not orthonormal: max |U^T U - I| is ", error, " for keys, tolerance ", policy.orthonormal_tolerance);
  }
  if (!aware) return;
  // query_down may be tiny where key_down is large; what f16 cannot resolve would decode to nothing.
  std::vector<float> keys_stored = head.key_down, queries_stored = head.query_down;
  for (float& value : keys_stored) value = round_to(DType::f16, value);
  for (float& value : queries_stored) value = round_to(DType::f16, value);
  const double stored_error = biorthogonality_error(keys_stored, queries_stored, head_dim, head.key_rank);
  if (stored_error > 0.05) fail<ValueError>("basis: in f16 the key maps' product differs from I by ", stored_error, ", limit 0.05; scale the metric to mean 1");
  const double metric_error = biorthogonality_error(head.key_metric, head.key_metric_inverse, head_dim, head_dim);
  if (metric_error > 0.05) fail<ValueError>("basis: key_metric times its inverse differs from I by ", metric_error, ", limit 0.05");
}

/// Raises ShapeError or ValueError unless what goes with the value map of `head` fits; the map itself is checked elsewhere.
inline void check_values(const PerHead& policy, const HeadBasis& head, int head_dim, const char* who) {
  if (!head.output_up.empty()) fail<ValueError>("basis: ", who, " derives output_up from value_down, but one is given");
  check_size("value_mean", policy.centred ? static_cast<std::size_t>(head_dim) : 0, head.value_mean.size());
  check_channels("value", head.value_bits, head.value_rms, head.value_rank);
}

/// Raises ShapeError or ValueError unless `head` is a basis that PerHead can use.
inline void validate_head(const PerHead& policy, const HeadBasis& head, int head_dim) {
  if (head.value_rank < 1 || head.value_rank > head_dim) fail<ShapeError>("rank: value_rank ", head.value_rank, ", head_dim ", head_dim);
  validate_keys(policy, head, head_dim);
  check_size("value_down", static_cast<std::size_t>(head_dim) * static_cast<std::size_t>(head.value_rank), head.value_down.size());
  check_values(policy, head, head_dim, "PerHead");
  const double error = biorthogonality_error(head.value_down, head.value_down, head_dim, head.value_rank);
  if (error > policy.orthonormal_tolerance) {
    fail<ValueError>("basis: not orthonormal: max |U^T U - I| is ", error, " for values, tolerance ", policy.orthonormal_tolerance);
  }
}

/// Raises ValueError if a map or mean is not finite, or too large for the type that epochs are stored in.
inline void check_storable(const LayerBasis& basis, DType epoch_type) {
  const float limit = max_finite(epoch_type);
  for (const HeadBasis& head : basis.heads) {
    for (const auto* values : {&head.key_down, &head.query_down, &head.value_down, &head.output_up, &head.key_mean, &head.value_mean}) {
      for (const float value : *values) {
        if (!(std::abs(value) <= limit)) fail<ValueError>("basis: a map or mean holds ", value, ", epoch_type ", name_of(epoch_type), " holds at most ", limit);
      }
    }
  }
}

}  // namespace detail

/// @brief Raises ShapeError or ValueError, naming both values, unless `basis` fits the shape and the policy.
inline void validate(const PerHead& policy, const LayerBasis& basis, const CacheShape& shape) {
  detail::check_equal("num_kv_heads", "cache", shape.num_kv_heads, "basis", static_cast<int>(basis.heads.size()));
  for (const HeadBasis& head : basis.heads) detail::validate_head(policy, head, shape.head_dim);
}

LOWRANKKV_NAMESPACE_END
