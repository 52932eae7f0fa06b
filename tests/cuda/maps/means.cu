// SPDX-License-Identifier: Apache-2.0
// Rows with a constant ten times as large as they vary: presets, calibrated with the defaults,
// store them and attend to them as well as to the same rows without the constant.
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/support/calibrated.hpp"
#include "cuda/support/device_cache.cuh"
#include "cuda/support/random_layer.hpp"

namespace means_tests {

using namespace lowrankkv;
using support::Random;

struct Kernels : KernelSet {
  static constexpr bool bf16 = false, full_rows_8 = false;
  static constexpr int head_dim = 64, max_rank = 32;
};
using OneShape = CudaWith<Kernels>;

constexpr int kDim = 64, kPrompt = 200, kDecoded = 48, kTokens = kPrompt + kDecoded, kQueries = 4;
constexpr CacheShape kShape{4, 2, kDim};
const std::vector<SequenceId> kSequence{3};

/// Rows [kTokens, heads, kDim] of rank 20 and a little noise, of mean square 1 a channel; each head
/// has a constant of its own.
std::vector<float> low_rank_rows(Random& random, int heads, float constant) {
  std::normal_distribution<float> normal;
  constexpr int kRank = 20;
  std::vector<float> rows(static_cast<std::size_t>(kTokens * heads * kDim));
  for (int head = 0; head < heads; ++head) {
    std::vector<float> axes(static_cast<std::size_t>(kRank * kDim)), offset(kDim);
    for (float& x : axes) x = normal(random) / std::sqrt(static_cast<float>(kRank));
    for (float& x : offset) x = constant * (normal(random) < 0.0F ? -1.0F : 1.0F);
    for (int token = 0; token < kTokens; ++token) {
      float* row = rows.data() + (token * heads + head) * kDim;
      for (int i = 0; i < kDim; ++i)
        row[i] = offset[static_cast<std::size_t>(i)] + 0.15F * normal(random);
      for (int c = 0; c < kRank; ++c) {
        const float z = normal(random);
        for (int i = 0; i < kDim; ++i) row[i] += z * axes[static_cast<std::size_t>(c * kDim + i)];
      }
    }
  }
  return rows;
}

support::CalibrationRows problem(float constant, const RopeConfig& rope) {
  Random random(12);
  support::CalibrationRows rows{kShape, rope, {}, {}, {}};
  rows.query = low_rank_rows(random, kShape.num_qo_heads, 0.0F);
  rows.key = low_rank_rows(random, kShape.num_kv_heads, constant);
  rows.value = low_rank_rows(random, kShape.num_kv_heads, constant);
  return rows;
}

std::vector<float> tokens_of(const std::vector<float>& rows, int heads, int first, int count) {
  return {rows.begin() + static_cast<std::ptrdiff_t>(first) * heads * kDim,
          rows.begin() + static_cast<std::ptrdiff_t>(first + count) * heads * kDim};
}

template <class A, class B>
double rms_difference(const std::vector<A>& a, const std::vector<B>& b) {
  REQUIRE(a.size() == b.size());
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    sum += difference * difference;
  }
  return std::sqrt(sum / static_cast<double>(a.size()));
}

/// Root mean squares of what storing changed. Outputs: against float64 attention over the rows as
/// they came.
struct Errors {
  double key = 0.0, value = 0.0, output = 0.0;
};

