// SPDX-License-Identifier: Apache-2.0
// Joint values, against the CPU backend, a coder in float64, and float64 attention over what is
// stored.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cuda/support/coder_f64.cuh"
#include "cuda/support/joint_sequences.cuh"
#include "cuda/support/star_kv.cuh"

namespace attend_joint_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too
using support::Answer;
using support::different_rows;
using support::distance;
using support::effort;
using support::host;
using support::joint_rows;
using support::message_of;
using support::poisoned;
using support::Random;
using support::StarSettings;
using namespace star;

TEST_CASE(
    "random sequences of joint values: rows as on the CPU, answers as in float64, the same in any "
    "batch") {
  const int trials = effort() == 0 ? 2 : 4 * effort();
  for (const DType type : {DType::f16, DType::bf16}) {
    CAPTURE(std::string(name_of(type)));
    const std::uint64_t seed = type == DType::f16 ? 31 : 32;
    const double plain = random_joint<Joint>(false, type, seed, trials),
                 coded = random_joint<StarKV<Cuda>>(true, type, seed + 10, trials);
    MESSAGE(std::string(name_of(type))
            << ": outputs, coefficients in f16 " << plain << ", codes " << coded);
  }
}

namespace {

/// A joint cache's stored rows against a coder in float64, its prompts' answers, its copies.
template <class Cache>
void check_joint(bool coded, std::uint64_t seed) {
  Random random(seed);
  StarSettings settings = random_settings(random);
  settings.joint = true;
  settings.coded = coded;
  settings.tokens = {4, 40};
  settings.heads_per_group = 2;
  CacheConfig config;
  config.shape = {8, 4, 64};
  config.max_sequences = 4;
  config.max_tokens = 3000;
  config.flush_interval = 16;
  config.epoch_type = DType::f32;
  const support::RandomLayer layer = joint_layer(random, config.shape, settings, 33, 77);
  Side<Cache> side(config, layer.basis, settings);
  const auto free_pages = [&] { return side.cache.pool().allocator().num_free(); };
  const std::int64_t all = free_pages(), n = 700;
  side.cache.create(1);
  std::vector<float> before_key, before_value;
  for (int part = 0; part < 2; ++part) {  // the second prompt meets the stored form of the first
    auto key = joint_rows(random, layer, n, true), value = joint_rows(random, layer, n, false);
    for (float& x : key) x = round_to(DType::f16, x);
    for (float& x : value) x = round_to(DType::f16, x);
    const auto query = layer.queries(random, n);
    const Answer answer = side.prefill(1, query, key, value);
    const std::int64_t first = static_cast<std::int64_t>(before_key.size()) / (4 * 64);
    before_key.insert(before_key.end(), key.begin(), key.end());
    before_value.insert(before_value.end(), value.begin(), value.end());
    std::vector<double> expected, expected_lse;
    support::attend_f64(config.shape, config.scale(), before_key, before_value, query, expected,
                        expected_lse);
    CHECK(distance(answer.out, expected) < (coded && part == 1 ? 1e-3 : 3e-5));
    const auto stored_key = before_key, stored_value = before_value;
    side.reconstruct(1, before_key, before_value);
    if (part == 1) continue;
    const std::int64_t end = side.cache.rollback_limit(1);
    CHECK(different_rows(before_value,
                         joint_f64(settings, layer, DType::f16, stored_value,
                                   first + settings.tokens.sinks, end),
                         64) <= 30);
    if (coded)
      CHECK(different_rows(before_key,
                           stored_f64(settings, layer, DType::f16, stored_key, true,
                                      settings.tokens.sinks, end),
                           64) <= 30);
  }
  const std::int64_t after = free_pages();
  side.cache.fork(1, 2);
  CHECK(free_pages() == after);
  const std::vector<std::byte> saved = side.save(1);
  side.cache.load(3, saved);
  CHECK(side.save(3) == saved);
  std::vector<std::vector<float>> rows;
  for (int i = 0; i < 60; ++i) {
    rows.push_back(joint_rows(random, layer, 2, true));
    rows.push_back(joint_rows(random, layer, 2, false));
  }
  const auto query = layer.queries(random, 1);
  const std::vector<SequenceId> one{1}, two{2}, three{3};
  const Answer before = side.attend(one, query);
  for (const auto* seq : {&two, &three}) {
    CHECK(side.attend(*seq, query) == before);
    for (std::size_t i = 0; i < rows.size(); i += 2) side.append(*seq, rows[i], rows[i + 1]);
    CHECK(side.attend(one, query) == before);  // the original is unchanged
  }
  for (std::size_t i = 0; i < rows.size(); i += 2) side.append(one, rows[i], rows[i + 1]);
  const Answer later = side.attend(one, query);
  CHECK(side.attend(two, query) == later);
  CHECK(side.attend(three, query) == later);
  CHECK(side.save(1) == side.save(2));
  CHECK(side.cache.truncate(2, 300) == TruncateResult::inexact);
  side.append(two, rows[0], rows[1]);
  CHECK(side.attend(one, query) == later);
  // Parts of attention: those of a cache that has nothing else, merged, are the whole.
  const gpu::DeviceArray<float> q(query);
  const auto values = poisoned(query.size()), maximum = poisoned(8), sum = poisoned(8);
  side.cache.attend_partial(one, side.queries(q, 1),
                            {values.data(), maximum.data(), sum.data(), 1, 8, 64},
                            gpu::QueryTokens::own);
  const std::vector<float> own = host(values), sums = host(sum);
  std::vector<double> whole;
  for (std::size_t i = 0; i < own.size(); ++i)
    whole.push_back(static_cast<double>(own[i]) / static_cast<double>(sums[i / 64]));
  CHECK(distance(later.out, whole) < 1e-6);
  for (const SequenceId seq : {1, 2, 3}) side.cache.erase(seq);
  CHECK(free_pages() == all);
}

/// Attention of one query over rows of joint values, as float64 makes it of the rows that are
/// stored.
template <class Cache>
void check_joint_attention(const CacheConfig& config, const support::RandomLayer& layer,
                           const StarSettings& settings, const std::vector<float>& keys,
                           const std::vector<float>& values, const std::vector<float>& query,
                           double limit) {
  Side<Cache> side(config, layer.basis, settings);
  side.cache.create(1);
  side.ingest(1, keys, values);
  const SequenceId one = 1;
  const Answer answer = side.attend(std::span(&one, 1), query);
  std::vector<float> key, value;
  side.reconstruct(1, key, value);
  std::vector<double> expected, expected_lse;
  support::attend_f64(config.shape, config.scale(), key, value, query, expected, expected_lse);
  CHECK(distance(answer.out, expected) < limit);
}

}  // namespace

