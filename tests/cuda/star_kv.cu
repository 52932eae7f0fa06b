// SPDX-License-Identifier: Apache-2.0
// STAR-KV on the GPU: codes of two scale groups, and joint values, against the CPU backend, against
// a coder in float64, and against float64 attention over what is stored.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "device_cache.cuh"
#include "joint_sequences.cuh"
#include "lowrankkv/quantizer/flat_rotation.hpp"
#include "random_layer.hpp"
#include "star_side.cuh"

namespace star_kv_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too
using support::Answer;
using support::different_rows;
using support::distance;
using support::effort;
using support::furthest;
using support::host;
using support::joint_rows;
using support::message_of;
using support::poisoned;
using support::Random;
using support::StarSettings;
using namespace star;

namespace {

/// What codes of two blocks make of `count` coefficients in float64: rotated, scaled, rounded, and
/// back. Cost: count^2.
void code_f64(const BlockHadamard& policy, std::vector<double>& coefficients) {
  const int count = static_cast<int>(coefficients.size()),
            high = std::min(count, static_cast<int>(std::lround(policy.outlier_share *
                                                                static_cast<float>(count))));
  const auto rotate = [](const double* from, int size, std::vector<double>& to) {
    const std::vector<float> matrix = flat_rotation(size);  // symmetric: its own inverse
    to.assign(static_cast<std::size_t>(size), 0.0);
    for (int i = 0; i < size; ++i) {
      for (int j = 0; j < size; ++j)
        to[static_cast<std::size_t>(i)] +=
            static_cast<double>(matrix[static_cast<std::size_t>(i * size + j)]) * from[j];
    }
  };
  for (const auto& [first, size, bits] :
       {std::tuple{0, high, policy.high_bits}, std::tuple{high, count - high, policy.low_bits}}) {
    if (size == 0) continue;
    std::vector<double> rotated(coefficients.begin() + first, coefficients.begin() + first + size),
        back;
    if (policy.rotate) rotate(coefficients.data() + first, size, rotated);
    double largest = 0.0;
    for (const double x : rotated) largest = std::max(largest, std::abs(x));
    const double wanted = std::min(std::ldexp(largest, 1 - bits), 65504.0);
    float scale = round_to(DType::f16, static_cast<float>(wanted));
    for (int step = 0; static_cast<double>(scale) < wanted; ++step)
      scale = round_to(DType::f16, static_cast<float>(wanted * (1.0 + std::ldexp(1.0 + step, -11)) +
                                                      std::ldexp(1.0, -24)));
    for (double& x : rotated) {
      const double half = std::ldexp(1.0, bits - 1);
      x = scale == 0.0F
              ? 0.0
              : (std::clamp(std::floor(x / static_cast<double>(scale)), -half, half - 1.0) + 0.5) *
                    static_cast<double>(scale);
    }
    if (policy.rotate)
      rotate(rotated.data(), size, back);
    else
      back = rotated;
    std::copy(back.begin(), back.end(), coefficients.begin() + first);
  }
}

/// Values of joint heads as they should be stored, the same.
std::vector<float> joint_f64(const StarSettings& settings, const support::RandomLayer& layer,
                             DType type, const std::vector<float>& rows, std::int64_t first,
                             std::int64_t end) {
  const int dim = layer.shape.head_dim, heads = layer.shape.num_kv_heads,
            members = settings.heads_per_group > 0 ? settings.heads_per_group : heads;
  std::vector<float> result;
  for (const float x : rows) result.push_back(round_to(type, x));
  for (std::int64_t token = first; token < end; ++token) {
    for (int leader = 0; leader < heads; leader += members) {
      const int rank = layer.basis.heads[static_cast<std::size_t>(leader)].value_rank;
      std::vector<double> coefficients(static_cast<std::size_t>(rank), 0.0);
      for (const bool decodes : {false, true}) {
        if (decodes && settings.coded) code_f64(settings.quantizer, coefficients);
        for (double& x : coefficients)
          x = decodes && !settings.coded
                  ? static_cast<double>(round_to(DType::f16, static_cast<float>(x)))
                  : x;
        for (int h = leader; h < leader + members; ++h) {
          const HeadBasis& head = layer.basis.heads[static_cast<std::size_t>(h)];
          float* row = result.data() + (token * heads + h) * dim;
          for (int i = 0; i < dim; ++i) {
            const double mean = head.value_mean.empty()
                                    ? 0.0
                                    : static_cast<double>(
                                          head.value_mean[static_cast<std::size_t>(i)]),
                         own = static_cast<double>(row[i]) - mean;
            const float* map = head.value_down.data() + i * rank;
            double sum = mean;
            for (std::size_t c = 0; c < coefficients.size(); ++c) {
              if (decodes)
                sum += coefficients[c] * static_cast<double>(map[c]);
              else
                coefficients[c] += own * static_cast<double>(map[c]);
            }
            if (decodes) row[i] = static_cast<float>(sum);
          }
        }
      }
    }
  }
  return result;
}

/// Rows [tokens, heads, dim] as they should be stored, those from `first` to `end`; orthonormal
/// bases.
std::vector<float> stored_f64(const StarSettings& settings, const support::RandomLayer& layer,
                              DType type, const std::vector<float>& rows, bool key,
                              std::int64_t first, std::int64_t end) {
  const int dim = layer.shape.head_dim, heads = layer.shape.num_kv_heads;
  std::vector<float> result;
  for (const float x : rows) result.push_back(round_to(type, x));
  for (std::int64_t token = first; token < end; ++token) {
    for (int h = 0; h < heads; ++h) {
      const HeadBasis& head = layer.basis.heads[static_cast<std::size_t>(h)];
      const std::vector<float>&map = key ? head.key_down : head.value_down,
            &mean = key ? head.key_mean : head.value_mean;
      const int rank = key ? head.key_rank : head.value_rank;
      float* row = result.data() + (token * heads + h) * dim;
      const auto mean_at = [&](int i) {
        return mean.empty() ? 0.0 : static_cast<double>(mean[static_cast<std::size_t>(i)]);
      };
      std::vector<double> coefficients(static_cast<std::size_t>(rank), 0.0);
      for (int i = 0; i < dim; ++i) {
        for (int c = 0; c < rank; ++c)
          coefficients[static_cast<std::size_t>(c)] +=
              (static_cast<double>(row[i]) - mean_at(i)) *
              static_cast<double>(map[static_cast<std::size_t>(i * rank + c)]);
      }
      code_f64(settings.quantizer, coefficients);
      for (int i = 0; i < dim; ++i) {
        double sum = mean_at(i);
        for (int c = 0; c < rank; ++c)
          sum += coefficients[static_cast<std::size_t>(c)] *
                 static_cast<double>(map[static_cast<std::size_t>(i * rank + c)]);
        row[i] = static_cast<float>(sum);
      }
    }
  }
  return result;
}

template <class Cache>
double random_sequences(bool outliers, DType type, std::uint64_t seed, int trials) {
  Random random(seed);
  double worst = 0.0;
  for (int trial = 0; trial < trials; ++trial) {
    StarSettings settings = random_settings(random);
    settings.outliers = outliers;
    const CacheConfig config = random_config(random, type);
    const int rank =
        trial == 0 ? 1
                   : 1 + static_cast<int>(random() % static_cast<unsigned>(config.shape.head_dim));
    const support::RandomLayer layer = layer_of(random, config.shape, settings, rank);
    Side<Cache> side(config, layer.basis, settings);
    const std::vector<SequenceId> seqs{1, 2, 3};
    std::vector<std::unique_ptr<support::CpuSide>> cpu;
    CAPTURE(trial);
    CAPTURE(config.shape.head_dim);
    CAPTURE(config.shape.group_size());
    CAPTURE(rank);
    CAPTURE(settings.quantizer.high_bits);
    CAPTURE(settings.quantizer.low_bits);
    CAPTURE(settings.quantizer.outlier_share);
    for (const SequenceId seq : seqs) {
      side.cache.create(seq);
      cpu.push_back(support::make_star_side(settings, config, layer.basis));
      const int lengths[] = {1, 3, 17, 63, 64, 65, 300, 1000, 2100};
      for (int part = 0; part < 1 + static_cast<int>(random() % 2); ++part) {
        const int n = effort() == 0 ? lengths[random() % 7] : lengths[random() % 9];
        const auto key = layer.rows(random, n, true), value = layer.rows(random, n, false);
        side.ingest(seq, key, value);
        cpu.back()->ingest(key, value, {});
      }
    }
    for (int step = 0; step < (effort() == 0 ? 2 : 4); ++step) {
      const int m = 1 + static_cast<int>(random() % static_cast<unsigned>(config.max_query_tokens));
      for (int repeat = 0; repeat < (step == 1 ? 30 : 1); ++repeat) {  // enough to flush
        const auto key = layer.rows(random, 3 * m, true), value = layer.rows(random, 3 * m, false);
        side.append(seqs, key, value);
        for (std::size_t i = 0; i < 3; ++i)
          cpu[i]->append_maintained(third(key, i), third(value, i));
      }
      const int least = std::min(
          {m, side.cache.tail_length(1), side.cache.tail_length(2), side.cache.tail_length(3)});
      if (least == 0) continue;
      const auto query = layer.queries(random, 3 * least);
      const Answer answer = side.attend(seqs, query);
      CHECK(answer == side.attend(seqs, query));  // bit for bit
      for (std::size_t i = 0; i < 3; ++i) {
        const Answer own{third(answer.out, i), third(answer.lse, i)};
        compare(side, seqs[i], *cpu[i], third(query, i), own, worst);
        CHECK(side.attend(std::span(&seqs[i], 1), third(query, i)) == own);  // whatever the batch
      }
      if (step == 2) truncate_one(random, side, seqs, cpu, outliers);
      if (step == 1) remove_middles(side, seqs, cpu, settings.tokens.sinks, outliers);
    }
    CHECK(side.cache.faults() == 0);
    for (const SequenceId seq : seqs) side.cache.erase(seq);
    CHECK(side.cache.memory().total() == 0);
  }
  return worst;
}

}  // namespace

