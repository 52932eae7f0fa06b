// SPDX-License-Identifier: Apache-2.0
/// @file cpu/snapkv_scores.hpp  SnapKV scores: the attention that each prompt token gets from the
/// prompt's last queries.
///
/// score_t = sum over the group's heads h and the last w queries of softmax(scale q_{h,w} K^T)_t,
/// causal, per KV head: OjaKV section 5.2, but for grouped queries summed over the group instead of
/// computed on repeated keys. With all queries of the prompt, it is the score that H2O accumulates.
#pragma once

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "lowrankkv/core/attention_scores.hpp"
#include "lowrankkv/core/views.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Scores of `keys` [n, head_dim] under `queries` [num_queries x group_size, head_dim], rows
/// ordered query-major. The last num_queries keys belong to the queries' own tokens: query i sees
/// the keys up to n - num_queries + i.
/// @return n scores; they sum to num_queries x group_size
///
/// Cost: 2 n products of head_dim per query row, in blocks of 64 rows. Memory: 64 n floats besides
/// the result.
template <class Real = float>
std::vector<float> snapkv_scores(MatrixView queries, int group_size, MatrixView keys, float scale) {
  const std::int64_t n = keys.rows;
  const std::int64_t num_queries = queries.rows / group_size;
  if (queries.cols != keys.cols)
    ::lowrankkv::detail::fail<ShapeError>("head_dim: queries ", queries.cols, ", keys ", keys.cols);
  if (num_queries > n)
    ::lowrankkv::detail::fail<ShapeError>("snapkv_scores: ", num_queries, " queries, ", n, " keys");
  using RowMajor = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::Map<const RowMajor, 0, Eigen::OuterStride<>> key_matrix(
      keys.data, n, keys.cols, Eigen::OuterStride<>(keys.row_stride));
  const Eigen::Map<const RowMajor, 0, Eigen::OuterStride<>> query_matrix(
      queries.data, queries.rows, queries.cols, Eigen::OuterStride<>(queries.row_stride));
  std::vector<float> scores(static_cast<std::size_t>(n), 0.0F);
  Eigen::Map<Eigen::ArrayX<Real>> sum(scores.data(), n);
  const auto seen_by = [&](std::int64_t row) { return n - num_queries + row / group_size + 1; };
  constexpr std::int64_t block = 64;
  Eigen::MatrixX<Real> logits(n, (std::min)(block, queries.rows));
  for (std::int64_t first = 0; first < queries.rows; first += block) {
    const std::int64_t rows = (std::min)(block, queries.rows - first);
    const std::int64_t most = seen_by(first + rows - 1);
    logits.topLeftCorner(most, rows).noalias() =
        key_matrix.topRows(most) * query_matrix.middleRows(first, rows).transpose();
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t seen = seen_by(first + row);
      auto weights = logits.col(row).head(seen).array();
      weights = (scale * (weights - weights.maxCoeff())).exp();
      sum.head(seen) += weights / weights.sum();
    }
  }
  return scores;
}

/// @brief Pools scores over a window of `kernel` neighbours (odd), as SnapKV does. Averages divide
/// by `kernel` also at the edges; maxima are over the neighbours that exist. Cost: O(n kernel).
inline std::vector<float> pool_scores(std::span<const float> scores, int kernel, Pooling pooling) {
  const std::int64_t n = static_cast<std::int64_t>(scores.size());
  const std::int64_t reach = kernel / 2;
  std::vector<float> pooled(scores.size());
  for (std::int64_t row = 0; row < n; ++row) {
    const auto begin = scores.begin() + (std::max)(std::int64_t{0}, row - reach);
    const auto end = scores.begin() + (std::min)(n, row + reach + 1);
    float value = *begin;
    for (auto score = begin + 1; score < end; ++score)
      value = pooling == Pooling::maximum ? (std::max)(value, *score) : value + *score;
    pooled[static_cast<std::size_t>(row)] =
        pooling == Pooling::maximum ? value : value / static_cast<float>(kernel);
  }
  return pooled;
}

LOWRANKKV_COMPILED_TEMPLATE(std::vector<float> snapkv_scores<float>(MatrixView, int, MatrixView,
                                                                    float))

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
