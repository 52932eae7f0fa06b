// SPDX-License-Identifier: Apache-2.0
// Random matrices in f64, and the f32 rows that a cache would have of them.
#pragma once

#include <Eigen/Dense>
#include <cmath>
#include <random>
#include <vector>

#include "lowrankkv/core/views.hpp"
#include "support/random_layer.hpp"

namespace support {

inline int uniform(Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

/// Rows [n, dim] whose energy decays along random axes.
inline Eigen::MatrixXd decaying_rows(Random& random, int n, int dim, double decay) {
  const Eigen::MatrixXd axes = random_orthonormal(random, dim, dim);
  Eigen::VectorXd scale(dim);
  for (int i = 0; i < dim; ++i) scale[i] = std::exp(-decay * i);
  return gaussian(random, n, dim) * scale.asDiagonal() * axes.transpose();
}

/// An f32 copy of a matrix, row-major, and the f64 matrix of exactly these values.
struct FloatRows {
  explicit FloatRows(const Eigen::MatrixXd& of)
      : values(row_major(of)), matrix(of.cast<float>().cast<double>()) {}
  lowrankkv::MatrixView view() const { return {values.data(), matrix.rows(), matrix.cols()}; }
  std::vector<float> values;
  Eigen::MatrixXd matrix;
};

/// ||a - b|| / ||b||.
inline double relative_distance(const Eigen::MatrixXd& a, const Eigen::MatrixXd& b) {
  return (a - b).norm() / (b.norm() + 1e-300);
}

}  // namespace support