TEST_CASE(
    "random sequences of codes of two scale groups: rows as on the CPU, answers as in float64, the "
    "same in any batch") {
  const int trials = 3 * std::max(1, effort());
  for (const DType type : {DType::f16, DType::bf16}) {
    CAPTURE(std::string(name_of(type)));
    const std::uint64_t seed = type == DType::f16 ? 1 : 2;
    const double alone = random_sequences<Blocks>(false, type, seed, trials),
                 with_outliers = random_sequences<BlocksAndOutliers>(true, type, seed + 10, trials);
    MESSAGE(std::string(name_of(type))
            << ": outputs " << alone << ", with outliers " << with_outliers);
  }
}

TEST_CASE("what is stored is what a coder in float64 stores, whatever the rank and the blocks") {
  Random random(3);
  for (int trial = 0; trial < (effort() == 0 ? 2 : 12 * effort()); ++trial) {
    StarSettings settings = random_settings(random);
    const CacheConfig config = [&] {
      CacheConfig made = random_config(random, DType::f16);
      made.epoch_type = DType::f32;
      return made;
    }();
    const int ranks[] = {1, 2, 5, 31, 32, 33, 47, 64}, rank = ranks[random() % 8];
    const support::RandomLayer layer = layer_of(random, config.shape, settings, rank);
    Side<Blocks> side(config, layer.basis, settings);
    side.cache.create(1);
    const std::int64_t n = 150 + static_cast<std::int64_t>(random() % 100);
    const auto key = layer.rows(random, n, true), value = layer.rows(random, n, false);
    side.ingest(1, key, value);
    std::vector<float> stored_key, stored_value;
    side.reconstruct(1, stored_key, stored_value);
    const std::int64_t first = settings.tokens.sinks, end = side.cache.rollback_limit(1);
    CAPTURE(trial);
    CAPTURE(rank);
    CAPTURE(settings.quantizer.high_bits);
    CAPTURE(settings.quantizer.low_bits);
    CAPTURE(settings.quantizer.outlier_share);
    CHECK(different_rows(stored_key, stored_f64(settings, layer, DType::f16, key, true, first, end),
                         config.shape.head_dim) <= 4);
    CHECK(different_rows(stored_value,
                         stored_f64(settings, layer, DType::f16, value, false, first, end),
                         config.shape.head_dim) <= 4);
  }
}

