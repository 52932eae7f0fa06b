// SPDX-License-Identifier: Apache-2.0
// Caches of pre-RoPE keys: the same attention as over post-RoPE keys, positions that move.
#include <doctest/doctest.h>

#include <Eigen/Dense>
#include <cmath>
#include <limits>
#include <random>
#include <tuple>
#include <vector>

#include "lowrankkv/presets.hpp"
#include "support/rope.hpp"

using namespace lowrankkv;
using support::gaussian_rows;
using support::pre_rope;
using support::rope_variants;
using support::rotate_rows;

namespace {

using Random = std::mt19937_64;

/// Rows as they come, f32, up to 400 tokens.
CacheConfig exact(const CacheShape& shape, const RopeConfig& rope = {}) {
  CacheConfig config;
  config.shape = shape;
  config.full_type = DType::f32;
  config.max_tokens = 400;
  config.rope = rope;
  return config;
}

}  // namespace

TEST_CASE(
    "pre-RoPE keys give what rotated ones give: every variant, prompt and decoding, one token or "
    "several") {
  Random random(1);
  constexpr int dim = 32, n = 150, steps = 12;
  for (const RopeConfig& rope : rope_variants()) {
    for (const int group : {1, 3}) {
      using Cache = CompressedKVCache<Cpu, PerHead, Static, KeepFull, NoQuantizer>;
      Cache rotated(exact({2 * group, 2, dim})), plain(exact({2 * group, 2, dim}, rope));
      const auto q = gaussian_rows(random, (n + steps) * 2 * group * dim),
                 k = gaussian_rows(random, (n + steps) * 2 * dim),
                 v = gaussian_rows(random, (n + steps) * 2 * dim);
      const auto rotated_k = rotate_rows(k, 2, dim, rope);
      std::vector<float> expected(q.size()), found(q.size());
      const QueryView query(q.data(), n + steps, 2 * group, dim);
      const ValueView value(v.data(), n + steps, 2, dim);
      for (auto [cache, keys, out] :
           {std::tuple{&rotated, &rotated_k, &expected}, std::tuple{&plain, &k, &found}}) {
        const KeyView key(keys->data(), n + steps, 2, dim);
        const OutputView output(out->data(), n + steps, 2 * group, dim);
        cache->create(0);
        cache->prefill(0, query.tokens(0, n), key.tokens(0, n), value.tokens(0, n),
                       output.tokens(0, n));
        for (int step = 0; step < steps;) {
          const int count = step < 6 ? 1 : 3;
          cache->append_maintained(0, key.tokens(n + step, count), value.tokens(n + step, count));
          cache->attend(0, query.tokens(n + step, count), output.tokens(n + step, count));
          step += count;
        }
      }
      for (std::size_t i = 0; i < found.size(); ++i)
        REQUIRE(std::abs(found[i] - expected[i]) < 2e-5F);
    }
  }
}

