// SPDX-License-Identifier: Apache-2.0
// Heavy hitters with joint values, where the heads of a group keep the same rows: plain
// coefficients, codes, STAR-KV with H2O.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/support/heavy_hitter_cases.cuh"

namespace heavy_hitters_joint_values_tests {

using namespace lowrankkv;
using namespace heavy;
using support::message_of;

namespace {

using Tokens = Compose<SinkRecent, HeavyHitters>;
using Joint = CompressedKVCache<Cuda, JointValues, Static, Tokens, NoQuantizer>;
using JointCodes = CompressedKVCache<Cuda, JointValues, Static, Tokens, TransformCode>;
using Star = StarKVH2O<Cuda>;

}  // namespace

TEST_CASE(
    "accumulated scores of rows with joint values are those of float64 attention over what is "
    "stored; the same bits in any batch") {
  Random random(104);
  const int trials = effort() == 0 ? 1 : 6 * effort();
  for (const DType type : {DType::f16, DType::bf16}) {
    const double joint = check_scores<Joint>(random, type, trials),
                 star = check_scores<Star>(random, type, trials);
    MESSAGE("accumulated scores of a step, " << std::string(name_of(type)) << ": joint values "
                                             << joint << ", STAR-KV " << star);
  }
}

TEST_CASE(
    "rows with joint values that prompts and steps keep are those that float64 accumulated scores "
    "choose") {
  Random random(112);
  const int trials = effort() == 0 ? 1 : 6 * effort();
  check_kept<Joint>(random, trials);
  check_kept<JointCodes>(random, trials);
  check_kept<Star>(random, trials);
}

TEST_CASE(
    "rows with joint values whose keys are stored before RoPE: accumulated scores of float64, and "
    "what they keep, stored in any order") {
  Random random(114);
  const int trials = effort() == 0 ? 1 : 4 * effort();
  for (const DType type : {DType::f16, DType::bf16}) {
    if (effort() == 0 && type == DType::bf16) continue;
    const double joint = check_scores<Joint>(random, type, trials, true),
                 star = check_scores<Star>(random, type, trials, true);
    MESSAGE("accumulated scores of a step, unrotated, "
            << std::string(name_of(type)) << ": joint values " << joint << ", STAR-KV " << star);
  }
  check_kept<Star>(random, trials, true);
  if (effort() == 0) return;
  check_kept<Joint>(random, trials, true);
  check_kept<JointCodes>(random, trials, true);
}

TEST_CASE(
    "the same accumulated scores keep the same rows with joint values as on the CPU, and what is "
    "stored of them is the same") {
  Random random(118);
  const int trials = effort() == 0 ? 1 : 8 * effort();
  check_parity<Joint>(random, trials);
  check_parity<JointCodes>(random, trials);
  check_parity<Star>(random, trials);
}

TEST_CASE(
    "forks and loaded copies of heavy hitters with joint values go on as the original, bit for "
    "bit") {
  Random random(124);
  check_copies<JointCodes>(random);
  check_copies<Star>(random);
  if (effort() > 0) check_copies<Joint>(random);
}

TEST_CASE("steps of STAR-KV with H2O in a CUDA graph, maintain between its replays") {
  Random random(131);
  check_replays<Star>(random, true);
  if (effort() > 0) check_replays<Star>(random);
}

TEST_CASE(
    "forks of compressed heavy hitters that are maintained together demand the pages that they "
    "take: with one less nothing changes") {
  Random random(129);
  const CacheConfig config = config_of({2, 2, 64}, 1000, 3, 16);
  const HeavySettings settings{{0.25F, 200, 20}};
  const RandomLayer layer = layer_of<Star>(random, config.shape, settings);
  const auto policies = policies_of<Star>(settings);
  const std::int64_t pages = Star::num_pages(config, layer.basis, policies) /
                             3;  // of one sequence, which never has more than 200 rows a list
  REQUIRE(pages >= 3);
  const std::vector<SequenceId> seqs{1, 2, 3};
  for (const std::int64_t missing : {1, 0}) {
    const auto pool = std::make_shared<gpu::PagePool>(
        Star::page_bytes(config, layer.basis, policies), 3 * pages - missing);
    Side<Star> side(config, layer, settings, pool);
    side.cache.create(1);
    side.ingest(1, random_rows(random, 900, 2, 64, DType::f16),
                random_rows(random, 900, 2, 64, DType::f16),
                random_rows(random, 900, 2, 64, DType::f32));
    CHECK(pool->allocator().num_free() == 2 * pages - missing);
    side.cache.fork(1, 2);
    side.cache.fork(1, 3);
    side.append(seqs, random_rows(random, 3 * 20, 2, 64, DType::f16),
                random_rows(random, 3 * 20, 2, 64, DType::f16));
    std::vector<float> before[2], after[2];
    side.reconstruct(1, before[0], before[1]);
    if (missing > 0) {
      CHECK(message_of([&] { side.cache.maintain(seqs); }) ==
            "page pool: " + std::to_string(2 * pages) + " pages needed, " +
                std::to_string(2 * pages - 1) + " free");
      side.reconstruct(1, after[0], after[1]);
      CHECK(after[0] == before[0]);
      CHECK(after[1] == before[1]);
      continue;
    }
    side.cache.maintain(seqs);
    CHECK(pool->allocator().num_free() == 0);
    for (const SequenceId seq : seqs) CHECK(side.cache.tail_length(seq) == 24);
  }
}

TEST_CASE(
    "tokens that go from among heavy hitters that a fork reads: without pages for a copy nothing "
    "changes") {
  Random random(131);
  const CacheConfig config = config_of({2, 2, 64}, 1000, 2, 16);
  const HeavySettings settings{{0.25F, 200, 20}};
  const RandomLayer layer = layer_of<Star>(random, config.shape, settings);
  const auto policies = policies_of<Star>(settings);
  const std::int64_t pages = Star::num_pages(config, layer.basis, policies) / 2;
  const auto pool =
      std::make_shared<gpu::PagePool>(Star::page_bytes(config, layer.basis, policies), pages);
  Side<Star> side(config, layer, settings, pool);
  side.cache.create(1);
  side.ingest(1, random_rows(random, 900, 2, 64, DType::f16),
              random_rows(random, 900, 2, 64, DType::f16),
              random_rows(random, 900, 2, 64, DType::f32));
  REQUIRE(pool->allocator().num_free() == 0);
  side.cache.fork(1, 2);
  const std::vector<std::byte> before = side.save(2);
  CHECK(message_of([&] { side.cache.truncate(2, 500); }).find(" pages needed, 0 free") !=
        std::string::npos);
  CHECK(message_of([&] { side.cache.check_truncate(2, 500); }).find(" pages needed, 0 free") !=
        std::string::npos);
  CHECK(message_of([&] { side.cache.remove(2, 100, 300); }).find(" pages needed, 0 free") !=
        std::string::npos);
  CHECK(side.save(2) == before);
  CHECK(side.save(1) == before);
  side.cache.erase(1);
  CHECK(side.cache.truncate(2, 500) == TruncateResult::inexact);
  CHECK(side.cache.num_tokens(2) == 500);
}

TEST_CASE(
    "saved compressed heavy hitters: hostile accumulated scores, positions and counts under a "
    "right checksum are refused, or do no harm") {
  Random random(141);
  const CacheConfig config = config_of({4, 2, 64}, 600, 2, 16);
  const HeavySettings settings{{0.25F, 0, 20}, {3, 0}};
  const RandomLayer layer = layer_of<Star>(random, config.shape, settings);
  Side<Star> side(config, layer, settings);
  side.cache.create(1);
  side.prefill(1, random_rows(random, 300, 4, 64, DType::f32),
               random_rows(random, 300, 2, 64, DType::f16),
               random_rows(random, 300, 2, 64, DType::f16));
  Growth(random, config.shape, 20).grow(side, 1);
  const std::vector<std::byte> saved = side.save(1);
  const auto load = [&](const std::vector<std::byte>& bytes) {
    return message_of([&] { side.cache.load(2, support::with_checksum(bytes)); });
  };
  // From the end: accumulated scores of the ring [head, place], of the compressed rows [head, row],
  // their positions.
  const std::size_t ring = static_cast<std::size_t>((side.cache.config().tail_capacity + 31) / 32 *
                                                    32),
                    rows = side.cache.memory(1).position_bytes / 8 - 3,
                    padded = (2 * rows * 4 + 15) / 16 * 16;
  const std::size_t tail_scores = saved.size() - 2 * ring * 4,
                    accumulated_scores = tail_scores - padded,
                    positions = accumulated_scores - padded;
  for (const std::size_t place : {tail_scores + 4, accumulated_scores + 8}) {
    for (const float value : {std::nanf(""), -1.0F}) {
      auto hostile = saved;
      std::memcpy(hostile.data() + place, &value, sizeof value);
      CHECK(load(hostile).find("finite and at least 0 expected") != std::string::npos);
    }
  }
  std::vector<std::int32_t> listed(2 * rows);
  std::memcpy(listed.data(), saved.data() + positions, listed.size() * 4);
  CHECK(!std::is_sorted(listed.begin(),
                        listed.begin() + static_cast<std::ptrdiff_t>(
                                             rows)));  // rows have taken the places of evicted ones
  for (const std::int32_t position : {listed[0], -1, 340}) {
    auto hostile = saved;
    std::memcpy(hostile.data() + positions + 4, &position, sizeof position);
    CHECK(load(hostile).find("the tail begins at") != std::string::npos);
  }
  CHECK(load_hostile(random, side, saved, positions, effort() == 0 ? 40 : 400) > 0);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
}

}  // namespace heavy_hitters_joint_values_tests