TEST_CASE("a prompt's queries see exact rows, later ones the stored form") {
  Random random(4);
  for (int trial = 0; trial < (effort() == 0 ? 1 : 4); ++trial) {
    StarSettings settings = random_settings(random);
    CacheConfig config = random_config(random, DType::f16);
    const support::RandomLayer layer = layer_of(random, config.shape, settings, 20 + trial);
    Side<Blocks> side(config, layer.basis, settings);
    side.cache.create(7);
    const std::int64_t n = 300;
    std::vector<float> exact[2];
    for (int part = 0; part < 2; ++part) {
      auto key = layer.rows(random, n, true), value = layer.rows(random, n, false);
      for (float& x : key) x = round_to(DType::f16, x);
      for (float& x : value) x = round_to(DType::f16, x);
      const auto query = layer.queries(random, n);
      std::vector<float> before_key, before_value;
      if (part == 1) side.reconstruct(7, before_key, before_value);
      const Answer answer = side.prefill(7, query, key, value);
      before_key.insert(before_key.end(), key.begin(), key.end());
      before_value.insert(before_value.end(), value.begin(), value.end());
      std::vector<double> expected, expected_lse;
      support::attend_f64(config.shape, config.scale(), before_key, before_value, query, expected,
                          expected_lse);
      CHECK(distance(answer.out, expected) < (part == 0 ? 2e-5 : 1e-3));
    }
  }
}