TEST_CASE(
    "groups of one head are folded, one query token or several; larger ones are up-projected: the "
    "same attention") {
  Random random(2);
  constexpr int dim = 40, n = 300;
  for (RopeConfig rope : rope_variants()) {
    rope.frequencies.clear();
    CacheConfig config;
    config.shape = {3, 3, dim};
    config.max_tokens = 400;
    config.rope = rope;
    config.epoch_type = DType::f32;
    LayerBasis basis;
    for (int head = 0; head < 3; ++head) {
      HeadBasis maps;
      maps.key_rank = 7 + head;
      maps.value_rank = 40;
      const Eigen::MatrixXf random_map =
          Eigen::Map<const Eigen::MatrixXf>(gaussian_rows(random, dim * dim).data(), dim, dim);
      const Eigen::MatrixXf columns =
          Eigen::HouseholderQR<Eigen::MatrixXf>(random_map).householderQ();
      maps.key_down = linalg::to_row_major(columns.leftCols(maps.key_rank).cast<double>());
      maps.value_down = linalg::to_row_major(columns.cast<double>());
      maps.key_mean = gaussian_rows(random, dim);
      maps.value_mean = gaussian_rows(random, dim);
      basis.heads.push_back(maps);
    }
    CompressedKVCache<Cpu, PerHead, Static, SinkRecent, NoQuantizer>::PolicySet policies;
    policies.basis.centred = true;
    CompressedKVCache<Cpu, PerHead, Static, SinkRecent, NoQuantizer> cache(config, basis, policies);
    cache.create(0);
    const auto q = gaussian_rows(random, n * 3 * dim), k = gaussian_rows(random, n * 3 * dim),
               v = gaussian_rows(random, n * 3 * dim);
    cache.ingest(0, {k.data(), n, 3, dim}, {v.data(), n, 3, dim});
    cache.shift_positions(0, 100, 1000);
    std::vector<float> alone(3 * dim), together(2 * 3 * dim);
    const QueryView query(q.data(), n, 3, dim);
    cache.attend(0, query.tokens(n - 1, 1), {alone.data(), 1, 3, dim});
    cache.attend(0, query.tokens(n - 2, 2), {together.data(), 2, 3, dim});
    for (std::size_t i = 0; i < alone.size(); ++i)
      REQUIRE(
          alone[i] ==
          together[3 * dim + i]);  // bit for bit: it does not matter how many queries come at once
    // A group of two up-projects keys instead: the same to rounding.
    CacheConfig pairs = config;
    pairs.shape.num_qo_heads = 6;
    CompressedKVCache<Cpu, PerHead, Static, SinkRecent, NoQuantizer> up_projected(pairs, basis,
                                                                                  policies);
    up_projected.create(0);
    up_projected.ingest(0, {k.data(), n, 3, dim}, {v.data(), n, 3, dim});
    up_projected.shift_positions(0, 100, 1000);
    std::vector<float> twice, twice_out(6 * dim);
    for (int head = 0; head < 3; ++head) {
      for (int copy = 0; copy < 2; ++copy)
        twice.insert(twice.end(), q.end() - (3 - head) * dim,
                     head == 2 ? q.end() : q.end() - (2 - head) * dim);
    }
    up_projected.attend(0, {twice.data(), 1, 6, dim}, {twice_out.data(), 1, 6, dim});
    for (int head = 0; head < 3; ++head) {
      for (int i = 0; i < dim; ++i)
        REQUIRE(std::abs(alone[static_cast<std::size_t>(head * dim + i)] -
                         twice_out[static_cast<std::size_t>((2 * head + 1) * dim + i)]) < 3e-5F);
    }
  }
}

TEST_CASE(
    "tokens that move close the gap that dropped ones left: StreamingLLM's positions within the "
    "cache") {
  Random random(3);
  constexpr int dim = 16, n = 200, sinks = 4, recent = 60;
  const CacheConfig config = exact({2, 1, dim}, pre_rope());
  StreamingLLM<>::PolicySet policies;
  policies.token_policy = {sinks, recent};
  StreamingLLM<> cache(config, {}, policies);
  CompressedKVCache<Cpu, PerHead, Static, KeepFull, NoQuantizer> kept_alone(config);
  cache.create(0);
  kept_alone.create(0);
  const auto k = gaussian_rows(random, n * dim), v = gaussian_rows(random, n * dim),
             q = gaussian_rows(random, 2 * dim);
  cache.ingest(0, {k.data(), n, 1, dim}, {v.data(), n, 1, dim});
  std::vector<RowState> states(n);
  cache.row_states(0, 0, 0, states);
  std::vector<float> kept_k, kept_v;
  int dropped = 0;
  for (int token = 0; token < n; ++token) {
    if (states[static_cast<std::size_t>(token)] == RowState::dropped) {
      ++dropped;
      continue;
    }
    kept_k.insert(kept_k.end(), k.begin() + token * dim, k.begin() + (token + 1) * dim);
    kept_v.insert(kept_v.end(), v.begin() + token * dim, v.begin() + (token + 1) * dim);
  }
  REQUIRE(dropped > 50);
  kept_alone.ingest(0, {kept_k.data(), n - dropped, 1, dim}, {kept_v.data(), n - dropped, 1, dim});
  const std::size_t bytes = cache.memory(0).total();
  cache.shift_positions(0, sinks + dropped, -dropped);
  CHECK(cache.memory(0).total() == bytes + 24);
  CHECK(cache.position(0, n) == n - dropped);
  CHECK(cache.position(0, 1) == 1);
  std::vector<float> expected(2 * dim), found(2 * dim);
  kept_alone.attend(0, {q.data(), 1, 2, dim}, {expected.data(), 1, 2, dim});
  cache.attend(0, {q.data(), 1, 2, dim}, {found.data(), 1, 2, dim});
  for (std::size_t i = 0; i < found.size(); ++i) CHECK(std::abs(found[i] - expected[i]) < 1e-5F);
  // Shifted back, nothing is stored of it.
  cache.shift_positions(0, sinks + dropped, dropped);
  CHECK(cache.memory(0).total() == bytes);
}

