// SPDX-License-Identifier: Apache-2.0
/// @file calibrate/residual_thresholds.hpp  Thresholds for residual-triggered updates, as
/// percentiles over calibration rows.
#pragma once

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <vector>

#include "lowrankkv/basis/per_head.hpp"
#include "lowrankkv/calibrate/layer_moments.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/cpu/basis/per_head.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"

LOWRANKKV_NAMESPACE_BEGIN

struct Cpu;

namespace calibrate {

/// @brief The value that ||x - P x|| does not exceed for a share `percentile` of the rows, where P
/// is the projection onto orthonormal columns.
/// @param rows   [n, head_dim], n >= 1
/// @param basis  [head_dim, rank]
/// @throws ValueError unless 0 <= percentile <= 1, ShapeError without rows
template <class Real = double>
double residual_percentile(const linalg::MatrixRef<Real>& rows,
                           const linalg::MatrixRef<Real>& basis, double percentile) {
  if (!(percentile >= 0.0 && percentile <= 1.0))
    ::lowrankkv::detail::fail<ValueError>("residual percentile: in [0, 1], given ", percentile);
  if (rows.rows() == 0)
    ::lowrankkv::detail::fail<ShapeError>("residual percentile: num_rows ", rows.rows(),
                                          ", at least 1 needed");
  const Eigen::VectorX<Real> norms = (rows - (rows * basis) * basis.transpose()).rowwise().norm();
  std::vector<double> sorted(norms.data(), norms.data() + norms.size());
  std::sort(sorted.begin(), sorted.end());
  const auto index =
      static_cast<std::size_t>(std::ceil(percentile * static_cast<double>(sorted.size())));
  return sorted[index == 0 ? 0 : index - 1];
}

/// @brief Sets key_threshold and value_threshold of every head of `basis` from the layer's sample
/// of rows, in the metric of `policy` (SubSpace-A section 4.1: thresholds are percentiles of
/// calibration residuals).
/// @throws ShapeError if the moments hold no sample
template <class = void>
void set_residual_thresholds(const LayerMoments& moments, const PerHead& policy, double percentile,
                             LayerBasis& basis) {
  const int dim = moments.shape().head_dim;
  for (std::size_t index = 0; index < basis.heads.size(); ++index) {
    HeadBasis& head = basis.heads[index];
    const HeadMoments& calibrated = moments.head(static_cast<int>(index));
    for (const Part part : {Part::key, Part::value}) {
      const bool keys = part == Part::key;
      std::vector<float> rows = (keys ? calibrated.key_sample : calibrated.value_sample).values();
      const int count = static_cast<int>(rows.size()) / dim;
      Impl<PerHead, Cpu>::to_metric(policy, head, dim, part, rows.data(), count);
      const std::vector<float> axes = Impl<PerHead, Cpu>::working_basis(policy, head, dim, part);
      (keys ? head.key_threshold : head.value_threshold) = static_cast<float>(residual_percentile(
          linalg::to_matrix({rows.data(), count, dim}),
          linalg::to_matrix({axes.data(), dim, keys ? head.key_rank : head.value_rank}),
          percentile));
    }
  }
}

LOWRANKKV_COMPILED_TEMPLATE(void set_residual_thresholds<void>(const LayerMoments&, const PerHead&,
                                                               double, LayerBasis&))

}  // namespace calibrate
LOWRANKKV_NAMESPACE_END
