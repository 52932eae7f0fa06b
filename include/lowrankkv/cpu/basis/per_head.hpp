// SPDX-License-Identifier: Apache-2.0
/// @file cpu/basis/per_head.hpp  PerHead on the CPU: converts maps to the orthonormal basis that an
/// updater moves, and back.
#pragma once

#include <Eigen/Core>

#include <utility>
#include <vector>

#include "lowrankkv/basis/per_head.hpp"
#include "lowrankkv/concepts/basis.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<PerHead, Cpu> {
  template <class Real>
  using RowMajor = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  template <class Real>
  using ConstMap = Eigen::Map<const RowMajor<Real>>;

  static void validate(const PerHead& policy, const LayerBasis& basis, const CacheShape& shape) {
    ::lowrankkv::validate(policy, basis, shape);
  }

  /// U [head_dim, rank]: the encoder without its metric, R^-1 (R U).
  template <class = void>
  static std::vector<float> working_basis(const PerHead& policy, const HeadBasis& head,
                                          int head_dim, Part part) {
    const std::vector<float>& down = part == Part::key ? head.key_down : head.value_down;
    if (!has_metric(policy, part)) return down;
    const std::vector<float>& inverse =
        part == Part::key ? head.key_metric_inverse : head.value_metric_inverse;
    return product(inverse, down, head_dim, part == Part::key ? head.key_rank : head.value_rank);
  }

  /// x <- (x - mean) R; without a mean or without a metric, that step is skipped.
  template <class Real = float>
  static void to_metric(const PerHead& policy, const HeadBasis& head, int head_dim, Part part,
                        float* rows, int count) {
    Eigen::Map<RowMajor<Real>> matrix(rows, count, head_dim);
    const std::vector<float>& mean = part == Part::key ? head.key_mean : head.value_mean;
    if (!mean.empty())
      matrix.rowwise() -= Eigen::Map<const Eigen::RowVectorX<Real>>(mean.data(), head_dim);
    if (!has_metric(policy, part)) return;
    const std::vector<float>& metric = part == Part::key ? head.key_metric : head.value_metric;
    matrix = (matrix * ConstMap<Real>(metric.data(), head_dim, head_dim)).eval();
  }

  template <class Real = float>
  static HeadBasis with_working_bases(const PerHead& policy, const HeadBasis& head, int head_dim,
                                      std::vector<float> key_basis,
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
    if (has_metric(policy, Part::key)) {
      moved.key_down = product(head.key_metric, key_basis, head_dim, head.key_rank);
      moved.query_down = product(head.key_metric_inverse, key_basis, head_dim, head.key_rank);
    } else {
      moved.key_down = std::move(key_basis);
    }
    if (has_metric(policy, Part::value)) {
      moved.value_down = product(head.value_metric, value_basis, head_dim, head.value_rank);
      moved.output_up.resize(value_basis.size());
      Eigen::Map<RowMajor<Real>>(moved.output_up.data(), head.value_rank, head_dim) =
          ConstMap<Real>(value_basis.data(), head_dim, head.value_rank).transpose() *
          ConstMap<Real>(head.value_metric_inverse.data(), head_dim, head_dim);
    } else {
      moved.value_down = std::move(value_basis);
    }
    return moved;
  }

 private:
  static bool has_metric(const PerHead& policy, Part part) {
    return part == Part::key ? policy.key_metric == KeyMetric::query_aware
                             : policy.value_metric == ValueMetric::output_aware;
  }
  /// metric [dim, dim] times basis [dim, rank].
  template <class Real = float>
  static std::vector<float> product(const std::vector<float>& metric,
                                    const std::vector<float>& basis, int dim, int rank) {
    std::vector<float> result(basis.size());
    Eigen::Map<RowMajor<Real>>(result.data(), dim, rank) =
        ConstMap<Real>(metric.data(), dim, dim) * ConstMap<Real>(basis.data(), dim, rank);
    return result;
  }
};

static_assert(BasisFor<PerHead, Cpu>);

LOWRANKKV_COMPILED_TEMPLATE(void Impl<PerHead, Cpu>::to_metric<float>(const PerHead&,
                                                                      const HeadBasis&, int, Part,
                                                                      float*, int))
LOWRANKKV_COMPILED_TEMPLATE(HeadBasis Impl<PerHead, Cpu>::with_working_bases<float>(
    const PerHead&, const HeadBasis&, int, std::vector<float>, std::vector<float>))
LOWRANKKV_COMPILED_TEMPLATE(std::vector<float> Impl<PerHead, Cpu>::product<float>(
    const std::vector<float>&, const std::vector<float>&, int, int))

LOWRANKKV_NAMESPACE_END
