// SPDX-License-Identifier: Apache-2.0
// Saving and loading sequences: a loaded one continues as the original would have, and states that
// do not fit are refused.
#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "lowrankkv/layer_stack.hpp"
#include "lowrankkv/presets.hpp"
#include "support/random_layer.hpp"

using namespace lowrankkv;

namespace {

const CacheShape kShape{4, 2, 32};

std::vector<float> rows(std::mt19937_64& random, int tokens, int heads) {
  std::normal_distribution<float> normal;
  std::vector<float> all(static_cast<std::size_t>(tokens * heads * kShape.head_dim));
  for (float& value : all) value = normal(random);
  return all;
}

LayerBasis basis(std::uint64_t seed) {
  support::Random random(seed);
  return support::random_basis(random, kShape, {.centred = false}, 12, 10);
}

template <class Cache>
void prefill(Cache& cache, SequenceId seq, std::mt19937_64& random, int n) {
  const auto q = rows(random, n, 4), k = rows(random, n, 2), v = rows(random, n, 2);
  cache.create(seq);
  cache.ingest(seq, {k.data(), n, 2, 32}, {v.data(), n, 2, 32}, {q.data(), n, 4, 32});
}

/// The outputs of some decode steps.
template <class Cache>
std::vector<float> decode(Cache& cache, SequenceId seq, std::uint64_t seed, int steps) {
  std::mt19937_64 random(seed);
  std::vector<float> all;
  for (int step = 0; step < steps; ++step) {
    const auto q = rows(random, 1, 4), k = rows(random, 1, 2), v = rows(random, 1, 2);
    cache.append_maintained(seq, {k.data(), 1, 2, 32}, {v.data(), 1, 2, 32});
    std::vector<float> out(4 * 32);
    if (cache.tail_length(seq) == 0) continue;
    cache.attend(seq, {q.data(), 1, 4, 32}, {out.data(), 1, 4, 32});
    all.insert(all.end(), out.begin(), out.end());
  }
  return all;
}

template <class Cache>
std::vector<std::byte> saved(const Cache& cache, SequenceId seq) {
  std::vector<std::byte> bytes(cache.save_bytes(seq));
  CHECK(cache.save(seq, bytes) == bytes.size());
  return bytes;
}

template <class Error, class Function>
std::string raised(Function&& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was raised";
}

/// Makes the checksum of the frame valid again.
void seal(std::vector<std::byte>& bytes) {
  const std::uint64_t sum = checksum(std::span<const std::byte>(bytes).subspan(24));
  std::memcpy(bytes.data() + 16, &sum, sizeof sum);
}

}  // namespace

TEST_CASE_TEMPLATE(
    "a loaded sequence goes on bit for bit, in a cache of other pages and other neighbours", Cache,
    FullKV<>, OjaKV<>, SubSpaceA<>, H2O<>) {
  std::mt19937_64 random(1);
  Cache first({.shape = kShape, .max_sequences = 3, .max_tokens = 600, .flush_interval = 16},
              basis(7));
  prefill(first, 5, random, 200);
  decode(first, 5, 2, 150);
  const std::vector<std::byte> bytes = saved(first, 5);
  Cache second({.shape = kShape,
                .max_sequences = 8,
                .max_tokens = 900,
                .page_bytes = 16384,
                .flush_interval = 16,
                .num_threads = 2},
               basis(7));
  prefill(second, 0, random, 90);
  second.load(5, bytes);
  CHECK(second.num_tokens(5) == first.num_tokens(5));
  CHECK(saved(second, 5) == bytes);
  CHECK(decode(second, 5, 3, 150) == decode(first, 5, 3, 150));
  second.fork(5, 6);
  second.erase(5);
  CHECK(decode(second, 6, 4, 40) == decode(first, 5, 4, 40));
}

