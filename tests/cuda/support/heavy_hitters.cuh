// SPDX-License-Identifier: Apache-2.0
// Caches with heavy hitters on the device; their accumulated attention scores, and the rows that
// stay, in float64.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <type_traits>
#include <vector>

#include "cuda/support/cpu_side.hpp"
#include "cuda/support/device_cache.cuh"
#include "cuda/support/random_layer.hpp"

namespace heavy {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;
using support::distance;
using support::effort;
using support::HeavyForm;
using support::HeavySettings;
using support::host;
using support::part_of;
using support::poisoned;
using support::Random;
using support::RandomLayer;

template <class Cache>
using Parts = typename Cache::PolicySet;
template <class Cache>
inline constexpr bool joins = std::is_same_v<decltype(Parts<Cache>::basis), JointValues>;
template <class Cache>
inline constexpr bool coded = !std::is_same_v<decltype(Parts<Cache>::quantizer), NoQuantizer>;
template <class Cache>
inline constexpr bool compresses =
    gpu::TokenRules<decltype(Parts<Cache>::token_policy)>::compresses;
template <class Cache>
inline constexpr bool moves = !std::is_same_v<decltype(Parts<Cache>::updater), Static>;
template <class Cache>
inline constexpr bool exempts = gpu::TokenRules<decltype(Parts<Cache>::token_policy)>::scores_both;
template <class Cache>
constexpr HeavyForm form_of() {
  if (!compresses<Cache>) return HeavyForm::full;
  if (moves<Cache>)
    return std::is_same_v<decltype(Parts<Cache>::updater), FrequentDirections>
               ? HeavyForm::directions
           : coded<Cache> ? HeavyForm::oja_codes
                          : HeavyForm::oja;
  if (joins<Cache>)
    return std::is_same_v<decltype(Parts<Cache>::quantizer), TransformCode> ? HeavyForm::joint_codes
           : coded<Cache>                                                   ? HeavyForm::star
                                                                            : HeavyForm::joint;
  return coded<Cache> ? HeavyForm::codes : HeavyForm::plain;
}
/// Heads that keep the same rows.
template <class Cache>
int fate_heads(const HeavySettings& settings, const CacheShape& shape) {
  if (!joins<Cache>) return 1;
  return settings.heads_per_group > 0 ? settings.heads_per_group : shape.num_kv_heads;
}

/// Random rows [tokens, heads, dim] as they will be stored; some are much larger than others, so
/// that accumulated scores differ.
inline std::vector<float> random_rows(Random& random, std::int64_t tokens, int heads, int dim,
                                      DType type, float size = 1.0F) {
  std::normal_distribution<float> normal;
  std::vector<float> rows(static_cast<std::size_t>(tokens * heads * dim));
  float gain = 1.0F;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i % static_cast<std::size_t>(dim) == 0) gain = size * std::exp(0.4F * normal(random));
    rows[i] = round_to(type, gain * normal(random));
  }
  return rows;
}

/// Bases for rows that are compressed; none where all are full.
template <class Cache>
RandomLayer layer_of(Random& random, const CacheShape& shape, const HeavySettings& settings) {
  const int rank =
      8 +
      static_cast<int>(
          random() %
          static_cast<unsigned>(
              moves<Cache>
                  ? 21
                  : shape.head_dim -
                        8));  // fewer rows than a basis has columns do not determine its directions
  if constexpr (joins<Cache>) {
    const int width = fate_heads<Cache>(settings, shape) * shape.head_dim;
    return support::joint_layer(
        random, shape, {}, settings.heads_per_group, rank,
        8 + static_cast<int>(random() % static_cast<unsigned>(std::min(width, 400) - 8)));
  } else if constexpr (compresses<Cache>) {
    RandomLayer layer = support::random_layer(random, shape, {}, rank);
    // The first channel has bits: no row comes back as zeros, which mean that it was dropped.
    for (HeadBasis& head : layer.basis.heads) head.key_bits[0] = head.value_bits[0] = 8;
    return layer;
  } else {
    return {{}, shape};
  }
}

template <class Cache>
Parts<Cache> policies_of(const HeavySettings& settings) {
  Parts<Cache> policies;
  using Tokens = decltype(policies.token_policy);
  if constexpr (support::has_member<Tokens, KeepFull>)
    policies.token_policy.template get<KeepFull>().recent = 0;
  policies.token_policy.template get<HeavyHitters>() = settings.heavy;
  if constexpr (support::has_member<Tokens, SnapKV>)
    policies.token_policy.template get<SnapKV>() = settings.scores;
  if constexpr (support::has_member<Tokens, ResidualOutliers>)
    policies.token_policy.template get<ResidualOutliers>() = settings.outliers;
  if constexpr (support::has_member<Tokens, SinkRecent>)
    policies.token_policy.template get<SinkRecent>() = settings.sinks;
  if constexpr (joins<Cache>) policies.basis.heads_per_group = settings.heads_per_group;
  if constexpr (compresses<Cache> && !coded<Cache>) policies.quantizer.type = settings.coefficients;
  support::configure(policies.updater, settings);
  return policies;
}

