// SPDX-License-Identifier: Apache-2.0
/// @file diagnostics/certificate.hpp  Upper bounds on what compression changed in one attention
/// output, from a few norms.
///
/// For one query q over tokens i: logits s q.k_i, weights alpha = softmax, output o = sum alpha_i
/// v_i; with a hat: the same from the decoded keys and values. (SubSpace section 3.5, with sharper
/// constants.)
///   1. delta = max_i |logit_i - logit^_i| <= |s| ||q|| max_i ||k_i - k^_i|| Cauchy-Schwarz
///   2. ||alpha - alpha^||_1 <= 2 tanh(delta / 2)
///      Half the left side is alpha^(M) - alpha(M) for the set M of tokens whose weight grew. The
///      odds of M change by at most e^(2 delta) in ratio, so with p = alpha(M) it is at most p e^(2
///      delta) / (p e^(2 delta) + 1 - p) - p, whose maximum over p, at p = 1 / (1 + e^delta), is
///      tanh(delta / 2). Two tokens with logits -+ delta / 2 and errors
///      +- delta attain it. The paper's 2 sinh(delta / 2) is valid, but exceeds 2, the most that
///      can be, from 1.77 on.
///   3. o - o^ = sum_i (alpha_i - alpha^_i) (v_i - c) + sum_i alpha^_i (v_i - v^_i), for any one
///   vector c, since the
///      differences of the weights add up to 0. Hence
///      ||o - o^|| <= ||alpha - alpha^||_1 max_i ||v_i - c|| + max_i ||v_i - v^_i||.
/// Sharper where the residuals of tokens differ: with delta_i the bound of token i, the weights
/// grow in M by a factor of at most e^delta_i and shrink outside by one of at least e^-delta_i.
/// With u = sum_i alpha^_i (e^delta_i - 1), d = sum_i alpha^_i (1 - e^-delta_i) and p = alpha^(M),
/// alpha(M) - alpha^(M) <= ((1 - p) u_M + p d_rest) / (1 + u_M - d_rest), which grows in u_M <= u
/// and in d_rest <= min(d, 1 - p), and is then largest at p = 0: 2'. ||alpha - alpha^||_1 <= 2 u /
/// (1 + u - d). Likewise step 3 with sum_i alpha^_i ||v_i - v^_i|| in place of the largest
/// residual. Tokens kept at full rank have residual 0 and count in every maximum; dropped tokens
/// are outside these bounds.
#pragma once

#include <cmath>

#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace detail {

/// Raises ValueError unless `value` is at least 0; infinity passes: a bound may be infinite, but
/// never NaN.
inline void check_bound(const char* name, double value) {
  if (!(value >= 0.0))
    fail<ValueError>("certificate: ", name, " is ", value, ", at least 0 expected");
}
/// a b for bounds: nothing times anything is nothing, even times infinity.
LOWRANKKV_HOST_DEVICE inline double bound_product(double a, double b) {
  return a == 0.0 || b == 0.0 ? 0.0 : a * b;
}
/// Step 2 of the banner.
LOWRANKKV_HOST_DEVICE inline double plain_bound(double delta) {
  return 2.0 * std::tanh(0.5 * delta);
}
/// Step 2' of the banner.
LOWRANKKV_HOST_DEVICE inline double weighted_bound(double growth, double decay) {
  const double rest = 1.0 - std::fmin(decay, 1.0);
  return growth == 0.0 ? 0.0 : 2.0 / (1.0 + rest / growth);  // growth may be infinite, or twice it
}

}  // namespace detail
namespace diagnostics {

/// @brief Upper bound on delta, the largest error of a logit (step 1 of the banner), natural-log
/// units.
/// @param query_norm        ||q||_2
/// @param max_key_residual  max_i ||k_i - k^_i||_2 with k^ as decoded, quantisation included. In
/// the metric of query-aware
///                          keys take ||R^-1 q|| and max_i ||R (k_i - k^_i)|| instead: the product
///                          bounds the same logit.
/// @param scale             of the logits, 1 / sqrt(head_dim) as a rule; its sign does not matter
/// @throws ValueError if a norm is negative or NaN, or the scale not finite
inline double logit_error_bound(double query_norm, double max_key_residual, double scale) {
  ::lowrankkv::detail::check_bound("query_norm", query_norm);
  ::lowrankkv::detail::check_bound("max_key_residual", max_key_residual);
  if (!std::isfinite(scale))
    ::lowrankkv::detail::fail<ValueError>("certificate: scale is ", scale, ", finite expected");
  return ::lowrankkv::detail::bound_product(
      ::lowrankkv::detail::bound_product(query_norm, max_key_residual), std::abs(scale));
}

/// @brief 2 tanh(delta / 2): the largest ||alpha - alpha^||_1 that logit errors of at most delta
/// can make (step 2 of the banner); attained, at most 2. @throws ValueError if delta is negative or
/// NaN
inline double softmax_error_bound(double delta) {
  ::lowrankkv::detail::check_bound("delta", delta);
  return ::lowrankkv::detail::plain_bound(delta);
}

/// @brief 2 u / (1 + u - d), at most 2: step 2' of the banner.
/// @param growth  u = sum_i alpha^_i (e^delta_i - 1); infinity passes  @param decay  d = sum_i
/// alpha^_i (1 - e^-delta_i), at most 1
/// @throws ValueError if one of them is negative or NaN
inline double weighted_softmax_error_bound(double growth, double decay) {
  ::lowrankkv::detail::check_bound("growth", growth);
  ::lowrankkv::detail::check_bound("decay", decay);
  return ::lowrankkv::detail::weighted_bound(growth, decay);
}

/// @brief 2 sinh(delta / 2), the bound as printed in SubSpace section 3.5: valid, never below
/// softmax_error_bound, and useless from delta = 1.77 on. For comparison. @throws ValueError if
/// delta is negative or NaN
inline double softmax_error_bound_printed(double delta) {
  ::lowrankkv::detail::check_bound("delta", delta);
  return 2.0 * std::sinh(0.5 * delta);
}

/// @brief Upper bound on ||o - o^||_2 (step 3 of the banner), in the unit of the values.
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
