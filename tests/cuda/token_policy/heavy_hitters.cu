// SPDX-License-Identifier: Apache-2.0
// H2O on the GPU, rows at full rank: accumulated attention scores against float64; the rows they
// keep against the CPU backend and a plain selection; scores in forks, saved states, graphs.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cuda/support/heavy_hitter_cases.cuh"

namespace heavy_hitters_tests {

using namespace lowrankkv;
using namespace heavy;
using support::message_of;

namespace {

using Sinks = CompressedKVCache<Cuda, PerHead, Static, Compose<KeepFull, SinkRecent, HeavyHitters>,
                                NoQuantizer>;

/// A cache that only keeps full rows needs no bases.
RandomLayer no_bases(const CacheConfig& config) { return {{}, config.shape}; }

}  // namespace

TEST_CASE(
    "accumulated scores of a step are those of float64: stored rows in any order, tails, several "
    "query tokens; the same bits in any batch") {
  Random random(3);
  const int trials = effort() == 0 ? 2 : 12 * effort();
  const double f16 = check_scores<H2O<Cuda>>(random, DType::f16, trials),
               bf16 = check_scores<H2O<Cuda>>(random, DType::bf16, trials);
  MESSAGE("accumulated scores of a step: f16 " << f16 << ", bf16 " << bf16);
}

TEST_CASE(
    "what prompts and steps keep is what float64 accumulated scores choose, also on top of stored "
    "rows") {
  Random random(11);
  check_kept<Sinks>(random, effort() == 0 ? 2 : 10 * effort());
}

TEST_CASE(
    "rows whose keys are stored before RoPE: accumulated scores of float64, and what they keep, "
    "stored in any order") {
  Random random(12);
  const int trials = effort() == 0 ? 2 : 8 * effort();
  const double f16 = check_scores<H2O<Cuda>>(random, DType::f16, trials, true),
               bf16 = check_scores<H2O<Cuda>>(random, DType::bf16, trials, true);
  MESSAGE("accumulated scores of a step, unrotated: f16 " << f16 << ", bf16 " << bf16);
  check_kept<Sinks>(random, trials, true);
}

TEST_CASE(
    "the same accumulated scores keep the same rows as on the CPU, ties included; tails are cut, "
    "prompts come in between") {
  Random random(17);
  check_parity<Sinks>(random, effort() == 0 ? 2 : 14 * effort());
}

TEST_CASE(
    "a fork and a loaded copy of an H2O sequence go on as the original, bit for bit, and leave it "
    "alone") {
  Random random(23);
  for (const int bits : {0, 8}) check_copies<Sinks>(random, bits);
}

TEST_CASE(
    "forks of H2O sequences that are maintained together demand the pages that they take: with one "
    "less nothing changes") {
  Random random(29);
  const CacheConfig config = config_of({2, 2, 64}, 1000, 3, 16);
  const HeavySettings settings{{0.25F, 200, 20}};
  const auto policies = policies_of<H2O<Cuda>>(settings);
  const std::int64_t pages = H2O<Cuda>::num_pages(config, {}, policies) / 3;  // of one sequence
  REQUIRE(pages > 3);
  const std::vector<SequenceId> seqs{1, 2, 3};
  for (const std::int64_t missing : {1, 0}) {
    const auto pool = std::make_shared<gpu::PagePool>(H2O<Cuda>::page_bytes(config, {}, policies),
                                                      3 * pages - missing);
    Side<H2O<Cuda>> side(config, no_bases(config), settings, pool);
    side.cache.create(1);
    side.ingest(1, random_rows(random, 500, 2, 64, DType::f16),
                random_rows(random, 500, 2, 64, DType::f16),
                random_rows(random, 500, 2, 64, DType::f32));
    CHECK(pool->allocator().num_free() == 2 * pages - missing);
    side.cache.fork(1, 2);
    side.cache.fork(1, 3);
    const auto key = random_rows(random, 3 * 20, 2, 64, DType::f16),
               value = random_rows(random, 3 * 20, 2, 64, DType::f16);
    side.append(seqs, key, value);
    std::vector<float> before[2], after[2];
    for (const SequenceId seq : seqs) CHECK(side.cache.tail_length(seq) == 40);
    side.reconstruct(1, before[0], before[1]);
    if (missing >
        0) {  // two copies of every page are needed: the last one that writes keeps the original
      CHECK(message_of([&] { side.cache.maintain(seqs); }) ==
            "page pool: " + std::to_string(2 * pages) + " pages needed, " +
                std::to_string(2 * pages - 1) + " free");
      for (const SequenceId seq : seqs) CHECK(side.cache.tail_length(seq) == 40);
      side.reconstruct(1, after[0], after[1]);
      CHECK(after[0] == before[0]);
      CHECK(message_of([&] {
              side.ingest(2, random_rows(random, 30, 2, 64, DType::f16),
                          random_rows(random, 30, 2, 64, DType::f16),
                          random_rows(random, 30, 2, 64, DType::f32));
            }) == "nothing was raised");
      CHECK(pool->allocator().num_free() == pages - 1);
      continue;
    }
    side.cache.maintain(seqs);
    for (const SequenceId seq : seqs) CHECK(side.cache.tail_length(seq) == 24);
    CHECK(pool->allocator().num_free() == 0);
  }
}

TEST_CASE(
    "append, attend with accumulated scores and accumulate in a CUDA graph, maintain between its "
    "replays") {
  Random random(31);
  check_replays<H2O<Cuda>>(random);
}

TEST_CASE(
    "H2O: bad input is refused with both values, and accumulated scores that are not numbers reach "
    "no row") {
  const CacheConfig config = config_of({4, 2, 64}, 300, 2, 16);
  CHECK(message_of([&] {
          Side<H2O<Cuda>>(config, no_bases(config), {{1.5F, 0, 8}});
        }) == "HeavyHitters: keep is in [0, 1], given 1.5");
  CHECK(message_of([&] {
          Side<H2O<Cuda>>(config, no_bases(config), {{0.5F, -1, 8}});
        }) == "HeavyHitters: budget is at least 0, given -1");
  Random random(37);
  Side<H2O<Cuda>> side(config, no_bases(config), {{0.25F, 0, 8}});
  side.cache.create(1);
  side.cache.create(2);
  const auto rows = random_rows(random, 10, 2, 64, DType::f16),
             query = random_rows(random, 10, 4, 64, DType::f32);
  const gpu::DeviceArray<float> k(rows), q(query), out(query.size()), accumulated(2 * 2 * 300);
  CHECK(message_of([&] {
          side.cache.ingest(1, side.keys(k, 10), side.values(k, 10), side.queries(q, 3));
        }) == "q_window: prompt rows are chosen by the attention of 10 queries, given 3");
  CHECK(message_of([&] { side.cache.ingest(1, side.keys(k, 10), side.values(k, 10)); }) ==
        "q_window: prompt rows are chosen by the attention of 10 queries, given 0");
  CHECK(side.cache.num_tokens(1) == 0);
  side.append(std::span<const SequenceId>(std::vector<SequenceId>{1, 2}), rows, rows);
  const auto attend = [&](const ScoreView& view) {
    side.cache.attend(1, side.queries(q, 1), {out.data(), 1, 4, 64}, {}, view);
  };
  CHECK(message_of([&] {
          attend({accumulated.data(), 2, 2, 300});
        }) == "num_sequences: call 1, attention scores 2");
  CHECK(message_of([&] {
          attend({accumulated.data(), 1, 4, 300});
        }) == "num_heads: cache 2, attention scores 4");
  CHECK(message_of([&] {
          attend({accumulated.data(), 1, 2, 4});
        }) == "attention scores: 4 positions, sequence 1 has 5 tokens");
  CHECK(message_of([&] { attend({}); }) == "nothing was raised");
  CHECK(message_of([&] {
          side.cache.accumulate(1, {accumulated.data(), 1, 2, 4});
        }) == "attention scores: 4 positions, sequence 1 has 5 tokens");
  CHECK(message_of([&] {
          side.cache.accumulate(std::vector<SequenceId>{1, 2, 1}, {accumulated.data(), 3, 2, 5});
        }) == "accumulate: sequence 1 stands at place 2 and before");
  CHECK(message_of([&] {
          side.cache.accumulate(std::vector<SequenceId>{1, 7}, {accumulated.data(), 2, 2, 5});
        }) == "unknown sequence 7; 2 sequences exist");
  CHECK(side.cache.faults() == 0);
  const std::vector<std::byte> clean = side.save(1);
  side.accumulate(
      std::vector<SequenceId>{1},
      {std::nanf(""), -1.0F, 2e30F, HUGE_VALF, -HUGE_VALF, 0.0F, 0.0F, 0.0F, 0.0F, -0.0F}, 5);
  CHECK(side.cache.faults() == 5);
  CHECK(side.save(1) == clean);
  // A query that is NaN: so is its output, but no accumulated score becomes NaN.
  auto bad = random_rows(random, 60, 4, 64, DType::f32);
  bad[30 * 4 * 64 + 5] = std::nanf("");
  bad[40 * 4 * 64 + 70] = HUGE_VALF;
  const auto prompt = random_rows(random, 60, 2, 64, DType::f16);
  side.prefill(1, bad, prompt, prompt);
  const std::vector<std::byte> saved = side.save(1);
  side.cache.erase(2);
  side.cache.load(2, saved);  // which refuses scores that are not finite
  CHECK(side.save(2) == saved);
}

TEST_CASE(
    "saved H2O sequences: hostile accumulated scores and positions under a right checksum are "
    "refused, or do no harm") {
  Random random(41);
  const CacheConfig config = config_of({4, 2, 64}, 600, 2, 16);
  Side<Sinks> side(config, no_bases(config), {{0.25F, 0, 20}, {3, 0}});
  side.cache.create(1);
  side.prefill(1, random_rows(random, 300, 4, 64, DType::f32),
               random_rows(random, 300, 2, 64, DType::f16),
               random_rows(random, 300, 2, 64, DType::f16));
  Growth(random, config.shape, 20).grow(side, 1);
  const std::vector<std::byte> saved = side.save(1);
  const auto load = [&](const std::vector<std::byte>& bytes) {
    return message_of([&] { side.cache.load(2, support::with_checksum(bytes)); });
  };
  // From the end: accumulated scores of the ring [head, place], of the full rows [head, row],
  // positions [head, row].
  const std::size_t ring = static_cast<std::size_t>((side.cache.config().tail_capacity + 31) / 32 *
                                                    32),
                    rows = side.cache.memory(1).full_row_bytes / 512,
                    padded = (2 * rows * 4 + 15) / 16 * 16;
  const std::size_t tail_scores = saved.size() - 2 * ring * 4,
                    accumulated_scores = tail_scores - padded,
                    positions = accumulated_scores - padded;
  for (const std::size_t place : {tail_scores + 4, accumulated_scores + 8}) {
    for (const float value : {std::nanf(""), -1.0F, HUGE_VALF}) {
      auto hostile = saved;
      std::memcpy(hostile.data() + place, &value, sizeof value);
      CHECK(load(hostile).find("finite and at least 0 expected") != std::string::npos);
    }
  }
  std::vector<std::int32_t> listed(2 * rows);
  std::memcpy(listed.data(), saved.data() + positions, listed.size() * 4);
  for (std::size_t head = 0; head < 2; ++head) {
    const auto begin = listed.begin() + static_cast<std::ptrdiff_t>(head * rows),
               end = begin + static_cast<std::ptrdiff_t>(rows);
    CHECK(!std::is_sorted(begin, end));  // rows have taken the places of evicted ones
    for (std::int32_t sink = 0; sink < 3; ++sink) CHECK(std::find(begin, end, sink) != end);
  }
  for (const std::int32_t position : {listed[0], -1, 340}) {  // there already, none, in the tail
    auto hostile = saved;
    std::memcpy(hostile.data() + positions + 4, &position, sizeof position);
    CHECK(load(hostile).find("the tail begins at") != std::string::npos);
  }
  CHECK(message_of([&] {
          SnapKVOnly<Cuda>::PolicySet other;
          other.token_policy.get<KeepFull>().recent = 0;
          other.token_policy.get<SnapKV>().window = 20;
          SnapKVOnly<Cuda>(config, {}, other).load(1, saved);
        }) == "accumulated scores of rows: cache 0, saved 1");
  const int loaded = load_hostile(random, side, saved, positions, effort() == 0 ? 60 : 600);
  CHECK(loaded > 0);
  CHECK(loaded < 600);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
}

}  // namespace heavy_hitters_tests
