// SPDX-License-Identifier: Apache-2.0
/// @file calibrate/layer_moments.hpp  The calibration of one attention layer: moments of Q, K and V
/// per KV head, and bases from them.
#pragma once

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "lowrankkv/basis/per_head.hpp"
#include "lowrankkv/calibrate/choose_rank.hpp"
#include "lowrankkv/calibrate/coding_statistics.hpp"
#include "lowrankkv/calibrate/moments.hpp"
#include "lowrankkv/calibrate/row_sample.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cpu/convert.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace calibrate {

/// @brief The rows to which a key basis is fitted.
enum class KeySource {
  keys,  ///< K alone
  /// Row-stacked [Q; K], with the queries of the whole group (OjaKV A.2, its dimension error
  /// corrected).
  queries_and_keys
};

/// @brief Options for the bases of a layer.
struct BasisOptions {
  double key_ratio = 0.5;    ///< key_rank / head_dim
  double value_ratio = 0.5;  ///< value_rank / head_dim
  /// > 0: instead of key_ratio, the rank that keeps this share of sigma^2, the largest among the
  /// layer's heads.
  double key_energy = 0.0;
  double value_energy = 0.0;  ///< the same for values
  KeySource key_source = KeySource::keys;
  /// Metric and centring. Query-aware keys ignore key_source: their metric contains the queries.
  PerHead policy{};
  /// With policy.centred: the smallest share of the rows' energy, ||mean||^2 / E ||x||^2 in the
  /// metric, at which the mean of a head's keys (or values) is subtracted. 0: always.
  ///
  /// A mean costs head_dim numbers an epoch, as much as one more rank of a map. A mean that is left
  /// in costs at most its share of the energy: it displaces one axis, and makes gains larger. A
  /// thousandth is what codes of 6 bits lose, and what chance gives the mean of a thousand rows.
  double mean_share = 1e-3;
};

/// @brief Moments of the keys, values and (all grouped) queries of one KV head, and samples of rows
/// for statistics that moments do not give (percentiles).
struct HeadMoments {
  Moments query, key, value;
  RowSample key_sample, value_sample;
};

/// @brief Collects one layer's activations in a single pass.
class LayerMoments {
 public:
  LayerMoments() = default;
  /// @param rope  form of the keys. With respect to pre-RoPE keys, a query is rotated back by the
  /// key's position: the moments of queries are then of queries that are rotated back by the
  /// position of a key at or before them; these keys are chosen evenly
  template <class = void>
  explicit LayerMoments(const CacheShape& shape, const RopeConfig& rope = {})
      : shape_(shape), rope_(rope) {
    heads_.resize(static_cast<std::size_t>(shape.num_kv_heads));
    const RowSample sample(shape.head_dim, kSampleRows);
    for (HeadMoments& head : heads_)
      head = {Moments(shape.head_dim), Moments(shape.head_dim), Moments(shape.head_dim), sample,
              sample};
    values_ = Moments(shape.num_kv_heads * shape.head_dim);
    coding_ = CodingStatistics(shape, rope);
  }
  /// Sample rows of each head's keys and values.
  static constexpr std::int64_t kSampleRows = 256;
  const CacheShape& shape() const { return shape_; }
  const RopeConfig& rope() const { return rope_; }
  HeadMoments& head(int index) { return heads_[static_cast<std::size_t>(index)]; }
  const HeadMoments& head(int index) const { return heads_[static_cast<std::size_t>(index)]; }
  /// @brief Moments of the stacked values of all heads, [num_kv_heads head_dim], for joint values.
  Moments& values() { return values_; }
  const Moments& values() const { return values_; }
  /// @brief Statistics for transform coding; filled by CodingStatistics::add(), not by add() below.
  CodingStatistics& coding() { return coding_; }
  const CodingStatistics& coding() const { return coding_; }