TEST_CASE("a load is refused, and nothing changes, unless everything fits") {
  std::mt19937_64 random(2);
  StaticPCAHybrid<> cache({.shape = kShape, .max_sequences = 3, .max_tokens = 300}, basis(7));
  prefill(cache, 1, random, 250);
  const std::vector<std::byte> bytes = saved(cache, 1);
  using Cache = StaticPCAHybrid<>;
  const auto into = [&](const CacheConfig& config, std::uint64_t seed) {
    Cache other(config, basis(seed));
    other.load(9, bytes);
  };
  CHECK(raised<ShapeError>([&] {
          into({.shape = kShape, .max_tokens = 300}, 8);
        }).starts_with("calibrated maps: cache "));
  CHECK(raised<CapacityError>([&] { into({.shape = kShape, .max_tokens = 200}, 7); }) ==
        "max_tokens: 200, saved sequence has 250");
  CHECK(raised<CapacityError>([&] {
          into({.shape = kShape, .max_tokens = 300, .num_pages = 3}, 7);
        }).starts_with("page pool: "));
  CHECK(raised<ShapeError>([&] {
          into({.shape = kShape, .max_tokens = 300, .full_type = DType::f32}, 7);
        }) == "full_type: cache 0, saved 1");
  FullKV<> full({.shape = kShape, .max_tokens = 300});
  CHECK(raised<ShapeError>([&] { full.load(1, bytes); }) == "compresses: cache 0, saved 1");
  CHECK(raised<SequenceError>([&] { cache.load(1, bytes); }) == "sequence 1 exists already");
  std::vector<std::byte> small(bytes.size() - 1);
  CHECK(raised<CapacityError>([&] { cache.save(1, small); }).starts_with("save: buffer of "));
  std::vector<std::byte> other = bytes;
  other[0] = std::byte{'X'};
  CHECK(raised<FormatError>([&] { cache.load(2, other); }) ==
        "saved state: begins with 'XRKVSEQ4', expected 'LRKVSEQ4'");
  other[0] = std::byte{0};  // a message must not end at a NUL
  other[1] = std::byte{0xfe};
  CHECK(raised<FormatError>([&] { cache.load(2, other); }) ==
        "saved state: begins with '\\x00\\xfeKVSEQ4', expected 'LRKVSEQ4'");
  other = bytes;
  other.back() ^= std::byte{1};
  CHECK(raised<FormatError>([&] { cache.load(2, other); }).starts_with("saved state: checksum "));
  other.pop_back();
  CHECK(raised<FormatError>([&] { cache.load(2, other); }).starts_with("saved state: "));
  CHECK(!cache.contains(2));
  cache.load(2, bytes);
  CHECK(decode(cache, 2, 5, 40) == decode(cache, 1, 5, 40));
}

TEST_CASE("hostile contents under a right checksum are refused or harmless") {
  for (const bool everything : {false, true}) {  // position shifts, residuals, full rows in codes
    std::mt19937_64 random(3);
    CacheConfig config{.shape = kShape,
                       .max_sequences = 2,
                       .max_tokens = 400,
                       .flush_interval = 8,
                       .publish_interval = 30};
    if (everything) {
      config.rope.keys = Rope::pre;
      config.keep_residuals = true;
      config.full_row_bits = 8;
    }
    OjaKV<> cache(config, basis(7));
    prefill(cache, 1, random, 150);
    decode(cache, 1, 6, 120);
    for (int first = 10; everything && first < 250; first += 60)
      cache.shift_positions(1, first, first % 7 - 3);
    const std::vector<std::byte> bytes = saved(cache, 1);
    int refused = 0;
    for (int trial = 0; trial < 3000; ++trial) {
      std::vector<std::byte> other = bytes;
      // Near the front lengths, segments and positions lie close together: aim there as often as
      // anywhere.
      const std::size_t range = trial % 2 == 0 ? other.size() : 2000;
      for (int change = 0; change < 1 + trial % 3; ++change)
        other[24 + random() % (range - 24)] = static_cast<std::byte>(random());
      seal(other);
      try {
        cache.load(2, other);
        decode(cache, 2, 7, 3);
        cache.erase(2);
      } catch (const Error&) {
        ++refused;
        if (cache.contains(2)) cache.erase(2);
      }
    }
    CHECK(refused > 500);
    CHECK(saved(cache, 1) == bytes);
  }
}

