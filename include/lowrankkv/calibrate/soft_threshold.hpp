// SPDX-License-Identifier: Apache-2.0
/// @file calibrate/soft_threshold.hpp  Ranks by a threshold on singular values (STAR-KV
/// sections 4.1.2 and 4.2).
///
/// Symbols: alpha threshold, s sharpness, sigma singular values of a projection's weights. All
/// functions take sigma, not sigma^2: pass values.cwiseSqrt() of a Spectrum.
#pragma once

#include <Eigen/Core>

#include <cmath>
#include <span>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace calibrate {

/// @brief Th_s(x; alpha) = x tanh(s (x - alpha)) for x >= alpha, else 0 (STAR-KV eq. 2 with c = 0):
/// a differentiable form of the hard threshold at alpha, which it approaches as s grows. Never
/// above x.
/// @param sigma      x, a singular value
/// @param sharpness  s, per unit of sigma
/// @throws ValueError unless s > 0 and alpha is a number
template <class = void>
double soft_threshold(double sigma, double alpha, double sharpness) {
  if (!(sharpness > 0.0))
    ::lowrankkv::detail::fail<ValueError>("soft threshold: sharpness above 0, given ", sharpness);
  if (std::isnan(alpha))
    ::lowrankkv::detail::fail<ValueError>("soft threshold: alpha is ", alpha,
                                          ", a number expected");
  return sigma >= alpha ? sigma * std::tanh(sharpness * (sigma - alpha)) : 0.0;
}

/// @brief soft_threshold() of every singular value, [p]. @throws ValueError as above
template <class Real = double>
Eigen::VectorXd soft_threshold(const linalg::VectorIn<Real>& singular_values, double alpha,
                               double sharpness) {
  Eigen::VectorX<Real> soft(singular_values.size());
  for (Eigen::Index i = 0; i < soft.size(); ++i)
    soft[i] = soft_threshold(singular_values[i], alpha, sharpness);
  return soft;
}

/// @brief r_eff = #{sigma_i >= alpha} (STAR-KV eq. 1), the rank after training. 0 if alpha is above
/// all singular values. @throws ValueError if alpha is NaN
template <class Real = double>
int rank_by_threshold(const linalg::VectorIn<Real>& singular_values, double alpha) {
  if (std::isnan(alpha))
    ::lowrankkv::detail::fail<ValueError>("threshold: alpha is ", alpha, ", a number expected");
  return static_cast<int>((singular_values.array() >= alpha).count());
}

/// @brief An alpha for which rank_by_threshold() is `rank`: the midpoint of sigma_rank and the next
/// singular value, so that rounding on either side does not change the rank.
/// @param singular_values  descending, [p]
/// @throws ValueError unless 0 <= rank <= p and the values descend, or if sigma_rank equals the
/// next value, because no threshold then separates them
template <class Real = double>
double threshold_for_rank(const linalg::VectorIn<Real>& singular_values, int rank) {
  const Eigen::Index size = singular_values.size();
  if (rank < 0 || rank > size)
    ::lowrankkv::detail::fail<ValueError>("threshold: rank in [0, ", size, "], given ", rank);
  for (Eigen::Index i = 0; i < size; ++i) {
    const double limit = i == 0 ? HUGE_VAL : singular_values[i - 1];
    if (!(singular_values[i] >= 0.0) || !(singular_values[i] <= limit)) {
      ::lowrankkv::detail::fail<ValueError>("threshold: singular value ", i, " is ",
                                            singular_values[i], ", expected in [0, ", limit,
                                            "], descending");
    }
  }
  if (size == 0) return 0.0;
  if (rank == 0) return std::nextafter(singular_values[0], HUGE_VAL);
  const double last = singular_values[rank - 1];
  const double next = rank < size ? singular_values[rank] : 0.0;
  if (rank < size && last == next) {
    ::lowrankkv::detail::fail<ValueError>("threshold: no alpha gives rank ", rank,
                                          ": the singular values on both sides are ", last);
  }
  const double middle = next + 0.5 * (last - next);
  return middle > next ? middle : last;  // the midpoint of adjacent floats may round down to next
}

/// @brief L = sum e^-alpha (STAR-KV eq. 3). Its pull towards larger thresholds fades as they grow.
/// Pass all alphas: keys have one per block and head, values one per block (eq. 11).
inline double compression_loss(std::span<const double> alphas) {
  double loss = 0.0;
  for (const double alpha : alphas) loss += std::exp(-alpha);
  return loss;
}

}  // namespace calibrate
LOWRANKKV_NAMESPACE_END
