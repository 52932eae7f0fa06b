// SPDX-License-Identifier: Apache-2.0
/// @file calibrate/choose_rank.hpp  Choosing ranks: by energy, by ratio, and the largest rank among
/// a layer's heads.
#pragma once

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <span>

#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace calibrate {

/// @brief The smallest rank whose leading sigma^2 reach `share` of the sum of all sigma^2 (OjaKV
/// A.2; sigma^2, not sigma).
/// @param spectrum  sigma^2, descending  @throws ValueError unless 0 < share <= 1
template <class = void>
int rank_by_energy(const Eigen::VectorXd& spectrum, double share) {
  if (!(share > 0.0) || share > 1.0)
    ::lowrankkv::detail::fail<ValueError>("energy share: in (0, 1], given ", share);
  const double wanted = share * spectrum.sum();
  double sum = 0.0;
  for (Eigen::Index rank = 0; rank < spectrum.size(); ++rank) {
    if (sum >= wanted && rank > 0) return static_cast<int>(rank);
    sum += spectrum[rank];
  }
  return static_cast<int>(spectrum.size());
}

/// @brief rank = round(ratio head_dim), at least 1. @throws ValueError unless 0 < ratio <= 1
inline int rank_by_ratio(int head_dim, double ratio) {
  if (!(ratio > 0.0) || ratio > 1.0)
    ::lowrankkv::detail::fail<ValueError>("ratio: in (0, 1], given ", ratio);
  return (std::max)(1, static_cast<int>(std::lround(ratio * head_dim)));
}

/// @brief The largest rank among the heads of a layer, for kernels with one rank for all heads
/// (OjaKV A.2).
inline int max_over_heads(std::span<const int> ranks) {
  int rank = 0;
  for (const int head : ranks) rank = (std::max)(rank, head);
  return rank;
}

}  // namespace calibrate
LOWRANKKV_NAMESPACE_END
