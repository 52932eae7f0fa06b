// SPDX-License-Identifier: Apache-2.0
// Heavy hitters under bases that they move, on the GPU: every head has different rows of every
// epoch, and only the device knows how many.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "cuda/support/certified_sequences.cuh"
#include "cuda/support/heavy_hitter_cases.cuh"

namespace heavy_hitters_moving_bases_tests {

using namespace lowrankkv;
using namespace heavy;

namespace {

using Tokens = Compose<SinkRecent, HeavyHitters>;
using OjaPlain = CompressedKVCache<Cuda, PerHead, Oja, Tokens, NoQuantizer, KeepEpochs<2>>;
using OjaCodes = CompressedKVCache<Cuda, PerHead, Oja, Tokens, TransformCode, KeepEpochs<3>>;
using Directions =
    CompressedKVCache<Cuda, PerHead, FrequentDirections, Tokens, NoQuantizer, RotateNow>;

}  // namespace

TEST_CASE(
    "heavy hitters under bases that they move: the same accumulated scores keep the same rows as "
    "on the CPU, under the same epochs") {
  Random random(211);
  const int trials = effort() == 0 ? 2 : 8 * effort();
  check_parity<OjaPlain>(random, trials);
  check_parity<Directions>(random, trials);
  check_parity<OjaCodes>(random, trials);
}

TEST_CASE(
    "heavy hitters under bases that they move: what prompts and steps keep is what float64 "
    "accumulated scores choose") {
  Random random(213);
  const int trials = effort() == 0 ? 1 : 6 * effort();
  check_kept<OjaPlain>(random, trials);
  check_kept<OjaCodes>(random, trials);
  check_kept<Directions>(random, trials);
  check_kept<OjaCodes>(random, trials, true);
}

TEST_CASE(
    "heavy hitters under bases that they move: accumulated scores are those of float64 attention "
    "over what is stored") {
  Random random(217);
  const int trials = effort() == 0 ? 1 : 6 * effort();
  const double plain = check_scores<OjaPlain>(random, DType::f16, trials),
               codes = check_scores<OjaCodes>(random, DType::f16, trials),
               directions = check_scores<Directions>(random, DType::f16, trials),
               pre_rope = check_scores<Directions>(random, DType::f16, trials, true);
  MESSAGE("accumulated scores of a step: Oja " << plain << ", over codes " << codes
                                               << ", Frequent Directions " << directions
                                               << ", unrotated " << pre_rope);
}

TEST_CASE(
    "heavy hitters under bases that they move: certificates are never violated, and what float64 "
    "says they are") {
  const std::int64_t merges = support::certificates<OjaPlain>(DType::f16, 223) +
                              support::certificates<Directions>(DType::f16, 227);
  CHECK(merges > 0);
  if (effort() > 0) CHECK(support::certificates<OjaCodes>(DType::f16, 229, true) > 0);
}

TEST_CASE(
    "heavy hitters under bases that they move: forks and loaded copies go on as the original, bit "
    "for bit; steps in a CUDA graph") {
  Random random(219);
  check_copies<OjaCodes>(random);
  check_copies<Directions>(random);
  check_replays<OjaCodes>(random);
  if (effort() == 0) return;
  check_copies<OjaPlain>(random);
  check_replays<Directions>(random, true);
}

namespace {

/// More sequences than one launch moves bases of: saved states are those of sequences that are
/// maintained alone.
template <class Cache>
void check_many(Random& random) {
  constexpr int count = 19;
  CacheConfig config = config_of({2, 2, 64}, 200, count, 8);
  config.publish_interval = 6;
  HeavySettings settings{{0.7F, 0, 3}, {2, 0}};
  settings.chunk_length = 8;
  const RandomLayer layer = layer_of<Cache>(random, config.shape, settings);
  Side<Cache> together(config, layer, settings), alone(config, layer, settings);
  std::vector<SequenceId> seqs;
  for (int i = 0; i < count; ++i) seqs.push_back(i + 1);
  for (const SequenceId seq : seqs) {
    together.cache.create(seq);
    alone.cache.create(seq);
  }
  for (int step = 0; step < 8; ++step) {
    const auto key = random_rows(random, 4 * count, 2, 64, DType::f16),
               value = random_rows(random, 4 * count, 2, 64, DType::f16);
    const std::int64_t positions = 4 * (step + 1);
    std::vector<float> accumulated(static_cast<std::size_t>(count * 2 * positions));
    for (float& x : accumulated) x = static_cast<float>(random() % 1000);
    together.append(seqs, key, value);
    together.accumulate(seqs, accumulated, positions);
    together.cache.maintain(seqs);
    for (std::size_t i = 0; i < count; ++i) {
      const std::span one(&seqs[i], 1);
      alone.append(one, part_of(key, i, count), part_of(value, i, count));
      alone.accumulate(one, part_of(accumulated, i, count), positions);
      alone.cache.maintain(one);
    }
  }
  CHECK(together.cache.statistics().publications >= count);
  CHECK(together.cache.statistics().publications == alone.cache.statistics().publications);
  bool same = true;
  for (const SequenceId seq : seqs) same = same && together.save(seq) == alone.save(seq);
  CHECK(same);
}

}  // namespace

TEST_CASE(
    "heavy hitters under bases that they move: prompts of which an updater sees nothing publish "
    "nothing, as on the CPU, in copies too") {
  Random random(239);
  CacheConfig config = config_of({2, 2, 64}, 1500, 3, 8);
  config.publish_interval = 12;
  HeavySettings settings{{0.5F, 0, 3}, {2, 0}};
  settings.form = HeavyForm::oja_codes;
  settings.share = 0.0F;
  const RandomLayer layer = layer_of<OjaCodes>(random, config.shape, settings);
  Side<OjaCodes> side(config, layer, settings);
  const auto cpu = support::make_heavy_side(settings, config, layer.basis);
  const SequenceId copy = 2;
  SequenceId now = 1;
  side.cache.create(now);
  std::int64_t publications = 0;
  const auto check = [&](const char* when, std::int64_t more) {
    CAPTURE(when);
    CHECK(cpu->publications() == publications + more);
    CHECK(side.cache.statistics().publications == cpu->publications());
    publications = cpu->publications();
  };
  const auto prompt = [&] {
    const auto key = random_rows(random, 300, 2, 64, DType::f16),
               value = random_rows(random, 300, 2, 64, DType::f16),
               query = random_rows(random, 300, 2, 64, DType::f32);
    side.ingest(now, key, value, query);
    cpu->ingest(query, key, value);
  };
  const auto steps = [&](int count) {
    for (int step = 0; step < count; ++step) {
      const auto key = random_rows(random, 1, 2, 64, DType::f16),
                 value = random_rows(random, 1, 2, 64, DType::f16);
      side.append(std::span(&now, 1), key, value);
      cpu->append(key, value);
      const std::int64_t tokens = side.cache.num_tokens(now);
      std::vector<float> accumulated(static_cast<std::size_t>(2 * tokens), 0.0F);
      for (int head = 1; head <= 2; ++head)
        accumulated[static_cast<std::size_t>(head * tokens - 1)] = 900.0F;  // so that others go
      side.accumulate(std::span(&now, 1), accumulated, tokens);
      cpu->accumulate(accumulated);
      side.cache.maintain(now);
      cpu->maintain();
    }
  };
  prompt();
  check("a prompt", 0);
  prompt();
  check("another one", 0);
  const auto read =
      [&](const std::vector<std::byte>& saved) {  // rows that were stored since the last
                                                  // publication, and whether bases moved, are saved
        side.cache.erase(now);
        side.cache.load(copy, saved);
        now = copy;
      };
  read(side.save(now));
  prompt();
  check("a prompt for a loaded copy", 0);
  steps(10);
  check("steps", 1);
  prompt();
  check("a prompt for bases that are published", 0);
  steps(64);
  CHECK(cpu->publications() > publications + 1);
  CHECK(side.cache.statistics().publications == cpu->publications());
}

TEST_CASE(
    "heavy hitters under bases that they move: sequences that are maintained with eighteen others "
    "are as those alone, bit for bit") {
  Random random(233);
  check_many<Directions>(random);
  check_many<OjaCodes>(random);
  if (effort() > 0) check_many<OjaPlain>(random);
}

}  // namespace heavy_hitters_moving_bases_tests