template <class Cache>
Errors stored(const support::CalibrationRows& rows, bool centred) {
  CacheConfig config{.shape = kShape};
  config.max_sequences = 1;
  config.max_tokens = kTokens;
  config.max_query_tokens = kQueries;
  config.full_type = DType::f16;
  config.flush_interval = 16;
  config.rope = rows.rope;
  typename Cache::PolicySet policies;
  LayerBasis basis;
  support::CalibratedBudget budget;
  if constexpr (std::is_same_v<Cache, Budgeted<OneShape>>) {
    budget = support::calibrated_budget(rows, config);
    basis = budget.basis;
    policies = budget.policies;
  } else if constexpr (std::is_same_v<Cache, StarKV<OneShape>>) {
    policies.basis.keys.centred = centred;
    basis = support::calibrated_basis(rows, support::CalibratedMaps::joint, centred);
  } else if constexpr (std::is_same_v<Cache, Dlrp<OneShape>>) {
    basis = support::calibrated_basis(rows, support::CalibratedMaps::projector, centred);
  } else {
    policies.basis.centred = centred;
    basis = support::calibrated_basis(rows, support::CalibratedMaps::per_head, centred);
  }
  support::DeviceCache<Cache> cache(config, basis, policies);
  cache.cache.create(kSequence[0]);
  cache.ingest(kSequence[0], tokens_of(rows.key, 2, 0, kPrompt),
               tokens_of(rows.value, 2, 0, kPrompt), tokens_of(rows.query, 4, kPrompt - 32, 32));
  const auto check_bytes = [&] {
    if (budget.bytes_at == nullptr) return;
    const int recent = budget.policies.token_policy.get<SinkRecent>().recent;
    CHECK(static_cast<std::int64_t>(cache.cache.memory(kSequence[0]).total()) ==
          budget.bytes_at(cache.cache.num_tokens(kSequence[0]),
                          cache.cache.tail_length(kSequence[0]) - recent));
  };
  check_bytes();
  for (int at = kPrompt; at < kTokens; at += kQueries) {
    cache.append(kSequence, tokens_of(rows.key, 2, at, kQueries),
                 tokens_of(rows.value, 2, at, kQueries));
    if (at + kQueries < kTokens) cache.cache.maintain(kSequence);
  }
  check_bytes();
  const std::vector<float> query = tokens_of(rows.query, 4, kTokens - kQueries, kQueries);
  const support::Answer answer = cache.attend(kSequence, query);
  std::vector<float> key, value;
  cache.reconstruct(kSequence[0], key, value);
  std::vector<double> out, lse;
  support::attend_f64(kShape, config.scale(), rows.key, rows.value, query, out, lse);
  return {rms_difference(key, rows.key), rms_difference(value, rows.value),
          rms_difference(answer.out, out)};
}

/// Keys and values are stored, and post-RoPE keys are attended to, as without the constant, which
/// f16 rounds to 2^-12 of ten where rows vary by one. Logits of pre-RoPE keys depend on it.
/// @param paper_factor  least factor by which errors of keys are larger without means
template <class Cache>
void same_with_constant(const std::string& name, double paper_factor, const RopeConfig& rope = {}) {
  CAPTURE(name);
  const support::CalibrationRows plain = problem(0.0F, rope), large = problem(10.0F, rope);
  const Errors without = stored<Cache>(plain, true), with = stored<Cache>(large, true);
  constexpr double kFactor = 1.05;
  CHECK(without.key > 1e-3);
  CHECK(with.key < kFactor * without.key);
  CHECK(with.value < kFactor * without.value);
  if (rope.keys == Rope::post) CHECK(with.output < kFactor * without.output);
  CHECK(stored<Cache>(large, false).key > paper_factor * with.key);
}

TEST_CASE("presets store rows with a large constant as well as without it") {
  same_with_constant<StaticPCA<OneShape>>("StaticPCA", 1.0);
  same_with_constant<OjaKV<OneShape>>("OjaKV", 1.0);
  same_with_constant<SubSpaceG<OneShape>>("SubSpaceG", 1.2);
  same_with_constant<SubSpaceA<OneShape>>("SubSpaceA", 1.2);
  same_with_constant<StarKV<OneShape>>("StarKV", 2.0);
  same_with_constant<Dlrp<OneShape>>("Dlrp", 1.0);
  same_with_constant<Budgeted<OneShape>>("Budgeted", 0.99);  // never without means
}

TEST_CASE("pre-RoPE keys with a large constant too") {
  RopeConfig rope;
  rope.keys = Rope::pre;
  same_with_constant<OjaKV<OneShape>>("OjaKV", 1.0, rope);
  same_with_constant<SubSpaceG<OneShape>>("SubSpaceG", 1.2, rope);
  same_with_constant<StarKV<OneShape>>("StarKV", 2.0, rope);
}

}  // namespace means_tests
