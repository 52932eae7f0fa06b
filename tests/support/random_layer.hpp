// SPDX-License-Identifier: Apache-2.0
// Random rows with a decaying spectrum, random orthonormal maps, and the bridge from a HeadBasis to
// the oracle's maps.
#pragma once

#include <Eigen/Dense>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/basis/per_head.hpp"
#include "lowrankkv/core/cache_config.hpp"
#include "reference_cache.hpp"

namespace support {

using Random = std::mt19937_64;

inline Eigen::MatrixXd gaussian(Random& random, Eigen::Index rows, Eigen::Index cols) {
  std::normal_distribution<double> normal;
  Eigen::MatrixXd matrix(rows, cols);
  for (Eigen::Index i = 0; i < matrix.size(); ++i) matrix.data()[i] = normal(random);
  return matrix;
}

inline Eigen::MatrixXd random_orthonormal(Random& random, int dim, int rank) {
  return Eigen::HouseholderQR<Eigen::MatrixXd>(gaussian(random, dim, rank)).householderQ() *
         Eigen::MatrixXd::Identity(dim, rank);
}

inline std::vector<float> row_major(const Eigen::MatrixXd& matrix) {
  std::vector<float> values;
  for (Eigen::Index i = 0; i < matrix.rows(); ++i) {
    for (Eigen::Index j = 0; j < matrix.cols(); ++j)
      values.push_back(static_cast<float>(matrix(i, j)));
  }
  return values;
}

inline Eigen::MatrixXd from_row_major(const std::vector<float>& values, int rows, int cols) {
  Eigen::MatrixXd matrix(rows, cols);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < cols; ++j) matrix(i, j) = values[static_cast<std::size_t>(i * cols + j)];
  }
  return matrix;
}

/// Orthonormal (or query-aware) maps of random ranks, optionally centred.
inline lowrankkv::LayerBasis random_basis(Random& random, const lowrankkv::CacheShape& shape,
                                          const lowrankkv::PerHead& policy, int key_rank,
                                          int value_rank) {
  lowrankkv::LayerBasis basis;
  const int dim = shape.head_dim;
  for (int h = 0; h < shape.num_kv_heads; ++h) {
    lowrankkv::HeadBasis head;
    // Ranks differ from head to head, as calibration by energy would have it.
    head.key_rank = std::max(1, key_rank - h % 3);
    head.value_rank = std::max(1, value_rank - (h + 1) % 2);
    head.key_threshold = head.value_threshold = std::numeric_limits<float>::infinity();
    const Eigen::MatrixXd keys = random_orthonormal(random, dim, head.key_rank);
    head.value_down = row_major(random_orthonormal(random, dim, head.value_rank));
    if (policy.key_metric == lowrankkv::KeyMetric::query_aware) {
      const Eigen::MatrixXd axes = random_orthonormal(random, dim, dim);
      Eigen::VectorXd scale(dim);
      for (int i = 0; i < dim; ++i) scale[i] = std::exp(1.5 * (i - dim / 2) / dim);
      const Eigen::MatrixXd metric = axes * scale.asDiagonal() * axes.transpose();
      const Eigen::MatrixXd inverse = axes * scale.cwiseInverse().asDiagonal() * axes.transpose();
      head.key_down = row_major(metric * keys);
      head.query_down = row_major(inverse * keys);
      head.key_metric = row_major(metric);
      head.key_metric_inverse = row_major(inverse);
    } else {
      head.key_down = row_major(keys);
    }
    if (policy.centred) {
      head.key_mean = row_major(gaussian(random, 1, dim));
      head.value_mean = row_major(gaussian(random, 1, dim));
    }
    basis.heads.push_back(std::move(head));
  }
  return basis;
}

inline std::vector<reference::Maps> reference_maps(const lowrankkv::LayerBasis& basis, int dim) {
  std::vector<reference::Maps> maps;
  for (const lowrankkv::HeadBasis& head : basis.heads) {
    reference::Maps m;
    m.key_down = from_row_major(head.key_down, dim, head.key_rank);
    m.key_up =
        head.query_down.empty() ? m.key_down : from_row_major(head.query_down, dim, head.key_rank);
    m.value_down = m.value_up = from_row_major(head.value_down, dim, head.value_rank);
    m.key_mean = head.key_mean.empty() ? Eigen::VectorXd::Zero(dim)
                                       : Eigen::VectorXd(from_row_major(head.key_mean, dim, 1));
    m.value_mean = head.value_mean.empty()
                       ? Eigen::VectorXd::Zero(dim)
                       : Eigen::VectorXd(from_row_major(head.value_mean, dim, 1));
    if (!head.key_metric.empty()) {
      m.metric = from_row_major(head.key_metric, dim, dim);
      m.metric_inverse = from_row_major(head.key_metric_inverse, dim, dim);
    }
    maps.push_back(std::move(m));
  }
  return maps;
}

/// A stream of rows [n, heads, dim] whose channels are correlated and whose values have a mean.
inline std::vector<float> random_rows(Random& random, std::int64_t n, int heads, int dim,
                                      double mean = 0.0) {
  std::normal_distribution<float> normal;
  std::vector<float> rows(static_cast<std::size_t>(n * heads * dim));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const int channel = static_cast<int>(i % static_cast<std::size_t>(dim));
    rows[i] = static_cast<float>(mean) +
              normal(random) *
                  (0.3F + 1.5F * static_cast<float>(dim - channel) / static_cast<float>(dim));
  }
  return rows;
}

inline Eigen::VectorXd row_of(const std::vector<float>& rows, std::int64_t token, int heads,
                              int head, int dim) {
  Eigen::VectorXd row(dim);
  for (int i = 0; i < dim; ++i)
    row[i] = rows[static_cast<std::size_t>((token * heads + head) * dim + i)];
  return row;
}
inline std::vector<Eigen::VectorXd> token_of(const std::vector<float>& rows, std::int64_t token,
                                             int heads, int dim) {
  std::vector<Eigen::VectorXd> out;
  for (int head = 0; head < heads; ++head) out.push_back(row_of(rows, token, heads, head, dim));
  return out;
}

}  // namespace support
