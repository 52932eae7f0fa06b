// SPDX-License-Identifier: Apache-2.0
/// @file linalg/orthonormalize.hpp  Orthonormal columns by Householder QR.
#pragma once

#include <Eigen/Core>
#include <Eigen/QR>

#include <cstddef>
#include <vector>

#include "lowrankkv/config.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace linalg {

/// @brief An orthonormal basis of the columns of `matrix` [d, r], r <= d, by Householder QR. Column
/// signs follow the input. The span is that of the input, so projections do not depend on the
/// method; columns stay close to an almost orthonormal input.
template <class Real = double>
Eigen::MatrixXd orthonormal_columns(const MatrixIn<Real>& matrix) {
  const Eigen::HouseholderQR<Eigen::MatrixX<Real>> qr(matrix);
  Eigen::MatrixX<Real> q =
      qr.householderQ() * Eigen::MatrixX<Real>::Identity(matrix.rows(), matrix.cols());
  for (Eigen::Index column = 0; column < q.cols(); ++column) {
    if (qr.matrixQR()(column, column) < 0.0) q.col(column) = -q.col(column);
  }
  return q;
}

/// @brief orthonormal_columns() in place, for a row-major f32 basis [dim, basis.size() / dim].
template <class Real = float>
void orthonormalize(std::vector<float>& basis, int dim) {
  using RowMajor = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  Eigen::Map<RowMajor> matrix(basis.data(), dim, static_cast<Eigen::Index>(basis.size()) / dim);
  matrix = orthonormal_columns(matrix.template cast<double>()).template cast<float>();
}

LOWRANKKV_COMPILED_TEMPLATE(Eigen::MatrixXd orthonormal_columns<double>(const MatrixIn<double>&))
LOWRANKKV_COMPILED_TEMPLATE(void orthonormalize<float>(std::vector<float>&, int))

}  // namespace linalg
LOWRANKKV_NAMESPACE_END
