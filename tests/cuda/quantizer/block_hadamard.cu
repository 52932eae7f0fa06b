// SPDX-License-Identifier: Apache-2.0
// Codes of two scale groups, against the CPU backend, a coder in float64, and float64 attention
// over what is stored.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cuda/support/coder_f64.cuh"
#include "cuda/support/star_kv.cuh"

namespace block_hadamard_tests {

using namespace lowrankkv;
using support::Answer;
using support::different_rows;
using support::distance;
using support::effort;
using support::message_of;
using support::Random;
using support::StarSettings;
using namespace star;

namespace {

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
        CHECK(side.attend(std::span(&seqs[i], 1), third(query, i)) ==
              own);  // the same in any batch
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
  CHECK(side.cache.memory(1).coefficient_bytes > 0);
  for (const SequenceId seq : {1, 2, 3}) side.cache.erase(seq);
  CHECK(free_pages() == all);
}

TEST_CASE("errors of blocks name both values and leave a cache as it was") {
  Random random(6);
  StarSettings settings;
  settings.quantizer.outlier_share = 0.3F;
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
  // 13 of 40 channels instead of 12 in the first block, in the same units.
  StarSettings wider = settings;
  wider.quantizer.outlier_share = 0.325F;
  Side<Blocks> apart(config, layer.basis, wider);
  CHECK(message_of([&] { apart.cache.load(1, saved); }).find("calibrated maps") !=
        std::string::npos);
  CHECK(side.save(1) == saved);
}

}  // namespace block_hadamard_tests
