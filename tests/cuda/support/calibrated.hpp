// SPDX-License-Identifier: Apache-2.0
// What calibration makes of rows, as the CUDA tests see it: no Eigen in a CUDA translation unit.
#pragma once

#include <functional>
#include <vector>

#include "lowrankkv/basis/per_head.hpp"
#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/calls.hpp"
#include "lowrankkv/quantizer/transform_code.hpp"
#include "lowrankkv/token_policy/compose.hpp"
#include "lowrankkv/token_policy/residual_outliers.hpp"
#include "lowrankkv/token_policy/sink_recent.hpp"
#include "lowrankkv/updater/static.hpp"

namespace support {

/// A text's rows, [tokens, heads, head_dim].
struct CalibrationRows {
  lowrankkv::CacheShape shape;
  lowrankkv::RopeConfig rope;
  std::vector<float> query, key, value;
};

/// Which maps: of each head, with thresholds for sketches; with joint values of all heads; four
/// query-aware ones.
enum class CalibratedMaps { per_head, joint, projector };

/// Maps of half of head_dim, by the library's defaults but for `centred`.
lowrankkv::LayerBasis calibrated_basis(const CalibrationRows& rows, CalibratedMaps maps,
                                       bool centred);

/// Budgeted at four tenths of the bytes, for the Cuda backend.
struct CalibratedBudget {
  lowrankkv::LayerBasis basis;
  lowrankkv::Policies<lowrankkv::PerHead, lowrankkv::Static,
                      lowrankkv::Compose<lowrankkv::SinkRecent, lowrankkv::ResidualOutliers>,
                      lowrankkv::TransformCode>
      policies;
  /// What a sequence of so many tokens takes, of which so many wait (BudgetedModel::bytes_at).
  std::function<std::int64_t(std::int64_t tokens, std::int64_t waiting)> bytes_at;
};
/// @param config  gets what the budget assumes of it, with full rows in 16 bits
CalibratedBudget calibrated_budget(const CalibrationRows& rows, lowrankkv::CacheConfig& config);

}  // namespace support