TEST_CASE(
    "a fork and a loaded copy go on as the original, bit for bit; pages are shared, copied, given "
    "back") {
  Random random(5);
  StarSettings settings;
  settings.tokens = {4, 40};
  CacheConfig config;
  config.shape = {8, 2, 64};
  config.max_sequences = 4;
  config.max_tokens = 2000;
  config.flush_interval = 16;
  const support::RandomLayer layer = layer_of(random, config.shape, settings, 45);
  Side<Blocks> side(config, layer.basis, settings);
  const auto free_pages = [&] { return side.cache.pool().allocator().num_free(); };
  const std::int64_t all = free_pages();
  side.cache.create(1);
  side.ingest(1, layer.rows(random, 700, true), layer.rows(random, 700, false));
  const std::int64_t after = free_pages();
  side.cache.fork(1, 2);
  CHECK(free_pages() == after);
  const std::vector<std::byte> saved = side.save(1);
  side.cache.load(3, saved);
  CHECK(side.save(3) == saved);
  std::vector<std::vector<float>> rows;
  for (int i = 0; i < 60; ++i) {
    rows.push_back(layer.rows(random, 2, true));
    rows.push_back(layer.rows(random, 2, false));
  }
  const auto query = layer.queries(random, 1);
  const std::vector<SequenceId> one{1}, two{2}, three{3};
  const Answer before = side.attend(one, query);
  for (const auto* seq : {&two, &three}) {
    CHECK(side.attend(*seq, query) == before);
    for (std::size_t i = 0; i < rows.size(); i += 2) side.append(*seq, rows[i], rows[i + 1]);
    CHECK(side.attend(one, query) == before);  // it is left alone
  }
  for (std::size_t i = 0; i < rows.size(); i += 2) side.append(one, rows[i], rows[i + 1]);
  const Answer later = side.attend(one, query);
  CHECK(side.attend(two, query) == later);
  CHECK(side.attend(three, query) == later);
  CHECK(side.save(1) == side.save(2));
  CHECK(side.cache.truncate(2, 300) == TruncateResult::inexact);
  side.append(two, rows[0], rows[1]);
  CHECK(side.attend(one, query) == later);
  CHECK(side.cache.memory(1).coefficient_bytes > 0);
  for (const SequenceId seq : {1, 2, 3}) side.cache.erase(seq);
  CHECK(free_pages() == all);
}

