// SPDX-License-Identifier: Apache-2.0
/// @file updater/oja.hpp  Oja: the parameters of the online subspace rule of OjaKV (section 5.2,
/// algorithm 1).
///
/// Symbols of the paper: U basis, K batch of keys (or values), eta learning rate, w importance
/// window, k_pre selected prompt tokens, T update period (CacheConfig::flush_interval).
#pragma once

#include "lowrankkv/core/attention_scores.hpp"
#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Form of the update step. K is the batch [n, d] and s = d / ||K||_F^2, the inverse of the
/// batch's mean energy per channel: a rate has the same effect for any scale of the data and any
/// batch size.
enum class OjaForm {
  /// U <- orth(U + eta s K^T K U). Never raises the batch's residual energy, for any eta > 0.
  power,
  /// U <- orth(U + eta s (I - U U^T) K^T K U), with eta halved until the residual does not rise.
  printed_normalised,
  /// As printed in algorithm 1: printed_normalised with s = 1 and without the check. For ablation.
  printed_raw,
};

/// @brief Updater policy: one Oja step on the selected prompt tokens, then one every flush_interval
/// decoded tokens.
struct Oja {
  float prefill_rate = 0.1F;  ///< eta_pre
  float decode_rate = 0.05F;  ///< eta_dec
  /// k_pre / n: share of the prompt (or chunk) that the prefill step sees.
  float prefill_share = 0.05F;
  /// w: queries at the end of the prompt (or chunk) that score its tokens.
  int importance_window = 32;
  int importance_kernel = 1;  ///< width of score pooling, odd; 1: no pooling
  Pooling importance_pooling = Pooling::average;
  /// Whose attention scores the prompt's tokens. Section 5.2 sums over all heads: `layer`. The
  /// default follows GQA, where each KV head has its own bases.
  ScoreScope importance_scope = ScoreScope::kv_head;
  /// Learning-rate schedule while decoding: step t uses decode_rate / (1 + decode_decay t). 0:
  /// constant rate. Positive values satisfy Oja's conditions for convergence on a stationary stream
  /// (the sum of rates diverges, the sum of their squares converges).
  float decode_decay = 0.0F;
  OjaForm form = OjaForm::power;
  friend bool operator==(const Oja&, const Oja&) = default;
};

/// @brief Raises ValueError for parameters that no Oja step can have.
inline void check_oja(const Oja& policy) {
  using ::lowrankkv::detail::fail;
  if (!(policy.prefill_rate >= 0.0F) || !(policy.decode_rate >= 0.0F)) {
    fail<ValueError>("Oja: rates are at least 0, given prefill_rate ", policy.prefill_rate,
                     " and decode_rate ", policy.decode_rate);
  }
  if (!(policy.prefill_share >= 0.0F && policy.prefill_share <= 1.0F))
    fail<ValueError>("Oja: prefill_share is in [0, 1], given ", policy.prefill_share);
  if (policy.importance_window < 1)
    fail<ValueError>("Oja: importance_window is at least 1, given ", policy.importance_window);
  if (policy.importance_kernel < 1 || policy.importance_kernel % 2 == 0)
    fail<ValueError>("Oja: importance_kernel is odd and at least 1, given ",
                     policy.importance_kernel);
  if (!(policy.decode_decay >= 0.0F))
    fail<ValueError>("Oja: decode_decay is at least 0, given ", policy.decode_decay);
}

LOWRANKKV_NAMESPACE_END