TEST_CASE("attention depends on differences of positions alone") {
  Random random(4);
  constexpr int dim = 16, n = 90;
  const CacheConfig config = exact({2, 1, dim}, pre_rope());
  CompressedKVCache<Cpu, PerHead, Static, KeepFull, NoQuantizer> cache(config);
  cache.create(0);
  const auto k = gaussian_rows(random, n * dim), v = gaussian_rows(random, n * dim),
             q = gaussian_rows(random, 2 * dim);
  cache.ingest(0, {k.data(), n, 1, dim}, {v.data(), n, 1, dim});
  std::vector<float> before(2 * dim), after(2 * dim);
  const auto here = rotate_rows(q, 2, dim, config.rope, n - 1),
             there = rotate_rows(q, 2, dim, config.rope, n - 1 + 5000);
  cache.attend(0, {here.data(), 1, 2, dim}, {before.data(), 1, 2, dim});
  cache.shift_positions(0, 0, 5000);
  cache.attend(0, {there.data(), 1, 2, dim}, {after.data(), 1, 2, dim});
  for (std::size_t i = 0; i < after.size(); ++i) CHECK(std::abs(after[i] - before[i]) < 3e-5F);
}

TEST_CASE("SnapKV scores pre-RoPE keys at their positions") {
  Random random(5);
  constexpr int dim = 32, n = 200;
  SnapKVOnly<>::PolicySet policies;
  policies.token_policy.get<SnapKV>().keep = 0.3F;
  SnapKVOnly<> rotated(exact({4, 2, dim}), {}, policies),
      plain(exact({4, 2, dim}, pre_rope()), {}, policies);
  const auto q = gaussian_rows(random, n * 4 * dim), k = gaussian_rows(random, n * 2 * dim),
             v = gaussian_rows(random, n * 2 * dim);
  const auto rotated_k = rotate_rows(k, 2, dim, pre_rope());
  std::vector<RowState> expected(n), found(n);
  for (auto [cache, keys, states] :
       {std::tuple{&rotated, &rotated_k, &expected}, std::tuple{&plain, &k, &found}}) {
    cache->create(0);
    cache->ingest(0, {keys->data(), n, 2, dim}, {v.data(), n, 2, dim}, {q.data(), n, 4, dim});
    cache->row_states(0, 1, 0, *states);
  }
  CHECK(found == expected);
}