TEST_CASE("errors of blocks name both values and leave a cache as it was") {
  Random random(6);
  StarSettings settings;
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.max_tokens = 500;
  const support::RandomLayer layer = layer_of(random, config.shape, settings, 40);
  const auto message = [&](BlockHadamard quantizer) {
    StarSettings wrong = settings;
    wrong.quantizer = quantizer;
    return message_of([&] { Side<Blocks>(config, layer.basis, wrong); });
  };
  CHECK(message({0.2F, 9, 3, true}) == "BlockHadamard: bits are 2 to 8, given 9");
  CHECK(message({1.2F, 4, 3, true}).find("outlier_share is in [0, 1], given 1.2") !=
        std::string::npos);
  Side<Blocks> side(config, layer.basis, settings);
  side.cache.create(1);
  side.ingest(1, layer.rows(random, 200, true), layer.rows(random, 200, false));
  const std::vector<std::byte> saved = side.save(1);
  StarSettings other = settings;
  other.quantizer.low_bits = 2;
  Side<Blocks> narrow(config, layer.basis, other);
  CHECK(message_of([&] { narrow.cache.load(1, saved); }).find("key_units: cache 2, saved 3") !=
        std::string::npos);
  CHECK_FALSE(narrow.cache.contains(1));
  // The same widths, another block to which they belong.
  StarSettings wider = settings;
  wider.quantizer.outlier_share = 0.25F;
  Side<Blocks> apart(config, layer.basis, wider);
  CHECK(message_of([&] { apart.cache.load(1, saved); }).find("calibrated maps") !=
        std::string::npos);
  CHECK(side.save(1) == saved);
}

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
    CHECK(side.attend(one, query) == before);  // it is left alone
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

