// SPDX-License-Identifier: Apache-2.0
/// @file calibrate/layer_moments.hpp  The calibration of one attention layer: moments of Q, K, V per KV head, and the bases they give.
#pragma once

#include <Eigen/Core>

#include <cstdint>
#include <utility>
#include <vector>

#include "lowrankkv/basis/per_head.hpp"
#include "lowrankkv/calibrate/choose_rank.hpp"
#include "lowrankkv/calibrate/moments.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cpu/convert.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace calibrate {

/// @brief Which rows a key basis is fitted to.
enum class KeySource {
  keys,             ///< K alone
  queries_and_keys  ///< row-stacked [Q; K], the queries of the whole group (OjaKV A.2 with the dimension error corrected)
};

/// @brief What to make of a layer's moments.
struct BasisOptions {
  double key_ratio = 0.5;    ///< key_rank / head_dim
  double value_ratio = 0.5;  ///< value_rank / head_dim
  double key_energy = 0.0;   ///< > 0: the rank that keeps this share of sigma^2, the largest of the layer's heads, instead of key_ratio
  double value_energy = 0.0; ///< the same for values
  KeySource key_source = KeySource::keys;
  PerHead policy{};          ///< metric and centring; key_source is ignored by query-aware keys, whose metric holds the queries
};

/// @brief Moments of the keys, values and (all grouped) queries of one KV head.
struct HeadMoments {
  Moments query, key, value;
};

/// @brief Collects one layer's activations in a single pass.
class LayerMoments {
 public:
  LayerMoments() = default;
  explicit LayerMoments(const CacheShape& shape) : shape_(shape) {
    heads_.resize(static_cast<std::size_t>(shape.num_kv_heads));
    for (HeadMoments& head : heads_) head = {Moments(shape.head_dim), Moments(shape.head_dim), Moments(shape.head_dim)};
  }
  const CacheShape& shape() const { return shape_; }
  HeadMoments& head(int index) { return heads_[static_cast<std::size_t>(index)]; }
  const HeadMoments& head(int index) const { return heads_[static_cast<std::size_t>(index)]; }

  /// @brief Adds the rows of some tokens. query [n, num_qo_heads, head_dim]; key, value [n, num_kv_heads, head_dim].
  void add(const QueryView& query, const KeyView& key, const ValueView& value) {
    ::lowrankkv::detail::check_rows("query", query, key.num_tokens, shape_.num_qo_heads, shape_.head_dim);
    ::lowrankkv::detail::check_rows("key", key, key.num_tokens, shape_.num_kv_heads, shape_.head_dim);
    ::lowrankkv::detail::check_rows("value", value, key.num_tokens, shape_.num_kv_heads, shape_.head_dim);
    std::vector<float> rows(static_cast<std::size_t>(key.num_tokens * shape_.head_dim));
    const auto add_head = [&](const auto& view, int head, Moments& moments) {
      for (std::int64_t token = 0; token < view.num_tokens; ++token) cpu::load_row(view, token, head, rows.data() + token * shape_.head_dim);
      moments.add({rows.data(), view.num_tokens, shape_.head_dim});
    };
    for (int head = 0; head < shape_.num_kv_heads; ++head) {
      add_head(key, head, heads_[static_cast<std::size_t>(head)].key);
      add_head(value, head, heads_[static_cast<std::size_t>(head)].value);
      for (int member = 0; member < shape_.group_size(); ++member) {
        add_head(query, head * shape_.group_size() + member, heads_[static_cast<std::size_t>(head)].query);
      }
    }
  }

  /// @brief The spectrum of the key rows that `options` asks for, in their metric: what a key rank is chosen from.
  Spectrum key_spectrum(int head, const BasisOptions& options) const {
    const HeadMoments& moments = heads_[static_cast<std::size_t>(head)];
    const Eigen::MatrixXd keys = options.policy.centred ? moments.key.centred() : moments.key.second;
    if (options.policy.key_metric == KeyMetric::query_aware) {
      const Eigen::MatrixXd root = metric_root(moments.query.second).root;
      return principal_axes(root * keys * root);
    }
    return principal_axes(options.key_source == KeySource::keys ? keys : keys + moments.query.second);
  }
  /// @brief The spectrum of the value rows.
  Spectrum value_spectrum(int head, const BasisOptions& options) const {
    const HeadMoments& moments = heads_[static_cast<std::size_t>(head)];
    return principal_axes(options.policy.centred ? moments.value.centred() : moments.value.second);
  }

  /// @brief The rank that `options` gives all heads of this layer: by ratio, or by energy (OjaKV A.2).
  int key_rank(const BasisOptions& options) const {
    return options.key_energy > 0.0 ? rank_over_heads([&](int head) { return key_spectrum(head, options); }, options.key_energy)
                                    : rank_by_ratio(shape_.head_dim, options.key_ratio);
  }
  int value_rank(const BasisOptions& options) const {
    return options.value_energy > 0.0 ? rank_over_heads([&](int head) { return value_spectrum(head, options); }, options.value_energy)
                                      : rank_by_ratio(shape_.head_dim, options.value_ratio);
  }

  /// @brief The maps of all heads at the options' ranks. Cost: a few eigendecompositions of head_dim per head.
  LayerBasis basis(const BasisOptions& options) const {
    LayerBasis layer;
    const int of_keys = key_rank(options);
    const int of_values = value_rank(options);
    for (int head = 0; head < shape_.num_kv_heads; ++head) {
      const HeadMoments& moments = heads_[static_cast<std::size_t>(head)];
      HeadBasis maps;
      maps.key_rank = of_keys;
      maps.value_rank = of_values;
      const Eigen::MatrixXd keys = key_spectrum(head, options).vectors.leftCols(maps.key_rank);
      maps.value_down = row_major(value_spectrum(head, options).vectors.leftCols(maps.value_rank));
      if (options.policy.key_metric == KeyMetric::query_aware) {
        const MetricRoot metric = metric_root(moments.query.second);
        maps.key_down = row_major(metric.root * keys);
        maps.query_down = row_major(metric.inverse * keys);
        maps.key_metric = row_major(metric.root);
        maps.key_metric_inverse = row_major(metric.inverse);
      } else {
        maps.key_down = row_major(keys);
      }
      if (options.policy.centred) {
        maps.key_mean = row_major(moments.key.mean());
        maps.value_mean = row_major(moments.value.mean());
      }
      layer.heads.push_back(std::move(maps));
    }
    return layer;
  }

 private:
  template <class SpectrumOf>
  int rank_over_heads(SpectrumOf&& spectrum_of, double energy) const {
    std::vector<int> ranks;
    for (int head = 0; head < shape_.num_kv_heads; ++head) ranks.push_back(rank_by_energy(spectrum_of(head).values, energy));
    return max_over_heads(ranks);
  }
  static std::vector<float> row_major(const Eigen::MatrixXd& matrix) {
    using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    std::vector<float> values(static_cast<std::size_t>(matrix.size()));
    Eigen::Map<RowMajor>(values.data(), matrix.rows(), matrix.cols()) = matrix.cast<float>();
    return values;
  }
  CacheShape shape_;
  std::vector<HeadMoments> heads_;
};

}  // namespace calibrate
LOWRANKKV_NAMESPACE_END