  /// @brief Adds the rows of some tokens.
  /// @param query           [n, num_qo_heads, head_dim], post-RoPE
  /// @param key, value      [n, num_kv_heads, head_dim]; keys in the form that the constructor
  /// names
  /// @param first_position  position of the first token; used only for pre-RoPE keys
  template <class = void>
  void add(const QueryView& query, const KeyView& key, const ValueView& value,
           std::int64_t first_position = 0) {
    ::lowrankkv::detail::check_rows("query", query, key.num_tokens, shape_.num_qo_heads,
                                    shape_.head_dim);
    ::lowrankkv::detail::check_rows("key", key, key.num_tokens, shape_.num_kv_heads,
                                    shape_.head_dim);
    ::lowrankkv::detail::check_rows("value", value, key.num_tokens, shape_.num_kv_heads,
                                    shape_.head_dim);
    const int dim = shape_.head_dim;
    const std::int64_t n = key.num_tokens;
    std::vector<float> rows(static_cast<std::size_t>(n * dim));
    const auto load = [&](const auto& view, int head) {
      for (std::int64_t token = 0; token < n; ++token)
        cpu::load_row(view, token, head, rows.data() + token * dim);
      return MatrixView(rows.data(), n, dim);
    };
    std::vector<float> stacked(rows.size() * static_cast<std::size_t>(shape_.num_kv_heads));
    const int width = shape_.num_kv_heads * dim;
    for (int index = 0; index < shape_.num_kv_heads; ++index) {
      HeadMoments& head = heads_[static_cast<std::size_t>(index)];
      const MatrixView keys = load(key, index);
      head.key.add(keys);
      head.key_sample.add(keys);
      const MatrixView values = load(value, index);
      head.value.add(values);
      head.value_sample.add(values);
      for (std::int64_t token = 0; token < n; ++token)
        std::copy_n(values.row(token), dim, stacked.begin() + token * width + index * dim);
      for (int member = 0; member < shape_.group_size(); ++member) {
        const MatrixView queries = load(query, index * shape_.group_size() + member);
        if (rope_.keys == Rope::pre) rotate_back(rows.data(), n, first_position);
        head.query.add(queries);
      }
    }
    values_.add({stacked.data(), n, width});
  }

  /// @brief The spectrum of the key rows that `options` selects, in their metric. A key rank is
  /// chosen from it.
  template <class Real = double>
  Spectrum key_spectrum(int head, const BasisOptions& options) const {
    const HeadMoments& moments = heads_[static_cast<std::size_t>(head)];
    const Eigen::MatrixX<Real> keys =
        centres_keys(head, options) ? moments.key.centred() : moments.key.second;
    if (options.policy.key_metric == KeyMetric::query_aware) {
      const Eigen::MatrixX<Real> root = metric_root(moments.query.second).root;
      return principal_axes(root * keys * root);
    }
    const Eigen::MatrixX<Real>& queries = moments.query.second;
    return principal_axes(options.key_source == KeySource::keys ? keys : keys + queries);
  }
  /// @brief The spectrum of the value rows.
  template <class = void>
  Spectrum value_spectrum(int head, const BasisOptions& options) const {
    const HeadMoments& moments = heads_[static_cast<std::size_t>(head)];
    return principal_axes(centres_values(head, options) ? moments.value.centred()
                                                        : moments.value.second);
  }

  /// @brief Whether the mean of a head's keys is subtracted: BasisOptions::mean_share.
  template <class Real = double>
  bool centres_keys(int head, const BasisOptions& options) const {
    if (!options.policy.centred) return false;
    const HeadMoments& moments = heads_[static_cast<std::size_t>(head)];
    if (options.policy.key_metric == KeyMetric::plain)
      return moments.key.mean_share() >= options.mean_share;
    const Eigen::MatrixX<Real> root = metric_root(moments.query.second).root;
    return moments.key.mean_share(root) >= options.mean_share;
  }
  /// @brief Whether the mean of a head's values is subtracted.
  template <class = void>
  bool centres_values(int head, const BasisOptions& options) const {
    return options.policy.centred &&
           heads_[static_cast<std::size_t>(head)].value.mean_share() >= options.mean_share;
  }

  /// @brief The rank of keys for all heads of this layer: by ratio, or by energy (OjaKV A.2).
  template <class = void>
  int key_rank(const BasisOptions& options) const {
    return options.key_energy > 0.0
               ? rank_over_heads([&](int head) { return key_spectrum(head, options); },
                                 options.key_energy)
               : rank_by_ratio(shape_.head_dim, options.key_ratio);
  }
  template <class = void>
  int value_rank(const BasisOptions& options) const {
    return options.value_energy > 0.0
               ? rank_over_heads([&](int head) { return value_spectrum(head, options); },
                                 options.value_energy)
               : rank_by_ratio(shape_.head_dim, options.value_ratio);
  }

