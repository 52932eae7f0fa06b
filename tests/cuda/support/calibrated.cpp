// SPDX-License-Identifier: Apache-2.0
#include "cuda/support/calibrated.hpp"

#include <Eigen/Core>

#include <cstdint>

#include "lowrankkv/budgeted.hpp"
#include "lowrankkv/calibrate/joint_values.hpp"
#include "lowrankkv/calibrate/residual_thresholds.hpp"

namespace support {
namespace {

using namespace lowrankkv;

calibrate::LayerMoments moments_of(const CalibrationRows& rows) {
  const CacheShape& shape = rows.shape;
  const std::int64_t tokens =
      static_cast<std::int64_t>(rows.key.size()) / (shape.num_kv_heads * shape.head_dim);
  const QueryView query(rows.query.data(), tokens, shape.num_qo_heads, shape.head_dim);
  const KeyView key(rows.key.data(), tokens, shape.num_kv_heads, shape.head_dim);
  const ValueView value(rows.value.data(), tokens, shape.num_kv_heads, shape.head_dim);
  calibrate::LayerMoments moments(shape, rows.rope);
  moments.add(query, key, value);
  moments.coding().add(query, key, value, tokens * 3 / 4);
  return moments;
}

}  // namespace

LayerBasis calibrated_basis(const CalibrationRows& rows, CalibratedMaps maps, bool centred) {
  const calibrate::LayerMoments moments = moments_of(rows);
  calibrate::BasisOptions options{.key_ratio = 0.5, .value_ratio = 0.5};
  options.policy.centred = centred;
  if (maps == CalibratedMaps::joint) return calibrate::joint_basis(moments, options);
  if (maps == CalibratedMaps::projector) options.policy.key_metric = KeyMetric::query_aware;
  LayerBasis basis = moments.basis(options);
  if (maps == CalibratedMaps::per_head)
    calibrate::set_residual_thresholds(moments, options.policy, 0.99, basis);
  for (HeadBasis& head : basis.heads) {
    if (maps != CalibratedMaps::projector) break;
    head.output_up = linalg::to_row_major(
        linalg::to_matrix({head.value_down.data(), rows.shape.head_dim, head.value_rank})
            .transpose());
    head.key_metric.clear();
    head.key_metric_inverse.clear();
  }
  return basis;
}

CalibratedBudget calibrated_budget(const CalibrationRows& rows, CacheConfig& config) {
  calibrate::BudgetOptions options;
  options.ratio = 0.4;
  options.context =
      static_cast<std::int64_t>(rows.key.size()) / (rows.shape.num_kv_heads * rows.shape.head_dim);
  options.full_row_bits = 0;
  const auto model = calibrate::budgeted(std::vector{moments_of(rows)}, options.for_cuda());
  config = model.configs(config)[0];
  return {model.bases[0], model.policies, [model](std::int64_t tokens, std::int64_t waiting) {
            return model.bytes_at(tokens, waiting);
          }};
}

}  // namespace support
