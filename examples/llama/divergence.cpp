// SPDX-License-Identifier: Apache-2.0
#include "divergence.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>

namespace llama {

std::int32_t most_likely(const float* logits, int vocabulary) {
  if (vocabulary < 1)
    throw std::runtime_error("logits: a vocabulary of " + std::to_string(vocabulary) +
                             ", at least 1 is expected");
  const auto* wrong =
      std::find_if(logits, logits + vocabulary, [](float x) { return !std::isfinite(x); });
  if (wrong != logits + vocabulary)
    throw std::runtime_error("logits: token " + std::to_string(wrong - logits) + " has " +
                             std::to_string(*wrong) + ", finite numbers are expected");
  return static_cast<std::int32_t>(std::max_element(logits, logits + vocabulary) - logits);
}

double log_probability(const float* logits, int vocabulary, std::int32_t token) {
  const auto largest = static_cast<double>(logits[most_likely(logits, vocabulary)]);
  double sum = 0.0;
  for (int i = 0; i < vocabulary; ++i) sum += std::exp(static_cast<double>(logits[i]) - largest);
  return static_cast<double>(logits[token]) - largest - std::log(sum);
}

NextToken::NextToken(const float* logits, int vocabulary) : top_(most_likely(logits, vocabulary)) {
  const auto largest = static_cast<double>(logits[top_]);
  double sum = 0.0;
  for (int i = 0; i < vocabulary; ++i) {
    shifted_.push_back(static_cast<double>(logits[i]) - largest);
    probability_.push_back(std::exp(shifted_.back()));
    sum += probability_.back();
  }
  log_sum_ = std::log(sum);
  for (double& p : probability_) p /= sum;
}

double NextToken::divergence(const float* logits) const {
  const auto vocabulary = static_cast<int>(shifted_.size());
  const auto largest = static_cast<double>(logits[most_likely(logits, vocabulary)]);
  double sum = 0.0, difference = 0.0;
  for (std::size_t i = 0; i < shifted_.size(); ++i) {
    const double other = static_cast<double>(logits[i]) - largest;
    sum += std::exp(other);
    difference += probability_[i] * (shifted_[i] - other);
  }
  return std::max(0.0, difference - log_sum_ + std::log(sum));
}

double quantile(std::vector<double> values, double rank) {
  if (values.empty() || !(rank > 0.0 && rank <= 1.0))
    throw std::runtime_error("quantile: rank " + std::to_string(rank) + " of " +
                             std::to_string(values.size()) +
                             " values, above 0 to 1 of at least 1 expected");
  // Less a rounding of the product, which would take the next value.
  const double exact = rank * static_cast<double>(values.size());
  const auto place = static_cast<std::ptrdiff_t>(std::ceil(exact - 1e-9)) - 1;
  const auto at = values.begin() + std::max<std::ptrdiff_t>(place, 0);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

Divergence summarize(const std::vector<double>& values, std::int64_t agreed) {
  Divergence all;
  all.median = quantile(values, 0.5);
  all.p999 = quantile(values, 0.999);
  const auto count = static_cast<double>(values.size());
  all.mean = std::accumulate(values.begin(), values.end(), 0.0) / count;
  all.top1 = static_cast<double>(agreed) / count;
  all.positions = static_cast<std::int64_t>(values.size());
  return all;
}

}  // namespace llama