/// What attention gave, and what rows received of it: accumulated [seqs, heads, positions].
struct ScoredList {
  std::vector<float> out, lse, accumulated;
  std::int64_t positions = 0;

  friend bool operator==(const ScoredList&, const ScoredList&) = default;
};

template <class Cache>
class Side : public support::DeviceCache<Cache> {
 public:
  using Base = support::DeviceCache<Cache>;
  using Base::cache;
  using Base::shape;
  Side(const CacheConfig& config, const RandomLayer& layer, const HeavySettings& settings,
       std::shared_ptr<gpu::PagePool> pool = nullptr)
      : Base(config, layer.basis, policies_of<Cache>(settings), std::move(pool)) {}

  /// @param type  of the queries' tensor  @param with_lse  whether the caller has memory for it
  ScoredList accumulate(std::span<const SequenceId> seqs, const std::vector<float>& query,
                        DType type = DType::f32, bool with_lse = true) {
    const std::int64_t m = Base::query_tokens(query);
    ScoredList answer;
    for (const SequenceId seq : seqs)
      answer.positions = std::max(answer.positions, cache.num_tokens(seq) + 7);
    std::vector<std::uint16_t> halves;
    for (const float x : query) {
      if (type == DType::f16)
        halves.push_back(__half_as_ushort(__float2half(x)));
      else if (type == DType::bf16)
        halves.push_back(__bfloat16_as_ushort(__float2bfloat16(x)));
    }
    const gpu::DeviceArray<float> q32(query);
    const gpu::DeviceArray<std::uint16_t> q16(halves);
    const std::int64_t row = std::int64_t{shape.num_qo_heads} * shape.head_dim;
    const QueryView view = type == DType::f32 ? Base::queries(q32, m)
                                              : QueryView(q16.data(), type, m, shape.num_qo_heads,
                                                          shape.head_dim, row, shape.head_dim);
    const auto out = poisoned(query.size()),
               lse = poisoned(static_cast<std::size_t>(m * shape.num_qo_heads));
    const auto accumulated =
        poisoned(seqs.size() * static_cast<std::size_t>(shape.num_kv_heads * answer.positions));
    cache.attend(seqs, view, {out.data(), m, shape.num_qo_heads, shape.head_dim},
                 with_lse ? LseView{lse.data(), m, shape.num_qo_heads} : LseView{},
                 ScoreView{accumulated.data(), static_cast<std::int64_t>(seqs.size()),
                           shape.num_kv_heads, answer.positions});
    answer.out = host(out);
    answer.accumulated = host(accumulated);
    if (with_lse) answer.lse = host(lse);
    return answer;
  }
  std::vector<RowState> states(SequenceId seq, int head) const {
    std::vector<RowState> all(static_cast<std::size_t>(cache.num_tokens(seq)));
    cache.row_states(seq, head, 0, all);
    return all;
  }
  void accumulate(std::span<const SequenceId> seqs, const std::vector<float>& accumulated,
                  std::int64_t positions) {
    const gpu::DeviceArray<float> received(accumulated);
    cache.accumulate(seqs, {received.data(), static_cast<std::int64_t>(seqs.size()),
                            shape.num_kv_heads, positions});
    gpu::check(cudaDeviceSynchronize(), "accumulate");
  }
};

/// Which rows [tokens, heads] are stored: dropped ones come back as zeros, and no row of these
/// tests is zero.
inline std::vector<bool> kept_rows_of(const CacheShape& shape, const std::vector<float>& key) {
  std::vector<bool> kept;
  const std::ptrdiff_t dim = shape.head_dim;
  for (auto row = key.begin(); row != key.end(); row += dim)
    kept.push_back(std::any_of(row, row + dim, [](float x) { return x != 0.0F; }));
  return kept;
}

/// Attention that the stored rows [tokens, heads] receive from the last m tokens' queries, in
/// float64: [heads, tokens].
inline std::vector<double> scores_f64(const CacheShape& shape, double scale,
                                      const std::vector<float>& key, const std::vector<bool>& there,
                                      const std::vector<float>& query) {
  const int dim = shape.head_dim, heads = shape.num_kv_heads, group = shape.group_size();
  const std::int64_t tokens = static_cast<std::int64_t>(there.size()) / heads,
                     m = static_cast<std::int64_t>(query.size()) / (shape.num_qo_heads * dim);
  std::vector<double> accumulated_scores(there.size(), 0.0),
      weights(static_cast<std::size_t>(tokens));
  for (int column = 0; column < shape.num_qo_heads * static_cast<int>(m); ++column) {
    const int h = column % shape.num_qo_heads, head = h / group;
    const std::int64_t seen = tokens - m + column / shape.num_qo_heads + 1;
    double top = -1e300, sum = 0.0;
    for (std::int64_t t = 0; t < seen; ++t) {
      if (!there[static_cast<std::size_t>(t * heads + head)]) continue;
      double dot = 0.0;
      for (int i = 0; i < dim; ++i)
        dot += static_cast<double>(query[static_cast<std::size_t>(column * dim + i)]) *
               key[static_cast<std::size_t>((t * heads + head) * dim + i)];
      weights[static_cast<std::size_t>(t)] = scale * dot;
      top = std::max(top, scale * dot);
    }
    for (const bool adds : {false, true}) {
      for (std::int64_t t = 0; t < seen; ++t) {
        if (!there[static_cast<std::size_t>(t * heads + head)]) continue;
        const double weight = std::exp(weights[static_cast<std::size_t>(t)] - top);
        if (adds)
          accumulated_scores[static_cast<std::size_t>(head * tokens + t)] += weight / sum;
        else
          sum += weight;
      }
    }
  }
  return accumulated_scores;
}