TEST_CASE("accumulated scores that are no numbers are refused: rows are ordered by them") {
  std::mt19937_64 random(9);
  const CacheConfig config{.shape = kShape, .max_sequences = 3, .max_tokens = 300};
  H2O<> cache(config);
  prefill(cache, 1, random, 150);
  const std::vector<std::byte> before = saved(cache, 1);
  std::vector<float> ones(static_cast<std::size_t>(kShape.num_kv_heads) * 150, 1.0F);
  cache.accumulate(1, ScoreView(ones.data(), 1, kShape.num_kv_heads, 150));
  const std::vector<std::byte> bytes = saved(cache, 1);
  REQUIRE(bytes.size() == before.size());
  int accumulated_scores = 0;
  for (std::size_t byte = 24; byte + 4 <= bytes.size();
       ++byte) {  // the scores lie where adding one changed four bytes
    float old = 0.0F, now = 0.0F;
    std::memcpy(&old, before.data() + byte, sizeof old);
    std::memcpy(&now, bytes.data() + byte, sizeof now);
    if (now != old + 1.0F || old == now) continue;
    for (const float bad : {std::nanf(""), -1.0F, HUGE_VALF}) {
      std::vector<std::byte> other = bytes;
      std::memcpy(other.data() + byte, &bad, sizeof bad);
      seal(other);
      CHECK(raised<FormatError>([&] {
              cache.load(2, other);
            }).find("at least 0 and finite expected") != std::string::npos);
      CHECK(!cache.contains(2));
    }
    ++accumulated_scores;
    byte += 3;
  }
  CHECK(accumulated_scores > 50);
}

TEST_CASE("a stack loads all layers or none") {
  std::mt19937_64 random(4);
  const CacheConfig config{.shape = kShape, .max_sequences = 3, .max_tokens = 300};
  LayerStack<OjaKV<>> stack(config, {basis(1), basis(2)});
  stack.create(0);
  for (int layer = 0; layer < 2; ++layer) {
    const auto q = rows(random, 120, 4), k = rows(random, 120, 2), v = rows(random, 120, 2);
    stack.layer(layer).ingest(0, {k.data(), 120, 2, 32}, {v.data(), 120, 2, 32},
                              {q.data(), 120, 4, 32});
  }
  std::vector<std::byte> bytes(stack.save_bytes(0));
  CHECK(stack.save(0, bytes) == bytes.size());
  stack.load(1, bytes);
  for (int layer = 0; layer < 2; ++layer)
    CHECK(decode(stack.layer(layer), 1, 8, 20) == decode(stack.layer(layer), 0, 8, 20));
  LayerStack<OjaKV<>> other(config, {basis(1), basis(3)});
  CHECK(raised<ShapeError>([&] { other.load(1, bytes); }).starts_with("calibrated maps: cache "));
  CHECK(!other.layer(0).contains(1));
  CHECK(other.memory().total() == 0);
  LayerStack<OjaKV<>> shallow(config, {basis(1)});
  CHECK(raised<ShapeError>([&] { shallow.load(1, bytes); }) == "num_layers: stack 1, saved 2");
}

TEST_CASE("what a sliding window takes, in memory and saved, does not grow with its life") {
  StreamingLLM<>::PolicySet policies;
  policies.token_policy = {4, 50};
  StreamingLLM<> cache({.shape = {1, 1, 4}, .max_tokens = 100000, .flush_interval = 10}, {},
                       policies);
  cache.create(0);
  std::mt19937_64 random(6);
  std::normal_distribution<float> normal;
  std::size_t bytes = 0, memory = 0;
  for (int token = 1; token <= 100000; ++token) {
    float row[8];
    for (float& value : row) value = normal(random);
    cache.append_maintained(0, {row, 1, 1, 4}, {row + 4, 1, 1, 4});
    if (token % 10000 != 0) continue;
    if (token == 10000) {
      bytes = cache.save_bytes(0);
      memory = cache.memory(0).total();
    }
    // The length of the dropped run is written in at most two bytes more.
    CHECK(cache.save_bytes(0) <= bytes + 2);
    CHECK(cache.memory(0).total() == memory);
  }
}
