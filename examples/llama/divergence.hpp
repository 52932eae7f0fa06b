// SPDX-License-Identifier: Apache-2.0
// Next-token distributions, and how far one is from another.
#pragma once

#include <cstdint>
#include <vector>

#include "evaluate.hpp"

namespace llama {

/// The distribution p = softmax(logits) of the next token at one position, in f64.
class NextToken {
 public:
  /// @param logits  [vocabulary], finite; throws std::runtime_error if one is not, or there is none
  NextToken(const float* logits, int vocabulary);
  /// KL(p || q) = sum_i p_i (log p_i - log q_i), in nats, of q = softmax(logits). Logits enter as
  /// differences from their largest, so that nothing overflows; rounding, some 1e-12, is cut off at
  /// 0. Throws as the constructor. Cost: one exp a token.
  double divergence(const float* logits) const;
  /// The first of the most likely tokens.
  std::int32_t top() const { return top_; }

 private:
  std::vector<double> shifted_;      // logits less their largest
  std::vector<double> probability_;  // p
  double log_sum_ = 0.0;             // log of the sum of exp of shifted_
  std::int32_t top_ = 0;
};

/// log softmax(logits) of one token, in nats, in f64.
double log_probability(const float* logits, int vocabulary, std::int32_t token);

/// The first of the largest logits. Throws std::runtime_error if one is not finite, or there is
/// none.
std::int32_t most_likely(const float* logits, int vocabulary);

/// The least of the values that at least a share `rank` of them do not exceed: the nearest rank.
/// Throws std::runtime_error without values, or if rank is not in (0, 1].
double quantile(std::vector<double> values, double rank);

/// What positions say together. Throws std::runtime_error if there are none.
/// @param values  KL of every position
/// @param agreed  at how many of them the most likely token is the same
Divergence summarize(const std::vector<double>& values, std::int64_t agreed);

}  // namespace llama
