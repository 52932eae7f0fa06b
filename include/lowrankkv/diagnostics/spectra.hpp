// SPDX-License-Identifier: Apache-2.0
/// @file diagnostics/spectra.hpp  Effective ranks, energy curves, angles between subspaces, and
/// sketch bounds, from spectra.
#pragma once

#include <Eigen/Core>
#include <Eigen/SVD>

#include <algorithm>
#include <cmath>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace detail {

/// Raises ValueError unless every entry of `spectrum` (sigma^2) is finite and at least 0.
template <class Real = double>
void check_spectrum(const linalg::VectorIn<Real>& spectrum) {
  for (Eigen::Index i = 0; i < spectrum.size(); ++i) {
    if (!(spectrum[i] >= 0.0) || !std::isfinite(spectrum[i])) {
      fail<ValueError>("spectrum: entry ", i, " is ", spectrum[i],
                       ", finite and at least 0 expected");
    }
  }
}

}  // namespace detail
namespace diagnostics {

/// @brief The singular values of a matrix, descending, [min(rows, cols)]. Each is exact to eps
/// sigma_1, while roots of the Gram matrix's eigenvalues are exact only to sqrt(eps) sigma_1.
/// @throws ValueError on NaN or Inf. Cost: O(rows cols min(rows, cols)).
template <class Real = double>
Eigen::VectorXd singular_values(const linalg::MatrixRef<Real>& matrix) {
  if (!matrix.allFinite())
    ::lowrankkv::detail::fail<ValueError>("singular values: the matrix's norm is ", matrix.norm(),
                                          ", finite expected");
  if (matrix.size() == 0) return {};
  return Eigen::JacobiSVD<Eigen::MatrixX<Real>>(matrix).singularValues();
}

/// @brief Entropy rank: exp(-sum p_i ln p_i), p_i = sigma_i^2 / sum sigma^2 (Roy and Vetterli 2007,
/// applied to energies). It is n for n equal values, 1 for a single value, 0 without energy.
/// @param spectrum  sigma^2, any order, any unit
/// @throws ValueError on a negative or non-finite entry
template <class Real = double>
double effective_rank(const linalg::VectorIn<Real>& spectrum) {
  ::lowrankkv::detail::check_spectrum(spectrum);
  const double total = spectrum.sum();
  if (total == 0.0) return 0.0;
  double entropy = 0.0;
  for (const double square : spectrum) {
    const double share = square / total;
    if (share > 0.0) entropy -= share * std::log(share);
  }
  return std::exp(entropy);
}

/// @brief Stable rank: ||A||_F^2 / ||A||_2^2 = sum sigma^2 / max sigma^2. Never above the rank; 0
/// without energy.
/// @param spectrum  sigma^2, any order  @throws ValueError on a negative or non-finite entry
template <class Real = double>
double stable_rank(const linalg::VectorIn<Real>& spectrum) {
  ::lowrankkv::detail::check_spectrum(spectrum);
  const double largest = spectrum.size() == 0 ? 0.0 : spectrum.maxCoeff();
  return largest == 0.0 ? 0.0 : (spectrum / largest).sum();
}

/// @brief Entry i is the share of sum sigma^2 in the first i + 1 values, which rank i + 1 keeps.
/// All entries are 1 without energy.
/// @param spectrum sigma^2, descending, [d]  @throws ValueError on a negative or non-finite entry
template <class Real = double>
Eigen::VectorXd energy_curve(const linalg::VectorIn<Real>& spectrum) {
  ::lowrankkv::detail::check_spectrum(spectrum);
  const double total = spectrum.sum();
  if (total == 0.0) return Eigen::VectorX<Real>::Ones(spectrum.size());
  Eigen::VectorX<Real> curve(spectrum.size());
  double sum = 0.0;
  for (Eigen::Index i = 0; i < spectrum.size(); ++i) curve[i] = (sum += spectrum[i]) / total;
  return curve;
}

/// @brief The principal angles between two subspaces, radians in [0, pi/2], smallest first,
/// [min(r1, r2)].
///
/// Cosines are the singular values of U^T W, and sines are those of W - U U^T W (Bjoerck and Golub
/// 1973, Knyazev and Argentati 2002). Both are used, because the arc cosine alone cannot resolve
/// angles below 1e-8, and the arc sine alone cannot resolve angles that close to pi/2.
/// @param first [d, r1], @param second [d, r2], orthonormal columns, r1, r2 <= d
/// @throws ShapeError if d differs, ValueError on NaN or Inf. Cost: O(d r1 r2 + d min(r1, r2)^2).
/// Absolute error: a few eps.
template <class Real = double>
Eigen::VectorXd principal_angles(const linalg::MatrixRef<Real>& first,
                                 const linalg::MatrixRef<Real>& second) {
  if (first.rows() != second.rows())
    ::lowrankkv::detail::fail<ShapeError>("head_dim: first ", first.rows(), ", second ",
                                          second.rows());
  // The residual must be that of the smaller subspace.
  if (first.cols() < second.cols()) return principal_angles(second, first);
  if (second.cols() == 0) return {};
  const Eigen::MatrixX<Real> inner = first.transpose() * second;
  const Eigen::VectorX<Real> cosines = singular_values(inner);
  const Eigen::VectorX<Real> sines = singular_values(second - first * inner).reverse();
  Eigen::VectorX<Real> angles(second.cols());
  for (Eigen::Index i = 0; i < angles.size(); ++i) angles[i] = std::atan2(sines[i], cosines[i]);
  return angles;
}

/// @brief The a-priori error of a Frequent Directions sketch of `sketch_rows` rows for one k:
/// ||A^T A - B^T B||_2 <= ||A - A_k||_F^2 / (sketch_rows - k)  (cpu/frequent_directions.hpp;
/// SubSpace section 3.5).
/// @param spectrum sigma^2 of A, descending; the result is in its unit
/// @throws ValueError unless 0 <= k < sketch_rows, or on a negative or non-finite entry
template <class Real = double>
double fd_bound(const linalg::VectorIn<Real>& spectrum, int sketch_rows, int k) {
  ::lowrankkv::detail::check_spectrum(spectrum);
  if (k < 0 || k >= sketch_rows)
    ::lowrankkv::detail::fail<ValueError>("k: in [0, sketch_rows), given ", k, ", sketch_rows ",
                                          sketch_rows);
  // The tail is summed directly. As a difference of large sums it would lose digits.
  return spectrum.tail((std::max)(spectrum.size() - k, Eigen::Index{0})).sum() / (sketch_rows - k);
}

/// @brief A bound, and the k at which it is attained.
struct FdBound {
  double bound = 0.0;
  int k = 0;
};

/// @brief The smallest fd_bound over all k < sketch_rows, with the smallest such k on a tie.
/// @throws ValueError unless sketch_rows >= 1, or on a negative or non-finite entry. Cost: O(d
/// sketch_rows).
template <class Real = double>
FdBound best_fd_bound(const linalg::VectorIn<Real>& spectrum, int sketch_rows) {
  FdBound best{fd_bound(spectrum, sketch_rows, 0), 0};
  for (int k = 1; k < sketch_rows; ++k) {
    const double bound = fd_bound(spectrum, sketch_rows, k);
    if (bound < best.bound) best = {bound, k};
  }
  return best;
}

LOWRANKKV_COMPILED_TEMPLATE(
    Eigen::VectorXd singular_values<double>(const linalg::MatrixRef<double>&))
LOWRANKKV_COMPILED_TEMPLATE(Eigen::VectorXd principal_angles<double>(
    const linalg::MatrixRef<double>&, const linalg::MatrixRef<double>&))

}  // namespace diagnostics
LOWRANKKV_NAMESPACE_END
