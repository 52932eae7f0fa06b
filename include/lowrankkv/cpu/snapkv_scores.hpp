// SPDX-License-Identifier: Apache-2.0
/// @file cpu/snapkv_scores.hpp  SnapKV scores: how much attention each prompt token gets from the prompt's last queries.
///
/// score_t = sum over the group's heads h and the last w queries of softmax(scale q_{h,w} K^T)_t, causal; per KV head
/// (OjaKV section 5.2 with DESIGN's correction for grouped queries: summed over the group, not on repeated keys).
#pragma once

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "lowrankkv/core/views.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Scores of `keys` [n, head_dim] under `queries` [num_queries x group_size, head_dim], rows ordered query-major.
/// The last num_queries keys are the queries' own tokens: query i sees the keys up to n - num_queries + i.
/// @return n scores; they sum to num_queries x group_size.
/// Cost: 2 n products of head_dim per query row; memory n floats besides the result.
inline std::vector<float> snapkv_scores(MatrixView queries, int group_size, MatrixView keys, float scale) {
  const std::int64_t n = keys.rows;
  const std::int64_t num_queries = queries.rows / group_size;
  if (queries.cols != keys.cols) ::lowrankkv::detail::fail<ShapeError>("head_dim: queries ", queries.cols, ", keys ", keys.cols);
  if (num_queries > n) ::lowrankkv::detail::fail<ShapeError>("snapkv_scores: ", num_queries, " queries, ", n, " keys");
  using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::Map<const RowMajor, 0, Eigen::OuterStride<>> key_matrix(keys.data, n, keys.cols, Eigen::OuterStride<>(keys.row_stride));
  std::vector<float> scores(static_cast<std::size_t>(n), 0.0F);
  Eigen::Map<Eigen::ArrayXf> sum(scores.data(), n);
  Eigen::VectorXf logits(n);
  for (std::int64_t row = 0; row < queries.rows; ++row) {
    const std::int64_t seen = n - num_queries + row / group_size + 1;
    const Eigen::Map<const Eigen::VectorXf> query(queries.row(row), queries.cols);
    logits.head(seen).noalias() = key_matrix.topRows(seen) * query;
    Eigen::ArrayXf weights = (scale * (logits.head(seen).array() - logits.head(seen).maxCoeff())).exp();
    sum.head(seen) += weights / weights.sum();
  }
  return scores;
}

/// @brief The indices of the `count` largest of scores[0, limit), ascending; of equal scores the earlier token wins.
inline std::vector<std::int64_t> top_tokens(const std::vector<float>& scores, std::int64_t limit, std::int64_t count) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(limit));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  const std::int64_t keep = (std::max)(std::int64_t{0}, (std::min)(count, limit));
  const auto higher = [&](std::int64_t a, std::int64_t b) {
    const float left = scores[static_cast<std::size_t>(a)];
    const float right = scores[static_cast<std::size_t>(b)];
    return left != right ? left > right : a < b;
  };
  std::partial_sort(order.begin(), order.begin() + keep, order.end(), higher);
  order.resize(static_cast<std::size_t>(keep));
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
