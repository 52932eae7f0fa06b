// SPDX-License-Identifier: Apache-2.0
// Merges that take several flushes: none does more than its share, and a sequence that is forked,
// saved or cut meanwhile goes on as the original does. That attention and reconstruct() are right
// at every step is for tests/properties/op_sequences_oja.cpp.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "lowrankkv/presets.hpp"
#include "support/small_cache.hpp"

namespace segments_tests {

using namespace lowrankkv;
using namespace support::small;

namespace {

/// Appends `count` random tokens, one by one, to the sequences `seqs`.
template <class Cache>
void live(Cache& cache, std::vector<SequenceId> seqs, std::uint64_t seed, int count) {
  std::mt19937_64 random(seed);
  const auto k = rows(random, count, 1), v = rows(random, count, 1);
  for (int token = 0; token < count; ++token) {
    for (const SequenceId seq : seqs)
      cache.append_maintained(seq, {k.data() + token * 32, 1, 1, 32},
                              {v.data() + token * 32, 1, 1, 32});
  }
}
template <class Cache>
std::vector<float> contents(const Cache& cache, SequenceId seq) {
  const std::int64_t n = cache.num_tokens(seq);
  std::vector<float> all(static_cast<std::size_t>(2 * 32 * n));
  cache.reconstruct(seq, 0, {all.data(), n, 1, 32}, {all.data() + 32 * n, n, 1, 32});
  return all;
}
template <class Cache>
std::vector<std::byte> saved(const Cache& cache, SequenceId seq) {
  std::vector<std::byte> bytes(cache.save_bytes(seq));
  cache.save(seq, bytes);
  return bytes;
}
CacheConfig config() {
  return {.shape = kShape,
          .max_sequences = 4,
          .max_tokens = 4000,
          .flush_interval = 8,
          .publish_interval = 16,
          .merge_rows = 24};
}
template <class Updater, int epochs>
using Merging = CompressedKVCache<Cpu, PerHead, Updater, SinkRecent, Int8, KeepEpochs<epochs>>;

}  // namespace

TEST_CASE_TEMPLATE("no flush re-projects more than merge_rows rows, and epochs stay few", Cache,
                   Merging<Oja, 1>, Merging<Oja, 2>, Merging<Oja, 5>,
                   Merging<FrequentDirections, 3>) {
  constexpr int most_epochs = std::is_same_v<Cache, Merging<Oja, 1>>   ? 2
                              : std::is_same_v<Cache, Merging<Oja, 2>> ? 3
                              : std::is_same_v<Cache, Merging<Oja, 5>> ? 6
                                                                       : 4;
  CacheConfig settings = config();
  settings.keep_residuals = true;
  Cache cache(settings, basis());
  cache.create(0);
  std::size_t epoch_bytes = 0;
  int unfinished = 0;
  for (int token = 0; token < 3000; ++token) {
    const CacheStatistics before = cache.statistics();
    live(cache, {0}, static_cast<std::uint64_t>(token), 1);
    const CacheStatistics after = cache.statistics();
    if (epoch_bytes == 0) epoch_bytes = cache.memory(0).epoch_bytes;
    REQUIRE(after.rows_reprojected - before.rows_reprojected <=
            24 * (after.flushes - before.flushes));
    REQUIRE(cache.memory(0).epoch_bytes <= most_epochs * epoch_bytes);
    unfinished += after.rows_reprojected > before.rows_reprojected && after.merges == before.merges;
  }
  CHECK(cache.statistics().merges > 3);
  CHECK(unfinished > 20);
  CHECK(cache.statistics().publications > cache.statistics().merges);
}

TEST_CASE("a sequence with a merge in progress is forked, saved, cut, and goes on") {
  using Cache = Merging<Oja, 2>;
  Cache cache(config(), basis());
  cache.create(0);
  live(cache, {0}, 1, 1000);
  int tried = 0;
  for (int round = 0; round < 400 && tried < 12; ++round) {
    const std::int64_t merges = cache.statistics().merges;
    const std::int64_t moved = cache.statistics().rows_reprojected;
    live(cache, {0}, static_cast<std::uint64_t>(100 + round), 8);
    if (cache.statistics().rows_reprojected == moved || cache.statistics().merges != merges)
      continue;
    ++tried;  // rows moved, and the merge is not done
    cache.fork(0, 1);
    cache.load(2, saved(cache, 0));
    cache.fork(0, 3);
    const std::vector<float> before = contents(cache, 0);
    CHECK(contents(cache, 1) == before);
    CHECK(contents(cache, 2) == before);
    live(cache, {1, 2}, 7, 90);
    CHECK(contents(cache, 1) == contents(cache, 2));
    CHECK(saved(cache, 1) == saved(cache, 2));
    CHECK(contents(cache, 0) == before);
    // What is left after a cut is as it was, and goes on.
    cache.remove(3, 40, 100 * tried % 700);
    cache.truncate(3, cache.num_tokens(3) / 2);
    const std::vector<float> cut = contents(cache, 3);
    CHECK(std::equal(cut.begin(), cut.begin() + 40 * 32, before.begin()));
    live(cache, {3}, 8, 200);
    CHECK(cache.num_tokens(3) > 200);
    for (const SequenceId seq : {1, 2, 3}) cache.erase(seq);
  }
  CHECK(tried == 12);
  cache.erase(0);
  CHECK(cache.pool().allocator().num_free() == cache.pool().allocator().num_pages());
}

TEST_CASE("a prompt finishes the merge in progress") {
  using Cache = Merging<Oja, 2>;
  Cache cache(config(), basis());
  cache.create(0);
  std::int64_t moved = 0, merges = 0;
  for (int round = 0; round < 300; ++round) {
    moved = cache.statistics().rows_reprojected;
    merges = cache.statistics().merges;
    live(cache, {0}, static_cast<std::uint64_t>(round), 8);
    if (round > 100 && cache.statistics().rows_reprojected > moved &&
        cache.statistics().merges == merges)
      break;
  }
  moved = cache.statistics().rows_reprojected;
  std::mt19937_64 random(3);
  const std::size_t epochs = cache.memory(0).epoch_bytes;
  ingest(cache, random, 200);
  CHECK(cache.statistics().merges == merges + 2);  // that one, and that of the prompt's own epoch
  CHECK(cache.statistics().rows_reprojected > moved + 24);
  CHECK(cache.memory(0).epoch_bytes < epochs);
}

TEST_CASE("merge_rows is checked") {
  CacheConfig settings = config();
  settings.merge_rows = -1;
  std::string told;
  try {
    OjaKV<> cache(settings, basis());
  } catch (const CapacityError& error) {
    told = error.what();
  }
  CHECK(told == "merge_rows: at least 0, given -1");
}

}  // namespace segments_tests
