// SPDX-License-Identifier: Apache-2.0
/// @file cuda/token_policy/residual_outliers.cuh  ResidualOutliers on the Cuda backend.
#pragma once

#include <cstdint>

#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/cuda/token_policy/row_choice.cuh"
#include "lowrankkv/token_policy/residual_outliers.hpp"
#include "lowrankkv/token_policy/share_of_rows.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<ResidualOutliers, Cuda> {
  static constexpr RowFate fate = RowFate::compressed;
  static constexpr cuda::RowChoice choice = cuda::RowChoice::errors;
  static void validate(const ResidualOutliers& policy) { check_residual_outliers(policy); }
  static float least_error(const ResidualOutliers& policy) { return policy.threshold; }
  static bool relative_errors(const ResidualOutliers& policy) {
    return policy.error == OutlierError::relative;
  }
  static std::int64_t chosen_rows(const ResidualOutliers& policy, std::int64_t first_position,
                                  std::int64_t count, Phase) {
    return outlier_rows(policy, first_position, count);
  }
  static std::int64_t candidate_rows(const ResidualOutliers& policy, std::int64_t first_position,
                                     std::int64_t count) {
    return outlier_candidates(policy, first_position, count);
  }
};

LOWRANKKV_NAMESPACE_END
