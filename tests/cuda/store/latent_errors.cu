// SPDX-License-Identifier: Apache-2.0
// Joint values with rows that errors keep full: those of a group's heads are the same, as on the
// CPU, and as float64 errors choose.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/support/joint_sequences.cuh"

namespace latent_errors_tests {

using namespace lowrankkv;
using namespace star;
using support::Answer;
using support::Random;
using support::StarSettings;

TEST_CASE(
    "random sequences of joint values with outliers: rows as on the CPU, answers as in float64, "
    "the same in any batch") {
  const int trials = effort() == 0 ? 2 : 3 * effort();
  for (const DType type : {DType::f16, DType::bf16}) {
    CAPTURE(std::string(name_of(type)));
    const std::uint64_t seed = type == DType::f16 ? 231 : 232;
    const double plain = random_joint<JointAndOutliers<NoQuantizer>>(false, type, seed, trials),
                 blocks =
                     random_joint<JointAndOutliers<BlockHadamard>>(true, type, seed + 10, trials),
                 codes =
                     random_joint<JointAndOutliers<TransformCode>>(true, type, seed + 20, trials);
    MESSAGE(std::string(name_of(type))
            << ": outputs, coefficients in f16 " << plain << ", codes of two blocks " << blocks
            << ", of their own bits " << codes);
  }
}

namespace {

/// The rows that stay full are those of the largest errors in float64, if those exceed the
/// threshold, of what a cache without outliers makes of the same rows; those of all heads of a
/// group. Returns an error that half of those rows exceed.
template <class Quantizer>
float check_chosen(std::uint64_t seed, OutlierError error, float threshold) {
  Random random(seed);
  StarSettings settings = random_settings(random);
  const int members = seed == 241 ? 4 : 2;
  settings.heads_per_group = members;
  settings.tokens = {3, 20};
  settings.errors = {error, 0.1F, threshold};
  CacheConfig config;
  config.shape = {8, 4, 128};
  config.max_tokens = 700;
  config.max_sequences = 1;
  config.flush_interval = 40;
  config.epoch_type = seed % 2 == 0 ? DType::f16 : DType::f32;
  const support::RandomLayer layer =
      joint_layer(random, config.shape, settings, 40,
                  seed == 241 ? 300 : 160);  // also more channels than are operands at a time
  using Without = CompressedKVCache<Cuda, JointValues, Static, SinkRecent, Quantizer>;
  Side<JointAndOutliers<Quantizer>> side(config, layer.basis, settings);
  Side<Without> without(config, layer.basis, settings);
  side.cache.create(1);
  without.cache.create(1);
  const std::vector<SequenceId> one{1};
  std::vector<float> exact[2];
  const auto add = [&](std::int64_t n, bool prompt) {
    const auto key = joint_rows(random, layer, n, true),
               value = joint_rows(random, layer, n, false);
    const auto store = [&](auto& own) {
      if (prompt)
        own.ingest(1, key, value);
      else
        own.append(one, key, value);
    };
    store(side);
    store(without);
    for (const bool is_key : {true, false}) {
      for (const float x : is_key ? key : value)
        exact[is_key ? 0 : 1].push_back(round_to(config.full_type, x));
    }
  };
  std::vector<float> stored[2];
  const int heads = config.shape.num_kv_heads, dim = config.shape.head_dim;
  std::int64_t first = settings.tokens.sinks, kept = 0;
  std::vector<double> errors_of_full;
  const auto check_rows = [&](std::int64_t end) {
    without.reconstruct(1, stored[0], stored[1]);
    for (int leader = 0; leader < heads; leader += members) {
      std::vector<RowState> states(static_cast<std::size_t>(end - first)), others(states.size());
      side.cache.row_states(1, leader, first, states);
      side.cache.row_states(1, leader + members - 1, first, others);
      CHECK(states == others);
      double least_full = INFINITY, most_compressed = 0.0;
      std::int64_t full_rows = 0;
      for (std::int64_t token = first; token < end; ++token) {
        double sum = 0.0;
        for (int head = leader; head < leader + members; ++head) {
          for (int part = 0; part < 2; ++part) {
            const HeadBasis& basis = layer.basis.heads[static_cast<std::size_t>(head)];
            const std::size_t at = static_cast<std::size_t>((token * heads + head) * dim);
            sum += support::row_error(part == 0 ? basis.key_mean : basis.value_mean,
                                      exact[part].data() + at, stored[part].data() + at, dim,
                                      error == OutlierError::relative);
          }
        }
        const bool full = states[static_cast<std::size_t>(token - first)] == RowState::full;
        full_rows += full ? 1 : 0;
        if (full) errors_of_full.push_back(sum);
        if (full)
          least_full = std::min(least_full, sum);
        else
          most_compressed = std::max(most_compressed, sum);
      }
      CHECK(least_full >
            most_compressed * (1.0 - 2e-3));  // of f32 sums, and of codes that are one apart where
                                              // a coefficient is between two
      CHECK(least_full > static_cast<double>(threshold) * (1.0 - 2e-3));
      if (most_compressed > static_cast<double>(threshold) * (1.0 + 2e-3))
        CHECK(full_rows == share_of_rows(settings.errors.share, first, end - first));
      kept += full_rows;
    }
    first = end;
  };
  add(300, true);
  check_rows(side.cache.rollback_limit(1));
  CHECK((kept >= heads / members * 25) == (threshold == 0.0F));
  CHECK(kept > 0);
  const std::int64_t before = kept;
  for (int step = 0; step < 80; ++step) add(1, false);
  check_rows(side.cache.rollback_limit(1));
  CHECK(kept > before);
  CHECK(side.cache.faults() == 0);
  std::sort(errors_of_full.begin(), errors_of_full.end());
  return static_cast<float>(errors_of_full[errors_of_full.size() / 2]);
}

}  // namespace

TEST_CASE(
    "outliers of joint values are the rows of the largest errors in float64, if those exceed the "
    "threshold, the same in all heads of a group") {
  const auto check = []<class Quantizer>(std::uint64_t seed, OutlierError error, Quantizer) {
    check_chosen<Quantizer>(seed, error, check_chosen<Quantizer>(seed, error, 0.0F));
  };
  check(241, OutlierError::relative, NoQuantizer{});
  check(242, OutlierError::absolute, BlockHadamard{});
  check(243, OutlierError::relative, TransformCode{});
  check(244, OutlierError::absolute, Int8{});
}

}  // namespace latent_errors_tests
