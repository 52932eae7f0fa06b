// SPDX-License-Identifier: Apache-2.0
// Heavy hitters with outliers: errors say which of them are full. Accumulated attention scores
// choose among the rows of both lists; how many each list has, only the device knows.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/support/certified_sequences.cuh"
#include "cuda/support/heavy_hitter_cases.cuh"

namespace heavy_hitters_and_outliers_tests {

using namespace lowrankkv;
using namespace heavy;

namespace {

using Tokens = Compose<SinkRecent, ResidualOutliers, HeavyHitters>;
using Plain = CompressedKVCache<Cuda, PerHead, Static, Tokens, NoQuantizer>;
using Codes = CompressedKVCache<Cuda, PerHead, Static, Tokens, TransformCode>;
using JointCodes = CompressedKVCache<Cuda, JointValues, Static, Tokens, TransformCode>;
using OjaPlain = CompressedKVCache<Cuda, PerHead, Oja, Tokens, NoQuantizer, KeepEpochs<2>>;
using Directions =
    CompressedKVCache<Cuda, PerHead, FrequentDirections, Tokens, NoQuantizer, RotateNow>;

}  // namespace

TEST_CASE(
    "heavy hitters with outliers: accumulated scores are those of float64 attention over what is "
    "stored, of full rows and compressed ones; the same bits in any batch") {
  Random random(271);
  const int trials = effort() == 0 ? 1 : 4 * effort();
  check_scores<Plain>(random, DType::f16, trials);
  check_scores<Codes>(random, DType::bf16, trials);
  check_scores<Codes>(random, DType::f16, trials, true);
}

TEST_CASE(
    "heavy hitters with outliers: rows that prompts and steps keep are those that float64 "
    "accumulated scores choose, and some of them are full") {
  Random random(277);
  const int trials = effort() == 0 ? 1 : 4 * effort();
  check_kept<Plain>(random, trials);
  check_kept<JointCodes>(random, trials);
  check_kept<OjaPlain>(random, trials);
  if (effort() > 0) check_kept<Codes>(random, trials, true);
}

TEST_CASE(
    "heavy hitters with outliers: the CPU's rows, as full or compressed as there, after flushes, "
    "prompts, cuts and removals") {
  Random random(281);
  const int trials = effort() == 0 ? 1 : 6 * effort();
  check_parity<Plain>(random, effort() == 0 ? 2 : trials);
  check_parity<Codes>(random, trials);
  check_parity<JointCodes>(random, trials);
  check_parity<OjaPlain>(random, trials);
  check_parity<Directions>(random, effort() == 0 ? 3 : trials);
}

TEST_CASE(
    "heavy hitters with outliers: forks and loaded copies go on as the original, bit for bit; "
    "steps in a CUDA graph, maintain between its replays") {
  Random random(283);
  check_copies<Codes>(random, 8);
  check_copies<Directions>(random);
  check_replays<Codes>(random);
}

TEST_CASE(
    "heavy hitters with outliers: certificates are never violated, of full rows in 8 bits and "
    "where rows go to other epochs too") {
  support::certificates<Codes>(DType::f16, 311, false, 8);
  support::certificates<Directions>(DType::f16, 313);
  if (effort() > 0) support::certificates<OjaPlain>(DType::bf16, 317);
}

TEST_CASE(
    "heavy hitters with outliers: heads have other numbers of full rows, the batch that a sequence "
    "is in does not matter, and pages come back") {
  Random random(293);
  HeavySettings settings{{0.4F, 0, 8}, {3, 0}};
  const CacheConfig config = config_of({4, 2, 64}, 900, 3, 16);
  const RandomLayer layer = layer_of<Plain>(random, config.shape, settings);
  settings.outliers.share = 0.5F;
  settings.outliers.threshold =
      2.0F - static_cast<float>(layer.basis.heads[0].key_rank + layer.basis.heads[0].value_rank) /
                 64.0F;  // about half of the rows lose more
  Side<Plain> together(config, layer, settings), alone(config, layer, settings);
  const std::vector<SequenceId> seqs{1, 2, 3};
  for (const SequenceId seq : seqs) {
    const int prompt = 40 * static_cast<int>(seq);
    const auto key = random_rows(random, prompt, 2, 64, DType::f16),
               value = random_rows(random, prompt, 2, 64, DType::f16),
               query = random_rows(random, prompt, 4, 64, DType::f32);
    for (auto* each : {&together, &alone}) {
      each->cache.create(seq);
      each->prefill(seq, query, key, value);
    }
  }
  bool differ = false;
  for (int step = 0; step < (effort() == 0 ? 60 : 300); ++step) {
    const auto key = random_rows(random, 3, 2, 64, DType::f16),
               value = random_rows(random, 3, 2, 64, DType::f16),
               query = random_rows(random, 3, 4, 64, DType::f32);
    together.append(seqs, key, value);
    const ScoredList all = together.accumulate(seqs, query);
    together.accumulate(seqs, all.accumulated, all.positions);
    together.cache.maintain(seqs);
    for (std::size_t i = 0; i < 3; ++i) {
      const auto one = std::span(&seqs[i], 1);
      alone.append(one, part_of(key, i, 3), part_of(value, i, 3));
      const ScoredList own = alone.accumulate(one, part_of(query, i, 3));
      CHECK(own.out == part_of(all.out, i, 3));
      alone.accumulate(one, own.accumulated, own.positions);
      alone.cache.maintain(one);
      if (step % 20 == 19) CHECK(alone.save(seqs[i]) == together.save(seqs[i]));
      const auto full_of = [&](int head) {
        const std::vector<RowState> states = alone.states(seqs[i], head);
        return std::count(states.begin(), states.end(), RowState::full);
      };
      differ = differ || full_of(0) != full_of(1);
    }
  }
  CHECK(differ);
  CHECK(together.cache.faults() == 0);
  for (const SequenceId seq : seqs) together.cache.erase(seq);
  CHECK(together.cache.memory().total() == 0);
  CHECK(together.cache.pool().allocator().num_free() ==
        together.cache.pool().allocator().num_pages());
}

TEST_CASE(
    "heavy hitters with outliers: saved states of positions that are nobody's, or two lists', are "
    "refused; those that load go on") {
  Random random(307);
  HeavySettings settings{{0.4F, 0, 8}, {3, 0}};
  settings.outliers.share = 0.15F;
  const CacheConfig config = config_of({4, 2, 64}, 900, 2, 16);
  const RandomLayer layer = layer_of<Plain>(random, config.shape, settings);
  Side<Plain> side(config, layer, settings);
  side.cache.create(1);
  side.prefill(1, random_rows(random, 300, 4, 64, DType::f32),
               random_rows(random, 300, 2, 64, DType::f16),
               random_rows(random, 300, 2, 64, DType::f16));
  Growth(random, config.shape, 20).grow(side, 1);
  const std::vector<std::byte> saved = side.save(1);
  const auto load = [&](const std::vector<std::byte>& bytes) {
    return support::message_of([&] { side.cache.load(2, support::with_checksum(bytes)); });
  };
  // From the end: accumulated scores of the ring [head, place], of compressed rows [head, row], of
  // full ones, positions of compressed rows, of full ones.
  std::size_t most[2] = {};
  for (int head = 0; head < 2; ++head) {
    const std::vector<RowState> states = side.states(1, head);
    const auto end = states.begin() + static_cast<std::ptrdiff_t>(side.cache.rollback_limit(1));
    most[0] = std::max(most[0],
                       static_cast<std::size_t>(std::count(states.begin(), end, RowState::full)));
    most[1] = std::max(
        most[1], static_cast<std::size_t>(std::count(states.begin(), end, RowState::compressed)));
  }
  const auto padded = [](std::size_t rows) { return (2 * rows * 4 + 15) / 16 * 16; };
  const std::size_t ring = static_cast<std::size_t>((side.cache.config().tail_capacity + 31) / 32 *
                                                    32),
                    tail_scores = saved.size() - 2 * ring * 4,
                    accumulated_scores = tail_scores - padded(most[1]),
                    full_scores = accumulated_scores - padded(most[0]);
  const std::size_t compressed = full_scores - padded(most[1]), full = compressed - padded(most[0]);
  for (const std::size_t place : {tail_scores + 4, accumulated_scores + 8, full_scores + 4}) {
    auto hostile = saved;
    const float value = -1.0F;
    std::memcpy(hostile.data() + place, &value, sizeof value);
    CHECK(load(hostile).find("finite and at least 0 expected") != std::string::npos);
  }
  auto twice = saved;
  std::memcpy(twice.data() + compressed, saved.data() + full, sizeof(std::int32_t));
  CHECK(load(twice).find("at full rank and compressed, once expected") != std::string::npos);
  CHECK(load_hostile(random, side, saved, full, effort() == 0 ? 40 : 400) > 0);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
}

}  // namespace heavy_hitters_and_outliers_tests