TEST_CASE(
    "joint values of the rows that scores keep: heads of a group keep the same, as on the CPU; "
    "copies go on as the original") {
  Random random(31);
  for (int trial = 0; trial < (effort() == 0 ? 2 : 6 * effort()); ++trial) {
    StarSettings settings = random_settings(random);
    settings.scored = settings.joint = true;
    settings.scores = {0.3F, random() % 2 == 0 ? 90 : 0, 16, 1 + 2 * static_cast<int>(random() % 3),
                       Pooling::average};
    CacheConfig config = random_config(random, trial % 2 == 0 ? DType::f16 : DType::bf16);
    config.shape = {8, 4, trial % 3 == 0 ? 128 : 64};
    settings.heads_per_group = trial % 2 == 0 ? 2 : 0;
    config.epoch_type = DType::f32;
    CAPTURE(trial);
    const support::RandomLayer layer = joint_layer(random, config.shape, settings, 30, 90);
    Side<Scored> side(config, layer.basis, settings), other(config, layer.basis, settings);
    const auto cpu = support::make_star_side(settings, config, layer.basis);
    const SequenceId one = 1, two = 2;
    side.cache.create(1);
    const std::int64_t n = 300 + static_cast<std::int64_t>(random() % 300);
    const auto key = layer.rows(random, n, true), value = joint_rows(random, layer, n, false);
    auto window = layer.queries(random, 16);
    for (float& x : window) x = round_to(config.full_type, x);
    side.ingest(1, key, value, window);
    cpu->ingest(key, value, window);
    std::vector<RowState> states(static_cast<std::size_t>(n)), of_leader(states);
    int dropped = 0, apart = 0;
    for (int head = 0; head < config.shape.num_kv_heads; ++head) {
      side.cache.row_states(1, head, 0, states);
      if (settings.heads_per_group == 0 ? head == 0 : head % settings.heads_per_group == 0) {
        apart += head > 0 && states != of_leader ? 1 : 0;
        of_leader = states;
      }
      CHECK(states == of_leader);
      dropped += static_cast<int>(std::count(states.begin(), states.end(), RowState::dropped));
    }
    CHECK(dropped > 0);
    if (settings.heads_per_group != 0) CHECK(apart > 0);
    const auto check = [&](SequenceId seq, const Answer& answer, const std::vector<float>& query,
                           bool against_cpu) {
      std::vector<float> stored_key, stored_value, cpu_key, cpu_value;
      side.reconstruct(seq, stored_key, stored_value);
      cpu->reconstruct(cpu_key, cpu_value);
      if (against_cpu) {  // of rows whose scores are almost equal one may stay here and the other
                          // there
        CHECK(different_rows(stored_key, cpu_key, config.shape.head_dim) <=
              2 + stored_key.size() / static_cast<std::size_t>(config.shape.head_dim) / 100);
        CHECK(different_rows(stored_value, cpu_value, config.shape.head_dim) <=
              2 + stored_key.size() / static_cast<std::size_t>(config.shape.head_dim) / 50);
      }
      std::vector<double> expected, lse;
      support::attend_f64(config.shape, config.scale(), stored_key, stored_value, query, expected,
                          lse, true);
      CHECK(distance(answer.out, expected) < 1e-3);
      CHECK(furthest(answer.lse, lse) <
            1e-3 * std::max(1.0, furthest(lse, std::vector<double>(lse.size()))));
    };
    for (int step = 0; step < 70; ++step) {
      const auto own_key = layer.rows(random, 1, true),
                 own_value = joint_rows(random, layer, 1, false);
      side.append(std::span(&one, 1), own_key, own_value);
      cpu->append_maintained(own_key, own_value);
    }
    const auto query = layer.queries(random, 1);
    const Answer answer = side.attend(std::span(&one, 1), query);
    check(1, answer, query, true);
    side.cache.fork(1, 2);
    other.cache.create(1);
    other.cache.load(2, side.save(1));
    CHECK(side.attend(std::span(&two, 1), query) == answer);
    CHECK(other.attend(std::span(&two, 1), query) == answer);
    // Heads of a group share latents: a state in which one of them has another token in a row's
    // place is refused.
    const int last_head = config.shape.num_kv_heads - 1;
    std::vector<RowState> all(static_cast<std::size_t>(n + 70));
    side.cache.row_states(2, last_head, 0, all);
    std::vector<std::int32_t> kept;
    for (std::int32_t token = 0; token < static_cast<std::int32_t>(all.size()); ++token) {
      if (all[static_cast<std::size_t>(token)] == RowState::compressed) kept.push_back(token);
    }
    std::vector<std::byte> hostile = side.save(2);
    const auto pattern = std::as_bytes(std::span(kept));
    const auto found =
        std::find_end(hostile.begin(), hostile.end(), pattern.begin(), pattern.end());
    REQUIRE(found != hostile.end());
    std::size_t behind_gap = 1;
    while (kept.at(behind_gap) == kept[behind_gap - 1] + 1) ++behind_gap;
    const std::int32_t moved = kept[behind_gap] - 1;
    std::memcpy(hostile.data() + (found - hostile.begin()) +
                    static_cast<std::ptrdiff_t>(behind_gap * sizeof moved),
                &moved, sizeof moved);
    const std::string unequal =
        message_of([&] { other.cache.load(3, support::with_checksum(hostile)); });
    CHECK(unequal.find("has position " + std::to_string(moved) + " where head ") !=
          std::string::npos);
    CHECK(unequal.find(", whose values are joint with its own, has " + std::to_string(moved + 1)) !=
          std::string::npos);
    CHECK(!other.cache.contains(3));
    // Tokens go that came after the prompt, then of the prompt, where groups kept different
    // numbers: its end, and some of its middle.
    const auto goes_on = [&](int steps) {
      for (int step = 0; step < steps; ++step) {
        const auto own_key = layer.rows(random, 1, true),
                   own_value = joint_rows(random, layer, 1, false);
        side.append(std::span(&one, 1), own_key, own_value);
        cpu->append_maintained(own_key, own_value);
      }
      for (int head = 0; head < config.shape.num_kv_heads; ++head) {
        const int leader = settings.heads_per_group == 0
                               ? 0
                               : head / settings.heads_per_group * settings.heads_per_group;
        std::vector<RowState> own(static_cast<std::size_t>(side.cache.num_tokens(1))),
            first(own.size());
        side.cache.row_states(1, head, 0, own);
        side.cache.row_states(1, leader, 0, first);
        CHECK(own == first);
      }
      check(1, side.attend(std::span(&one, 1), query), query, true);
    };
    side.cache.truncate(1, n + 10);
    cpu->truncate(n + 10);
    goes_on(1);
    side.cache.truncate(1, n / 2);
    cpu->truncate(n / 2);
    goes_on(1);
    goes_on(70);
    side.cache.remove(1, n / 4, n / 8);
    cpu->remove(n / 4, n / 8);
    goes_on(30);
    other.cache.load(4, side.save(1));
    CHECK(other.save(4) == side.save(1));
    const std::vector<SequenceId> four{4};
    CHECK(other.attend(four, query) == side.attend(std::span(&one, 1), query));
    CHECK(side.attend(std::span(&two, 1), query) == answer);
  }
}

}  // namespace star_kv_tests