inline CacheConfig config_of(const CacheShape& shape, std::int64_t max_tokens, int max_sequences,
                             int flush_interval) {
  CacheConfig config;
  config.shape = shape;
  config.max_tokens = max_tokens;
  config.max_sequences = max_sequences;
  config.flush_interval = flush_interval;
  config.max_query_tokens = 5;
  return config;
}

/// What one sequence's rows have received in float64, and a check of what a cache keeps by it.
struct Ledger {
  CacheShape shape;
  int shared_by = 1;                             ///< heads that keep the same rows
  std::vector<std::vector<double>> accumulated;  // [heads][positions]
  std::int64_t in_band = 0, decided = 0;

  void extend(std::int64_t tokens) {
    accumulated.resize(static_cast<std::size_t>(shape.num_kv_heads));
    for (auto& head : accumulated) head.resize(static_cast<std::size_t>(tokens), 0.0);
  }
  double of(int head, std::int64_t t) const {
    double sum = 0.0;
    for (int h = head / shared_by * shared_by; h < (head / shared_by + 1) * shared_by; ++h)
      sum += accumulated[static_cast<std::size_t>(h)][static_cast<std::size_t>(t)];
    return sum;
  }
  /// @param before, after  rows that were stored, or in the tail, and those that are  @param left
  /// tokens that have left the tail  @param wanted  rows that are to stay of them
  void check(const std::vector<bool>& before, const std::vector<bool>& after, std::int64_t left,
             std::int64_t wanted, int sinks, double band) {
    const int heads = shape.num_kv_heads;
    for (int head = 0; head < heads; ++head) {
      std::vector<double> candidates;
      std::int64_t kept = 0, pinned = 0;
      bool right = true;
      for (std::int64_t t = 0; t < left; ++t) {
        const std::size_t row = static_cast<std::size_t>(t * heads + head);
        kept += after[row] ? 1 : 0;
        right = right && (!after[row] || before[row]);  // nothing comes back
        right =
            right &&
            after[row] == after[static_cast<std::size_t>(t * heads + head / shared_by * shared_by)];
        if (t < sinks) {
          ++pinned;
          right = right && after[row];
        } else if (before[row]) {
          candidates.push_back(of(head, t));
        }
      }
      CHECK(kept == wanted);
      CHECK(right);
      std::sort(candidates.rbegin(), candidates.rend());
      const std::size_t stay = static_cast<std::size_t>(wanted - pinned);
      const double least = stay > 0 ? candidates[stay - 1] : 1e300;
      for (std::int64_t t = sinks; t < left; ++t) {
        const std::size_t row = static_cast<std::size_t>(t * heads + head);
        if (!before[row]) continue;
        const double own = of(head, t);
        ++decided;
        if (std::abs(own - least) <= band * least)
          ++in_band;
        else
          right = right && after[row] == (own > least);
      }
      CHECK(right);
      for (std::size_t row = static_cast<std::size_t>(left * heads); row < after.size(); ++row)
        right = right && after[row];  // the tail
      CHECK(right);
    }
  }
};

/// A sequence grows as an engine's does: append, attend, accumulate, maintain.
struct Growth {
  std::vector<std::vector<float>> keys, values, queries;

  Growth(Random& random, const CacheShape& shape, int steps) {
    for (int i = 0; i < steps; ++i) {
      keys.push_back(random_rows(random, 2, shape.num_kv_heads, shape.head_dim, DType::f16));
      values.push_back(random_rows(random, 2, shape.num_kv_heads, shape.head_dim, DType::f16));
      queries.push_back(random_rows(random, 2, shape.num_qo_heads, shape.head_dim, DType::f32));
    }
  }
  template <class Cache>
  void grow(Side<Cache>& side, SequenceId seq) const {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      side.append(std::span(&seq, 1), keys[i], values[i]);
      ScoredList answer = side.accumulate(std::span(&seq, 1), queries[i]);
      for (float& x : answer.accumulated)
        x *= 30.0F;  // so that rows of the tail can drive out stored ones
      side.accumulate(std::span(&seq, 1), answer.accumulated, answer.positions);
      side.cache.maintain(seq);
    }
  }
};

}  // namespace heavy
