// SPDX-License-Identifier: Apache-2.0
/// @file linalg/eigen_matrix.hpp  Conversion between row-major f32 of the interface and Eigen f64.
#pragma once

#include <Eigen/Core>

#include <cstddef>
#include <type_traits>
#include <vector>

#include "lowrankkv/core/views.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace linalg {

/// @brief Parameter types of functions that are templates only so that sources which do not call
/// them do not compile them. Nothing is deduced from these types, so arguments convert implicitly.
template <class Real>
using MatrixIn = std::type_identity_t<Eigen::MatrixX<Real>>;
template <class Real>
using VectorIn = std::type_identity_t<Eigen::VectorX<Real>>;
template <class Real>
using MatrixRef = std::type_identity_t<Eigen::Ref<const Eigen::MatrixX<Real>>>;

/// @brief The values of a view as a matrix [view.rows, view.cols] in f64; exact. Cost: one copy.
template <class Real = float>
Eigen::MatrixXd to_matrix(MatrixView view) {
  using RowMajor = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  return Eigen::Map<const RowMajor, 0, Eigen::OuterStride<>>(view.data, view.rows, view.cols,
                                                             Eigen::OuterStride<>(view.row_stride))
      .template cast<double>();
}

/// @brief The values of a matrix in row-major order, rounded to f32: what a HeadBasis holds. Cost:
/// one copy.
template <class Real = double>
std::vector<float> to_row_major(const MatrixRef<Real>& matrix) {
  using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  std::vector<float> values(static_cast<std::size_t>(matrix.size()));
  Eigen::Map<RowMajor>(values.data(), matrix.rows(), matrix.cols()) = matrix.template cast<float>();
  return values;
}

LOWRANKKV_COMPILED_TEMPLATE(Eigen::MatrixXd to_matrix<float>(MatrixView))
LOWRANKKV_COMPILED_TEMPLATE(std::vector<float> to_row_major<double>(const MatrixRef<double>&))

}  // namespace linalg
LOWRANKKV_NAMESPACE_END
