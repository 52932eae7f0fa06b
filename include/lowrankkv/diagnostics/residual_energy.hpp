// SPDX-License-Identifier: Apache-2.0
/// @file diagnostics/residual_energy.hpp  The share of the energy of rows that a subspace misses
/// (OjaKV section 4, RER).
#pragma once

#include <Eigen/Core>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace diagnostics {

/// @brief ||X - X U U^T||_F^2 / ||X||_F^2 for rows X [n, d] and a basis U [d, r] with orthonormal
/// columns; 0 if X is 0.
/// @throws ShapeError if the dimensions differ
template <class Real = double>
double residual_energy_ratio(const linalg::MatrixRef<Real>& rows,
                             const linalg::MatrixRef<Real>& basis) {
  if (rows.cols() != basis.rows())
    ::lowrankkv::detail::fail<ShapeError>("head_dim: rows ", rows.cols(), ", basis ", basis.rows());
  const double energy = rows.squaredNorm();
  if (energy == 0.0) return 0.0;
  return (rows - (rows * basis) * basis.transpose()).squaredNorm() / energy;
}

}  // namespace diagnostics
LOWRANKKV_NAMESPACE_END
