// SPDX-License-Identifier: Apache-2.0
// STAR-KV's parts on the device and on the CPU, as tests draw and compare them.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/support/device_cache.cuh"
#include "cuda/support/random_layer.hpp"

namespace star {

using namespace lowrankkv;
using support::Answer;
using support::Random;
using support::StarSettings;

using Blocks = CompressedKVCache<Cuda, PerHead, Static, SinkRecent, BlockHadamard>;
using Joint = CompressedKVCache<Cuda, JointValues, Static, SinkRecent, NoQuantizer>;
using JointBytes = CompressedKVCache<Cuda, JointValues, Static, SinkRecent, Int8>;
using JointCodes = CompressedKVCache<Cuda, JointValues, Static, SinkRecent, TransformCode>;
using Scored =
    CompressedKVCache<Cuda, JointValues, Static, Compose<SinkRecent, SnapKV>, BlockHadamard>;
template <class Quantizer>
using JointAndOutliers =
    CompressedKVCache<Cuda, JointValues, Static, Compose<SinkRecent, ResidualOutliers>, Quantizer>;
using BlocksAndOutliers =
    CompressedKVCache<Cuda, PerHead, Static, Compose<SinkRecent, ResidualOutliers>, BlockHadamard>;

inline std::vector<float> third(const std::vector<float>& all, std::size_t i) {
  return support::part_of(all, i, 3);
}

template <class Cache>
inline constexpr bool keeps_outliers =
    support::has_member<decltype(std::declval<typename Cache::PolicySet>().token_policy),
                        ResidualOutliers>;

template <class Cache>
typename Cache::PolicySet policies_of(const StarSettings& settings) {
  typename Cache::PolicySet policies;
  if constexpr (std::is_same_v<decltype(policies.basis), JointValues>)
    policies.basis = {settings.heads_per_group, settings.basis};
  else
    policies.basis = settings.basis;
  if constexpr (std::is_same_v<decltype(policies.quantizer), NoQuantizer>)
    policies.quantizer = {DType::f16};
  else if constexpr (std::is_same_v<decltype(policies.quantizer), BlockHadamard>)
    policies.quantizer = settings.quantizer;
  if constexpr (keeps_outliers<Cache>) {
    policies.token_policy.template get<SinkRecent>() = settings.tokens;
    policies.token_policy.template get<ResidualOutliers>() = settings.errors;
  } else if constexpr (std::is_same_v<Cache, Scored>) {
    policies.token_policy = Compose(settings.tokens, settings.scores);
  } else {
    policies.token_policy = settings.tokens;
  }
  return policies;
}

template <class Cache>
struct Side : support::DeviceCache<Cache> {
  using Base = support::DeviceCache<Cache>;
  Side(const CacheConfig& config, const LayerBasis& basis, const StarSettings& settings)
      : Base(config, basis, policies_of<Cache>(settings)) {}
  void append(std::span<const SequenceId> seqs, const std::vector<float>& key,
              const std::vector<float>& value) {
    Base::append(seqs, key, value);
    Base::cache.maintain(seqs);
  }
};

inline StarSettings random_settings(Random& random) {
  StarSettings settings;
  const float shares[] = {0.2F, 0.2F, 0.0F, 1.0F, 0.5F};
  settings.quantizer.outlier_share = shares[random() % 5];
  settings.quantizer.high_bits = random() % 2 == 0 ? 4 : 2 + static_cast<int>(random() % 7);
  settings.quantizer.low_bits = random() % 2 == 0 ? 3 : 2 + static_cast<int>(random() % 7);
  settings.quantizer.rotate = random() % 4 != 0;
  settings.basis.centred = random() % 2 == 0;
  settings.tokens = {static_cast<int>(random() % 2) * static_cast<int>(random() % 40),
                     4 + static_cast<int>(random() % 60)};
  settings.errors = {random() % 2 == 0 ? OutlierError::relative : OutlierError::absolute,
                     0.02F * static_cast<float>(random() % 6), 0.0F};
  return settings;
}

inline support::RandomLayer layer_of(Random& random, const CacheShape& shape,
                                     const StarSettings& settings, int rank) {
  support::Settings plain;
  plain.basis = settings.basis;
  return support::random_layer(random, shape, plain, rank);
}

inline support::RandomLayer joint_layer(Random& random, const CacheShape& shape,
                                        const StarSettings& settings, int rank, int joint_rank) {
  return support::joint_layer(random, shape, settings.basis, settings.heads_per_group, rank,
                              joint_rank);
}

inline CacheConfig random_config(Random& random, DType type) {
  CacheConfig config;
  config.shape = support::random_shape(random, 3, {1, 2, 3, 4, 5, 8}, {64, 80, 128});
  config.max_sequences = 3;
  config.max_tokens = 6000;
  config.max_query_tokens = 1 + static_cast<int>(random() % 4);
  config.full_type = type;
  config.epoch_type = random() % 3 == 0 ? type : DType::f32;
  config.flush_interval = 16 + static_cast<int>(random() % 3) * 24;
  return config;
}

/// One sequence's answer against float64 attention over its stored rows; their errors, and those of
/// its rows against the CPU's.
template <class Cache>
void compare(Side<Cache>& side, SequenceId seq, const support::CpuSide& cpu,
             const std::vector<float>& query, const Answer& answer, double& worst,
             double limit = 1e-3) {  // of codes: queries and weights are integers of 16 bits
  std::vector<float> key, value, cpu_key, cpu_value;
  side.reconstruct(seq, key, value);
  cpu.reconstruct(cpu_key, cpu_value);
  const int dim = side.shape.head_dim;
  // A code on a boundary in one of a latent's channels is in the rows of all its heads: the more
  // channels a latent may have, the more of those (at 1180 channels of 6 bits one latent in
  // twenty).
  constexpr bool joint =
      std::is_same_v<decltype(std::declval<typename Cache::PolicySet>().basis), JointValues>;
  const std::size_t rows = key.size() / static_cast<std::size_t>(dim),
                    width = static_cast<std::size_t>(side.shape.num_kv_heads * dim),
                    allowed = 2 + (joint ? std::max(rows / 50, rows * width / 16000) : rows / 200);
  CHECK(side.cache.tail_length(seq) == cpu.tail_length());
  CHECK(support::different_rows(key, cpu_key, dim) <= allowed);
  CHECK(support::different_rows(value, cpu_value, dim) <= allowed);
  std::vector<double> expected, expected_lse;
  key = support::rotated(side.cache.config(), std::move(key),
                         [&](std::int64_t token) { return side.cache.position(seq, token); });
  support::attend_f64(side.shape, side.cache.config().scale(), key, value, query, expected,
                      expected_lse);
  const double error = support::distance(answer.out, expected);
  worst = std::max(worst, error);
  CHECK(error < limit);
  double largest = 1.0;
  for (const double x : expected_lse) largest = std::max(largest, std::abs(x));
  CHECK(support::furthest(answer.lse, expected_lse) < limit * largest);
}

/// Truncates one of three sequences.
/// @param tail_only  no further than its tail
template <class Cache>
void truncate_one(Random& random, Side<Cache>& side, const std::vector<SequenceId>& seqs,
                  const std::vector<std::unique_ptr<support::CpuSide>>& cpu, bool tail_only) {
  const std::size_t victim = random() % 3;
  std::int64_t length = static_cast<std::int64_t>(
      random() % static_cast<std::uint64_t>(side.cache.num_tokens(seqs[victim])));
  if (tail_only) length = std::max(length, side.cache.rollback_limit(seqs[victim]));
  side.cache.truncate(seqs[victim], length);
  cpu[victim]->truncate(length);
}
/// Removes tokens from the middle of three sequences.
/// @param sinks  how many of the first ones stay
/// @param tail_only  from the tail alone
template <class Cache>
void remove_middles(Side<Cache>& side, const std::vector<SequenceId>& seqs,
                    const std::vector<std::unique_ptr<support::CpuSide>>& cpu, int sinks,
                    bool tail_only) {
  for (std::size_t i = 0; i < 3; ++i) {
    const std::int64_t tokens = side.cache.num_tokens(seqs[i]),
                       first = tail_only ? side.cache.rollback_limit(seqs[i])
                                         : std::max(sinks + std::int64_t{1}, tokens / 3),
                       count = std::min(tokens - first, tokens / (i == 0 ? 2 : 20));
    if (count <= 0) continue;
    side.cache.remove(seqs[i], first, count);
    cpu[i]->remove(first, count);
  }
}

/// Captured steps of append and attend, maintain() after each, against the same calls: every
/// answer, and what is stored in the end.
template <class Cache, class Plain>
void check_captured_steps(Random& random, const support::RandomLayer& layer, Side<Cache>& side,
                          support::DeviceCache<Plain>& plain, const std::vector<SequenceId>& seqs,
                          int steps) {
  const CacheShape& shape = layer.shape;
  const int count = static_cast<int>(seqs.size());
  lowrankkv::cuda::DeviceArray<float> key(
      static_cast<std::size_t>(count * shape.num_kv_heads * shape.head_dim)),
      value(key.size()),
      query(static_cast<std::size_t>(count * shape.num_qo_heads * shape.head_dim));
  const auto out = support::poisoned(query.size());
  const support::CapturedStep captured([&](cudaStream_t stream) {
    side.cache.append(seqs, side.keys(key, count), side.values(value, count), stream);
    side.cache.attend(seqs, side.queries(query, count),
                      {out.data(), count, shape.num_qo_heads, shape.head_dim}, {}, stream);
  });
  for (int step = 0; step < steps; ++step) {
    const auto k = support::joint_rows(random, layer, count, true),
               v = support::joint_rows(random, layer, count, false),
               q = layer.queries(random, count);
    support::upload(k, key);
    support::upload(v, value);
    support::upload(q, query);
    captured.replay(side.cache, seqs);
    plain.append(seqs, k, v);
    CHECK(support::host(out) == plain.attend(seqs, q).out);
    plain.cache.maintain(seqs);
  }
  for (const SequenceId seq : seqs) CHECK(side.save(seq) == plain.save(seq));
}

}  // namespace star
