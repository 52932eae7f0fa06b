// SPDX-License-Identifier: Apache-2.0
/// @file diagnostics/certificate.hpp  Upper bounds, from a few norms, on what compression changed
/// in one attention output.
///
/// For one query q over tokens i: logits s q.k_i, weights alpha = softmax, output o = sum alpha_i
/// v_i. A hat marks the same quantity computed from the decoded keys and values. (SubSpace section
/// 3.5, with sharper constants.)
///
/// Step 1. delta = max_i |logit_i - logit^_i| <= |s| ||q|| max_i ||k_i - k^_i||  (Cauchy-Schwarz).
///
/// Step 2. ||alpha - alpha^||_1 <= 2 tanh(delta / 2).
/// Half the left side is alpha^(M) - alpha(M), where M is the set of tokens whose weight grew. The
/// odds of M change by a factor of at most e^(2 delta). With p = alpha(M) the difference is at most
/// p e^(2 delta) / (p e^(2 delta) + 1 - p) - p. Its maximum over p, at p = 1 / (1 + e^delta), is
/// tanh(delta / 2). Two tokens with logits -+ delta / 2 and errors +- delta attain it. The paper's
/// 2 sinh(delta / 2) is valid, but from delta = 1.77 on it exceeds 2, the largest possible value.
///
/// Step 3. ||o - o^|| <= ||alpha - alpha^||_1 max_i ||v_i - c|| + max_i ||v_i - v^_i||
/// for any one vector c. This holds because o - o^ = sum_i (alpha_i - alpha^_i) (v_i - c) + sum_i
/// alpha^_i (v_i - v^_i): the differences of the weights add up to 0.
///
/// Step 2'. ||alpha - alpha^||_1 <= 2 u / (1 + u - d), which is sharper if the residuals of tokens
/// differ. Let delta_i be the bound of token i. The weights in M grow by a factor of at most
/// e^delta_i, and the other weights shrink by a factor of at least e^-delta_i. Let u = sum_i
/// alpha^_i (e^delta_i - 1), d = sum_i alpha^_i (1 - e^-delta_i) and p = alpha^(M). Then alpha(M) -
/// alpha^(M) <= ((1 - p) u_M + p d_rest) / (1 + u_M - d_rest). This bound grows in u_M <= u and in
/// d_rest <= min(d, 1 - p), and is then largest at p = 0.
///
/// Step 3 likewise holds with sum_i alpha^_i ||v_i - v^_i|| in place of the largest residual.
///
/// Tokens kept at full rank have residual 0 and count in every maximum. Dropped tokens are not
/// covered by these bounds.
#pragma once

#include <cmath>

#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace detail {

/// Raises ValueError unless `value` is at least 0. Infinity passes: a bound may be infinite, but
/// not NaN.
inline void check_bound(const char* name, double value) {
  if (!(value >= 0.0))
    fail<ValueError>("certificate: ", name, " is ", value, ", at least 0 expected");
}
/// The product a b of bounds, where 0 times infinity is 0.
LOWRANKKV_HOST_DEVICE inline double bound_product(double a, double b) {
  return a == 0.0 || b == 0.0 ? 0.0 : a * b;
}
/// The bound of step 2 in the file comment.
LOWRANKKV_HOST_DEVICE inline double plain_bound(double delta) {
  return 2.0 * std::tanh(0.5 * delta);
}
/// The bound of step 2' in the file comment.
LOWRANKKV_HOST_DEVICE inline double weighted_bound(double growth, double decay) {
  const double rest = 1.0 - std::fmin(decay, 1.0);
  // In this form because growth, or 2 growth, may be infinite.
  return growth == 0.0 ? 0.0 : 2.0 / (1.0 + rest / growth);
}

}  // namespace detail
namespace diagnostics {

/// @brief Upper bound on delta, the largest error of a logit (step 1 in the file comment),
/// natural-log units.
/// @param query_norm        ||q||_2
/// @param max_key_residual  max_i ||k_i - k^_i||_2 with k^ as decoded, quantisation included. In
/// the metric of query-aware keys, pass ||R^-1 q|| and max_i ||R (k_i - k^_i)|| instead: the
/// product bounds the same logit
/// @param scale             of the logits, usually 1 / sqrt(head_dim); its sign does not matter
/// @throws ValueError if a norm is negative or NaN, or the scale is not finite
inline double logit_error_bound(double query_norm, double max_key_residual, double scale) {
  ::lowrankkv::detail::check_bound("query_norm", query_norm);
  ::lowrankkv::detail::check_bound("max_key_residual", max_key_residual);
  if (!std::isfinite(scale))
    ::lowrankkv::detail::fail<ValueError>("certificate: scale is ", scale, ", finite expected");
  return ::lowrankkv::detail::bound_product(
      ::lowrankkv::detail::bound_product(query_norm, max_key_residual), std::abs(scale));
}

/// @brief 2 tanh(delta / 2), the largest ||alpha - alpha^||_1 that logit errors of at most delta
/// can cause (step 2 in the file comment). The bound is attained, and is at most 2. @throws
/// ValueError if delta is negative or NaN
inline double softmax_error_bound(double delta) {
  ::lowrankkv::detail::check_bound("delta", delta);
  return ::lowrankkv::detail::plain_bound(delta);
}

/// @brief 2 u / (1 + u - d), at most 2: step 2' in the file comment.
/// @param growth  u = sum_i alpha^_i (e^delta_i - 1); may be infinite
/// @param decay   d = sum_i alpha^_i (1 - e^-delta_i), at most 1
/// @throws ValueError if one of them is negative or NaN
inline double weighted_softmax_error_bound(double growth, double decay) {
  ::lowrankkv::detail::check_bound("growth", growth);
  ::lowrankkv::detail::check_bound("decay", decay);
  return ::lowrankkv::detail::weighted_bound(growth, decay);
}

/// @brief 2 sinh(delta / 2), the bound as printed in SubSpace section 3.5, for comparison. It is
/// valid, never below softmax_error_bound(), and useless from delta = 1.77 on. @throws ValueError
/// if delta is negative or NaN
inline double softmax_error_bound_printed(double delta) {
  ::lowrankkv::detail::check_bound("delta", delta);
  return 2.0 * std::sinh(0.5 * delta);
}

/// @brief Upper bound on ||o - o^||_2 (step 3 in the file comment), in the unit of the values.
/// @param softmax_bound       softmax_error_bound(delta)
/// @param max_value_norm      max_i ||v_i||_2; sharper: max_i ||v_i - c|| for any one centre c, for
/// example the values' mean
/// @param max_value_residual  max_i ||v_i - v^_i||_2, v^ as decoded
/// @throws ValueError if one of them is negative or NaN
inline double output_error_bound(double softmax_bound, double max_value_norm,
                                 double max_value_residual) {
  ::lowrankkv::detail::check_bound("softmax_bound", softmax_bound);
  ::lowrankkv::detail::check_bound("max_value_norm", max_value_norm);
  ::lowrankkv::detail::check_bound("max_value_residual", max_value_residual);
  return ::lowrankkv::detail::bound_product(softmax_bound, max_value_norm) + max_value_residual;
}

}  // namespace diagnostics
LOWRANKKV_NAMESPACE_END
