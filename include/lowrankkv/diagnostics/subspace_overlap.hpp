// SPDX-License-Identifier: Apache-2.0
/// @file diagnostics/subspace_overlap.hpp  Overlap of two subspaces (OjaKV section 4, SO).
#pragma once

#include <Eigen/Core>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace diagnostics {

/// @brief tr(U1^T U2 U2^T U1) / r for bases [d, r] with orthonormal columns: the mean squared
/// cosine of the principal angles. 1 for equal subspaces, 0 for orthogonal ones. @throws ShapeError
/// if the shapes differ
template <class Real = double>
double subspace_overlap(const linalg::MatrixRef<Real>& first,
                        const linalg::MatrixRef<Real>& second) {
  if (first.rows() != second.rows())
    ::lowrankkv::detail::fail<ShapeError>("head_dim: first ", first.rows(), ", second ",
                                          second.rows());
  if (first.cols() != second.cols())
    ::lowrankkv::detail::fail<ShapeError>("rank: first ", first.cols(), ", second ", second.cols());
  return (first.transpose() * second).squaredNorm() / static_cast<double>(first.cols());
}

}  // namespace diagnostics
LOWRANKKV_NAMESPACE_END