TEST_CASE(
    "joint values: stored as in float64, prompts exact over the stored form, copies that go on as "
    "the original") {
  check_joint<Joint>(false, 51);
  check_joint<StarKV<Cuda>>(true, 52);
  if (effort() > 0) check_joint<StarKV<Cuda>>(true, 53);
}

TEST_CASE(
    "joint values of 32 heads of their own queries in a latent of 1024: attention is that of "
    "float64, also where shared memory holds the tiles of 64 rows but once") {
  if (effort() == 0) return;
  Random random(81);
  StarSettings settings;
  settings.joint = true;
  CacheConfig config;
  config.shape = {32, 32, 64};
  config.max_tokens = 400;
  for (const int rank : {32, 60}) {
    CAPTURE(rank);
    const support::RandomLayer layer = joint_layer(random, config.shape, settings, rank, 1024);
    const auto keys = joint_rows(random, layer, 300, true),
               values = joint_rows(random, layer, 300, false), query = layer.queries(random, 1);
    check_joint_attention<Joint>(config, layer, settings, keys, values, query, 3e-5);
    check_joint_attention<StarKV<Cuda>>(config, layer, settings, keys, values, query, 1e-3);
  }
}

TEST_CASE("joint values of as many splits as there can be: attention is that of float64") {
  if (effort() == 0) return;
  Random random(82);
  StarSettings settings;
  settings.joint = true;
  CacheConfig config;
  config.shape = {4, 2, 64};
  const int tokens = gpu::kMaxJointSplits * gpu::kJointSplitRows + 700;
  config.max_tokens = tokens + 64;
  const support::RandomLayer layer = joint_layer(random, config.shape, settings, 24, 70);
  const auto keys = joint_rows(random, layer, tokens, true),
             values = joint_rows(random, layer, tokens, false), query = layer.queries(random, 1);
  check_joint_attention<Joint>(config, layer, settings, keys, values, query, 3e-5);
  check_joint_attention<StarKV<Cuda>>(config, layer, settings, keys, values, query, 1e-3);
}

TEST_CASE(
    "joint values: a captured step replayed between calls that compress is what the same calls "
    "make") {
  StarSettings settings;
  settings.joint = true;
  check_captured_joint_steps<StarKV<Cuda>>(71, settings, 60);
}

TEST_CASE("errors of joint values name both values") {
  Random random(61);
  StarSettings settings;
  settings.joint = true;
  CacheConfig config;
  config.shape = {4, 4, 64};
  config.max_tokens = 500;
  settings.heads_per_group = 3;
  const support::RandomLayer layer = joint_layer(random, config.shape, StarSettings{}, 40, 50);
  CHECK(message_of([&] { Side<Joint>(config, layer.basis, settings); }) ==
        "JointValues: heads_per_group 3, num_kv_heads 4");
  settings.heads_per_group = 0;
  support::RandomLayer uneven = layer;
  uneven.basis.heads[1].value_rank = 49;
  CHECK(message_of([&] { Side<Joint>(config, uneven.basis, settings); }) ==
        "value_rank: group 50, head 49");
  Side<Joint> side(config, layer.basis, settings);
  side.cache.create(1);
  side.ingest(1, joint_rows(random, layer, 200, true), joint_rows(random, layer, 200, false));
  const std::vector<std::byte> saved = side.save(1);
  StarSettings pairs = settings;
  pairs.heads_per_group = 2;
  const support::RandomLayer other = joint_layer(random, config.shape, pairs, 40, 50);
  Side<Joint> apart(config, other.basis, pairs);
  CHECK(message_of([&] { apart.cache.load(1, saved); }).find("cache ") != std::string::npos);
  CHECK_FALSE(apart.cache.contains(1));
  CacheConfig small = config;
  small.page_bytes = 256;
  CHECK(message_of([&] {
          Side<Joint>(small, layer.basis, settings);
        }).find("page_bytes: a tile needs ") != std::string::npos);
}

}  // namespace attend_joint_tests
