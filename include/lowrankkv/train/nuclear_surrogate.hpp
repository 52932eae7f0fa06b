// SPDX-License-Identifier: Apache-2.0
/// @file train/nuclear_surrogate.hpp  The Frobenius surrogate of a chain's nuclear norm, the bounds
/// that justify it, and their gradients (DLRP eq. 7, 8, appendix B).
///
/// With f_n = ||D^n||_F and S = f_1 + ... + f_N, for N >= 2,
///
///     ||D^1 ... D^N||_*  <=  f_1 f_2 ... f_N  <=  (S / N)^N  <=  S^N / N.
///
/// The first step is Cauchy-Schwarz and lemma B.1. The proof writes the nuclear norm as a trace
/// (eq. 16), which holds only for positive semidefinite products; for others it is the largest
/// tr(Q D) over orthogonal Q, which the same step bounds. The second is the inequality of
/// arithmetic and geometric means. The last is what theorem 3.1 prints: N^-1 in place of N^-N,
/// valid and looser.
///
/// All bounds grow with S, so training adds S itself to the loss: no SVD, O(d^2) a factor.
#pragma once

#include <Eigen/Core>

#include <cmath>
#include <cstddef>
#include <span>
#include <type_traits>
#include <vector>

#include "lowrankkv/calibrate/projector.hpp"
#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace train {

/// @brief A function of a chain, and its gradient with respect to every factor.
struct ChainFunction {
  double value = 0.0;
  std::vector<Eigen::MatrixXd> gradients;  ///< one a factor, of its shape
};

/// @brief S = ||D^1||_F + ... + ||D^N||_F, a chain's part of the regulariser (DLRP eq. 7).
///
/// The gradient is D^n / ||D^n||_F. At a factor of zeros the norm has no gradient; 0, which is one
/// of its subgradients, is given. @throws ShapeError for an empty chain, ValueError for a factor
/// that is not finite. Cost: two passes over the factors.
template <class Real = double>
ChainFunction frobenius_sum(std::type_identity_t<std::span<const Eigen::MatrixX<Real>>> chain) {
  using ::lowrankkv::detail::fail;
  if (chain.empty())
    fail<ShapeError>("surrogate: num_factors ", chain.size(), ", at least 1 needed");
  ChainFunction sum;
  for (std::size_t n = 0; n < chain.size(); ++n) {
    const double norm = chain[n].norm();
    if (!std::isfinite(norm))
      fail<ValueError>("surrogate: the norm of factor ", n, " is ", norm, ", finite expected");
    sum.value += norm;
    sum.gradients.emplace_back(norm > 0.0
                                   ? Eigen::MatrixX<Real>(chain[n] / norm)
                                   : Eigen::MatrixX<Real>::Zero(chain[n].rows(), chain[n].cols()));
  }
  return sum;
}

/// @brief (S / N)^N, the bound on ||D^1 ... D^N||_* by arithmetic and geometric means; the value is
/// calibrate::nuclear_norm_bound(). Gradient: (S / N)^(N-1) D^n / ||D^n||_F.
/// @throws as frobenius_sum(); ValueError for one factor, of which it is no bound
template <class Real = double>
ChainFunction mean_bound(std::type_identity_t<std::span<const Eigen::MatrixX<Real>>> chain) {
  ChainFunction bound = frobenius_sum<Real>(chain);
  const double count = static_cast<double>(chain.size());
  const double slope = std::pow(bound.value / count, count - 1.0);
  bound.value = calibrate::nuclear_norm_bound<Real>(chain);
  for (Eigen::MatrixX<Real>& gradient : bound.gradients) gradient *= slope;
  return bound;
}

/// @brief S^N / N, the bound on ||D^1 ... D^N||_* as theorem 3.1 prints it (DLRP eq. 8): N^(N-1)
/// times mean_bound(). Gradient: S^(N-1) D^n / ||D^n||_F.
/// @throws as mean_bound()
template <class Real = double>
ChainFunction printed_bound(std::type_identity_t<std::span<const Eigen::MatrixX<Real>>> chain) {
  ChainFunction bound = mean_bound<Real>(chain);
  const double count = static_cast<double>(chain.size());
  const double factor = std::pow(count, count - 1.0);
  bound.value *= factor;
  for (Eigen::MatrixX<Real>& gradient : bound.gradients) gradient *= factor;
  return bound;
}

}  // namespace train
LOWRANKKV_NAMESPACE_END
