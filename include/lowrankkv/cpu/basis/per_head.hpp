// SPDX-License-Identifier: Apache-2.0
/// @file cpu/basis/per_head.hpp  PerHead on the CPU: from maps to the orthonormal basis that an updater moves, and back.
#pragma once

#include <Eigen/Core>

#include <utility>
#include <vector>

#include "lowrankkv/basis/per_head.hpp"
#include "lowrankkv/concepts/basis.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<PerHead, Cpu> {
  using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using ConstMap = Eigen::Map<const RowMajor>;

  static void validate(const PerHead& policy, const LayerBasis& basis, const CacheShape& shape) {
    ::lowrankkv::validate(policy, basis, shape);
  }

  /// U [head_dim, rank]: value_down, or key_down taken back through the metric (R^-1 R U).
  static std::vector<float> working_basis(const PerHead& policy, const HeadBasis& head, int head_dim, Part part) {
    if (part == Part::value) return head.value_down;
    if (policy.key_metric == KeyMetric::plain) return head.key_down;
    std::vector<float> basis(head.key_down.size());
    Eigen::Map<RowMajor>(basis.data(), head_dim, head.key_rank) =
        ConstMap(head.key_metric_inverse.data(), head_dim, head_dim) * ConstMap(head.key_down.data(), head_dim, head.key_rank);
    return basis;
  }

  /// x <- (x - mean) R, where there is a mean or a metric.
  static void to_metric(const PerHead& policy, const HeadBasis& head, int head_dim, Part part, float* rows, int count) {
    Eigen::Map<RowMajor> matrix(rows, count, head_dim);
    const std::vector<float>& mean = part == Part::key ? head.key_mean : head.value_mean;
    if (!mean.empty()) matrix.rowwise() -= Eigen::Map<const Eigen::RowVectorXf>(mean.data(), head_dim);
    if (part == Part::key && policy.key_metric == KeyMetric::query_aware) {
      matrix = (matrix * ConstMap(head.key_metric.data(), head_dim, head_dim)).eval();
    }
  }

  static HeadBasis with_working_bases(const PerHead& policy, const HeadBasis& head, int head_dim, std::vector<float> key_basis,
                                      std::vector<float> value_basis) {
    HeadBasis moved;
    moved.key_rank = head.key_rank;
    moved.value_rank = head.value_rank;
    moved.key_mean = head.key_mean;
    moved.value_mean = head.value_mean;
    moved.key_bits = head.key_bits;
    moved.value_bits = head.value_bits;
    moved.key_rms = head.key_rms;
    moved.value_rms = head.value_rms;
    moved.value_down = std::move(value_basis);
    if (policy.key_metric == KeyMetric::plain) {
      moved.key_down = std::move(key_basis);
      return moved;
    }
    const ConstMap basis(key_basis.data(), head_dim, head.key_rank);
    moved.key_down.resize(key_basis.size());
    moved.query_down.resize(key_basis.size());
    Eigen::Map<RowMajor>(moved.key_down.data(), head_dim, head.key_rank) = ConstMap(head.key_metric.data(), head_dim, head_dim) * basis;
    Eigen::Map<RowMajor>(moved.query_down.data(), head_dim, head.key_rank) = ConstMap(head.key_metric_inverse.data(), head_dim, head_dim) * basis;
    return moved;
  }
};

static_assert(BasisFor<PerHead, Cpu>);

LOWRANKKV_NAMESPACE_END