  /// @brief The maps of all heads at the ranks of `options`, with the means that are subtracted.
  /// Cost: a few eigendecompositions of head_dim per head.
  template <class Real = double>
  LayerBasis basis(const BasisOptions& options) const {
    LayerBasis layer;
    const int of_keys = key_rank(options);
    const int of_values = value_rank(options);
    for (int head = 0; head < shape_.num_kv_heads; ++head) {
      const HeadMoments& moments = heads_[static_cast<std::size_t>(head)];
      HeadBasis maps;
      maps.key_rank = of_keys;
      maps.value_rank = of_values;
      const Eigen::MatrixX<Real> key_axes = key_spectrum(head, options).vectors,
                                 value_axes = value_spectrum(head, options).vectors;
      const Eigen::MatrixX<Real> keys = key_axes.leftCols(maps.key_rank);
      maps.value_down = linalg::to_row_major(value_axes.leftCols(maps.value_rank));
      if (options.policy.key_metric == KeyMetric::query_aware) {
        const MetricRoot metric = metric_root(moments.query.second);
        const Eigen::MatrixX<Real>&root = metric.root, &inverse = metric.inverse;
        maps.key_down = linalg::to_row_major(root * keys);
        maps.query_down = linalg::to_row_major(inverse * keys);
        maps.key_metric = linalg::to_row_major(metric.root);
        maps.key_metric_inverse = linalg::to_row_major(metric.inverse);
      } else {
        maps.key_down = linalg::to_row_major(keys);
      }
      if (centres_keys(head, options)) maps.key_mean = linalg::to_row_major(moments.key.mean());
      if (centres_values(head, options))
        maps.value_mean = linalg::to_row_major(moments.value.mean());
      layer.heads.push_back(std::move(maps));
    }
    return layer;
  }

 private:
  template <class SpectrumOf>
  int rank_over_heads(SpectrumOf&& spectrum_of, double energy) const {
    std::vector<int> ranks;
    for (int head = 0; head < shape_.num_kv_heads; ++head)
      ranks.push_back(rank_by_energy(spectrum_of(head).values, energy));
    return max_over_heads(ranks);
  }
  /// Rotates query rows [n, head_dim] back, each by a position at or before its own, evenly spread.
  template <class = void>
  void rotate_back(float* rows, std::int64_t n, std::int64_t first_position) const {
    // The fractional parts of its multiples cover [0, 1) evenly.
    constexpr double kGolden = 0.6180339887498949;
    for (std::int64_t token = 0; token < n; ++token) {
      const double whole = kGolden * static_cast<double>(token + 1);
      const double share = whole - std::floor(whole);
      coding_.rotary().rotate_row(
          -static_cast<std::int64_t>(share * static_cast<double>(first_position + token + 1)),
          rows + token * shape_.head_dim);
    }
  }
  CacheShape shape_;
  RopeConfig rope_;
  std::vector<HeadMoments> heads_;
  Moments values_;
  CodingStatistics coding_;
};

LOWRANKKV_COMPILED_TEMPLATE(LayerMoments::LayerMoments(const CacheShape&, const RopeConfig&))
LOWRANKKV_COMPILED_TEMPLATE(void LayerMoments::add<void>(const QueryView&, const KeyView&,
                                                         const ValueView&, std::int64_t))
LOWRANKKV_COMPILED_TEMPLATE(Spectrum LayerMoments::key_spectrum<double>(int, const BasisOptions&)
                                const)
LOWRANKKV_COMPILED_TEMPLATE(Spectrum LayerMoments::value_spectrum<void>(int, const BasisOptions&)
                                const)
LOWRANKKV_COMPILED_TEMPLATE(bool LayerMoments::centres_keys<double>(int, const BasisOptions&) const)
LOWRANKKV_COMPILED_TEMPLATE(int LayerMoments::key_rank<void>(const BasisOptions&) const)
LOWRANKKV_COMPILED_TEMPLATE(int LayerMoments::value_rank<void>(const BasisOptions&) const)
LOWRANKKV_COMPILED_TEMPLATE(LayerBasis LayerMoments::basis<double>(const BasisOptions&) const)

}  // namespace calibrate
LOWRANKKV_NAMESPACE_END
