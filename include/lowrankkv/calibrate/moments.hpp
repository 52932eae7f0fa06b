// SPDX-License-Identifier: Apache-2.0
/// @file calibrate/moments.hpp  Second moments of a stream of rows, their principal axes, and roots
/// of metrics.
#pragma once

#include <Eigen/Core>
#include <Eigen/Eigenvalues>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace calibrate {

/// @brief Sums of x x^T and of x over rows x [head_dim], in f64. One pass over the data, which is
/// not kept.
struct Moments {
  Eigen::MatrixXd second;  ///< sum of x x^T, [head_dim, head_dim]
  Eigen::VectorXd first;   ///< sum of x
  double count = 0.0;

  Moments() = default;
  template <class Real = double>
  explicit Moments(int head_dim)
      : second(Eigen::MatrixX<Real>::Zero(head_dim, head_dim)),
        first(Eigen::VectorX<Real>::Zero(head_dim)) {}

  /// @brief Adds rows [n, head_dim]. @throws ShapeError if head_dim differs. Cost: n head_dim^2.
  template <class Real = double>
  void add(MatrixView rows) {
    ::lowrankkv::detail::check_equal("head_dim", "moments",
                                     static_cast<std::int64_t>(second.rows()), "rows", rows.cols);
    const Eigen::MatrixX<Real> wide = linalg::to_matrix(rows);
    second.noalias() += wide.transpose() * wide;
    first += wide.colwise().sum().transpose();
    count += static_cast<double>(rows.rows);
  }
  /// @brief Adds the moments of another stream. Bases of row-stacked [Q; K] come from such a sum.
  template <class Real = double>
  Moments& operator+=(const Moments& other) {
    ::lowrankkv::detail::check_equal("head_dim", "moments", second.rows(), "other",
                                     other.second.rows());
    second += other.second;
    first += other.first;
    count += other.count;
    return *this;
  }
  /// @brief Mean of x; 0 without rows.
  template <class Real = double>
  Eigen::VectorXd mean() const {
    const Eigen::VectorX<Real>& sum = first;
    return sum / (std::max)(count, 1.0);
  }
  /// @brief Sum of (x - mean)(x - mean)^T.
  template <class Real = double>
  Eigen::MatrixXd centred() const {
    const Eigen::VectorX<Real>& sum = first;
    return second - sum * sum.transpose() / (std::max)(count, 1.0);
  }
  /// @brief The moments of x - mean: centred(), with a sum of 0.
  template <class Real = double>
  Moments around_mean() const {
    Moments around;
    around.second = centred();
    around.first = Eigen::VectorX<Real>::Zero(first.size());
    around.count = count;
    return around;
  }
  /// @brief The mean's part of the rows' energy, ||R mean||^2 / E ||R x||^2: 0 to 1. 0 if the rows
  /// have no energy. @param root  R [head_dim, head_dim], the root of a metric
  template <class Real = double>
  double mean_share(const linalg::MatrixIn<Real>& root) const {
    const Eigen::VectorX<Real> sum = root * first;
    const double energy = (root * second * root.transpose()).trace();
    return energy > 0.0 ? sum.squaredNorm() / ((std::max)(count, 1.0) * energy) : 0.0;
  }
  /// @brief The same in the plain metric.
  template <class = void>
  double mean_share() const {
    const double energy = second.trace();
    return energy > 0.0 ? first.squaredNorm() / ((std::max)(count, 1.0) * energy) : 0.0;
  }
};

/// @brief Eigenvectors of a symmetric matrix, largest eigenvalue first.
struct Spectrum {
  Eigen::MatrixXd vectors;  ///< [head_dim, head_dim], orthonormal columns
  Eigen::VectorXd values;   ///< descending, clamped to >= 0: sigma^2 of the stacked rows
};

/// @brief Principal axes of rows with second moment `matrix`: the right singular vectors of the
/// stacked rows.
/// @throws ValueError if the matrix is not finite. Cost: O(head_dim^3).
template <class Real = double>
Spectrum principal_axes(const linalg::MatrixIn<Real>& matrix) {
  if (!matrix.allFinite())
    ::lowrankkv::detail::fail<ValueError>("calibration: the second moment holds NaN or Inf, trace ",
                                          matrix.trace(), ", finite expected");
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixX<Real>> solver(matrix);
  return {solver.eigenvectors().rowwise().reverse(), solver.eigenvalues().reverse().cwiseMax(0.0)};
}

/// @brief A metric's root R and its inverse, [head_dim, head_dim] each.
struct MetricRoot {
  Eigen::MatrixXd root, inverse;
};
/// @brief Symmetric root of `matrix` / mean eigenvalue, and its inverse. Eigenvalues below `floor`
/// times the mean are raised to that value, so that directions without energy do not make the
/// inverse explode. @throws ValueError if the mean eigenvalue is not positive
template <class Real = double>
MetricRoot metric_root(const linalg::MatrixIn<Real>& matrix, double floor = 1e-3) {
  const Spectrum spectrum = principal_axes(matrix);
  const Eigen::MatrixX<Real>& vectors = spectrum.vectors;
  const Eigen::VectorX<Real>& values = spectrum.values;
  const double mean = values.mean();
  if (!(mean > 0.0))
    ::lowrankkv::detail::fail<ValueError>("calibration: the queries' mean energy is ", mean,
                                          ", must be positive");
  const Eigen::VectorX<Real> roots = (values / mean).cwiseMax(floor).cwiseSqrt();
  return {vectors * roots.asDiagonal() * vectors.transpose(),
          vectors * roots.cwiseInverse().asDiagonal() * vectors.transpose()};
}

LOWRANKKV_COMPILED_TEMPLATE(void Moments::add<double>(MatrixView))
LOWRANKKV_COMPILED_TEMPLATE(Moments& Moments::operator+=<double>(const Moments&))
LOWRANKKV_COMPILED_TEMPLATE(Eigen::VectorXd Moments::mean<double>() const)
LOWRANKKV_COMPILED_TEMPLATE(Eigen::MatrixXd Moments::centred<double>() const)
LOWRANKKV_COMPILED_TEMPLATE(Moments Moments::around_mean<double>() const)
LOWRANKKV_COMPILED_TEMPLATE(double Moments::mean_share<double>(const linalg::MatrixIn<double>&)
                                const)
LOWRANKKV_COMPILED_TEMPLATE(Spectrum principal_axes<double>(const linalg::MatrixIn<double>&))
LOWRANKKV_COMPILED_TEMPLATE(MetricRoot metric_root<double>(const linalg::MatrixIn<double>&, double))

}  // namespace calibrate
LOWRANKKV_NAMESPACE_END