TEST_CASE("what cannot be rotated or moved is refused, and nothing moves") {
  CacheConfig config;
  config.shape = {2, 1, 16};
  using Cache = CompressedKVCache<Cpu, PerHead, Static, KeepFull, NoQuantizer>;
  {
    Cache cache(config);
    cache.create(0);
    CHECK_THROWS_WITH_AS(cache.shift_positions(0, 0, 3),
                         "shift_positions: keys are stored rotated (Rope::post), Rope::pre is "
                         "needed to move them by 3",
                         StateError);
    CHECK_THROWS_WITH_AS(cache.divide_positions(0, 0, 0, 3),
                         "divide_positions: keys are stored rotated (Rope::post), Rope::pre is "
                         "needed to divide them by 3",
                         StateError);
    CHECK_THROWS_AS(cache.position(0, 1), ShapeError);
  }
  config.rope = pre_rope();
  Cache cache(config);
  cache.create(0);
  CHECK_THROWS_WITH_AS(cache.shift_positions(0, 1, 3),
                       "shift_positions: token 1, sequence has 0 tokens", ShapeError);
  CHECK_THROWS_AS(cache.shift_positions(0, -1, 3), ShapeError);
  CHECK_THROWS_AS(cache.shift_positions(7, 0, 3), SequenceError);
  const std::int64_t limit = std::int64_t{1} << 31;
  cache.shift_positions(0, 0, limit);
  CHECK_THROWS_WITH_AS(cache.shift_positions(0, 0, 1),
                       "shift_positions: by 1 after 2147483648, at most 2147483648 in all",
                       ValueError);
  CHECK_THROWS_AS(cache.shift_positions(0, 0, std::numeric_limits<std::int64_t>::min()),
                  ValueError);
  CHECK(cache.position(0, 0) == limit);
  CHECK_THROWS_WITH_AS(cache.divide_positions(0, 0, 1, 2),
                       "divide_positions: 1 tokens from token 0 on, sequence has 0 tokens",
                       ShapeError);
  CHECK_THROWS_AS(cache.divide_positions(0, 0, -1, 2), ShapeError);
  CHECK_THROWS_WITH_AS(cache.divide_positions(0, 0, 0, 0),
                       "divide_positions: by 0 after 1, 1 to 1048576 in all expected", ValueError);
  const std::vector<float> rows(16 * 4, 1.0F);
  cache.append(0, {rows.data(), 4, 1, 16}, {rows.data(), 4, 1, 16});
  cache.divide_positions(0, 1, 2, 1024);
  CHECK_THROWS_WITH_AS(cache.divide_positions(0, 0, 3, 2048),
                       "divide_positions: by 2048 after 1024, 1 to 1048576 in all expected",
                       ValueError);
  CHECK(cache.position(0, 2) == (limit + 2) / 1024);
  CHECK_THROWS_WITH_AS(
      cache.shift_positions(0, 0, -4194305),
      "shift_positions: by -4294968320 after 2147483648, at most 2147483648 in all", ValueError);
  CHECK(cache.position(0, 4) == limit + 4);
  const auto refused = [&](auto&& change) {
    CacheConfig wrong = config;
    change(wrong.rope);
    CHECK_THROWS_AS(Cache{wrong}, Error);
    wrong.rope.keys = Rope::post;  // not validated for post-RoPE keys
    CHECK_NOTHROW(Cache{wrong});
  };
  refused([](RopeConfig& rope) { rope.theta = 0.0; });
  refused([](RopeConfig& rope) { rope.theta = NAN; });
  refused([](RopeConfig& rope) { rope.rotary_dim = 18; });
  refused([](RopeConfig& rope) { rope.scaling = Llama3RopeScaling{0.0F}; });
  refused([](RopeConfig& rope) { rope.scaling = Llama3RopeScaling{8.0F, 4.0F, 4.0F}; });
  refused([](RopeConfig& rope) { rope.scaling = Llama3RopeScaling{8.0F, NAN}; });
  refused([](RopeConfig& rope) { rope.rotary_dim = 5; });
  refused([](RopeConfig& rope) { rope.frequencies = std::vector<double>(9, 1.0); });
  refused([](RopeConfig& rope) { rope.frequencies = {1.0, NAN}; });
  refused([](RopeConfig& rope) { rope.frequencies = {1.0, 0.5}, rope.rotary_dim = 6; });
}

TEST_CASE(
    "a sequence whose positions were moved is saved and loaded with them, and only by a cache that "
    "turns alike") {
  Random random(7);
  constexpr int dim = 16, n = 100;
  CacheConfig config;
  config.shape = {2, 1, dim};
  config.max_sequences = 2;
  config.rope = pre_rope();
  using Cache = CompressedKVCache<Cpu, PerHead, Static, KeepFull, NoQuantizer>;
  Cache cache(config);
  cache.create(0);
  const auto k = gaussian_rows(random, n * dim), v = gaussian_rows(random, n * dim),
             q = gaussian_rows(random, 2 * dim);
  cache.ingest(0, {k.data(), n, 1, dim}, {v.data(), n, 1, dim});
  cache.shift_positions(0, 20, 7);
  cache.shift_positions(0, 50, -9);
  cache.divide_positions(0, 60, 30, 4);
  std::vector<std::byte> saved(cache.save_bytes(0));
  cache.save(0, saved);
  cache.load(1, saved);
  std::vector<float> one(2 * dim), two(2 * dim);
  cache.attend(0, {q.data(), 1, 2, dim}, {one.data(), 1, 2, dim});
  cache.attend(1, {q.data(), 1, 2, dim}, {two.data(), 1, 2, dim});
  CHECK(one == two);
  CHECK(cache.position(1, 30) == 37);
  CHECK(cache.position(1, n) == n - 2);
  CHECK(cache.position(1, 89) == 21);
  PositionShifts hostile;
  hostile.append({90, 7, 2});
  CHECK_THROWS_WITH_AS(detail::check_saved(hostile),
                       "saved state: positions of tokens to come are divided by 2, 1 expected",
                       FormatError);
  for (const int what : {0, 1, 2}) {
    CacheConfig other = config;
    if (what == 0) other.rope.keys = Rope::post;
    if (what == 1) other.rope.theta = 20000.0;
    if (what == 2) other.rope.pairing = RopePairing::interleaved;
    Cache wrong(other);
    CHECK_THROWS_AS(wrong.load(0, saved), ShapeError);
  }
}
