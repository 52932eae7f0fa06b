// SPDX-License-Identifier: Apache-2.0
// Keys stored before their rotary embedding: angles, equivalence with rotated keys, positions that
// move, statistics.
#include <doctest/doctest.h>

#include <Eigen/Dense>
#include <cmath>
#include <complex>
#include <cstdio>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "lowrankkv/calibrate/bundle.hpp"
#include "lowrankkv/cpu/rotary_table.hpp"
#include "lowrankkv/presets.hpp"

using namespace lowrankkv;

namespace {

using Random = std::mt19937_64;

std::vector<float> random_rows(Random& random, std::int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> rows(static_cast<std::size_t>(count));
  for (float& x : rows) x = normal(random);
  return rows;
}

/// Rows [n, heads, dim] turned to positions first, first + 1, ... by core/rope.hpp's plain
/// function.
std::vector<float> rotate_rows(std::vector<float> rows, int heads, int dim, const RopeConfig& rope,
                               std::int64_t first = 0) {
  const std::vector<double> frequencies = rope_frequencies(rope, dim);
  for (std::size_t row = 0; row < rows.size() / static_cast<std::size_t>(dim); ++row) {
    apply_rope(rows.data() + row * static_cast<std::size_t>(dim), frequencies,
               first + static_cast<std::int64_t>(row) / heads, rope.pairing);
  }
  return rows;
}

RopeConfig unrotated(RopePairing pairing = RopePairing::half_split, double theta = 10000.0) {
  return {.keys = Rope::pre, .pairing = pairing, .theta = theta};
}

/// Rows as they come, f32, up to 400 tokens.
CacheConfig exact(const CacheShape& shape, const RopeConfig& rope = {}) {
  CacheConfig config;
  config.shape = shape;
  config.full_type = DType::f32;
  config.max_tokens = 400;
  config.rope = rope;
  return config;
}

std::vector<RopeConfig> variants() {
  RopeConfig scaled = unrotated(RopePairing::half_split, 500000.0);
  scaled.scaling = Llama3RopeScaling{8.0F, 1.0F, 4.0F, 256.0F};
  RopeConfig partial = unrotated(RopePairing::interleaved);
  partial.rotary_dim = 12;
  RopeConfig given = unrotated();
  for (int pair = 0; pair < 16; ++pair) given.frequencies.push_back(0.5 / (1.0 + pair));
  return {unrotated(), unrotated(RopePairing::interleaved, 1e6), scaled, partial, given};
}

}  // namespace

TEST_CASE("angles of any position to f32 rounding") {
  for (const RopeConfig& rope : variants()) {
    const std::vector<double> frequencies = rope_frequencies(rope, 32);
    const cpu::RotaryTable table(rope, 32);
    REQUIRE(table.num_pairs() == static_cast<int>(frequencies.size()));
    for (const std::int64_t position :
         {std::int64_t{0}, std::int64_t{1}, std::int64_t{63}, std::int64_t{64}, std::int64_t{4095},
          std::int64_t{131071}, std::int64_t{1} << 31, std::int64_t{-7}, std::int64_t{-70000}}) {
      constexpr int count = 150, stride = 160;
      std::vector<float> cosines(frequencies.size() * stride), sines(cosines.size());
      table.angles(position, count, cosines.data(), sines.data(), stride);
      for (std::size_t pair = 0; pair < frequencies.size(); ++pair) {
        for (int token = 0; token < count; ++token) {
          const double angle = frequencies[pair] * static_cast<double>(position + token);
          // f64 itself knows sin(2^31 f) to 2^31 * 2^-53 only.
          REQUIRE(std::abs(static_cast<double>(
                               cosines[pair * stride + static_cast<std::size_t>(token)]) -
                           std::cos(angle)) < 2e-6);
          REQUIRE(
              std::abs(static_cast<double>(sines[pair * stride + static_cast<std::size_t>(token)]) -
                       std::sin(angle)) < 2e-6);
        }
      }
    }
  }
}

TEST_CASE(
    "pre-RoPE keys give what rotated ones give: every variant, prompt and decoding, one token or "
    "several") {
  Random random(1);
  constexpr int dim = 32, n = 150, steps = 12;
  for (const RopeConfig& rope : variants()) {
    for (const int group : {1, 3}) {
      using Cache = CompressedKVCache<Cpu, PerHead, Static, KeepFull, NoQuantizer>;
      Cache rotated(exact({2 * group, 2, dim})), plain(exact({2 * group, 2, dim}, rope));
      const auto q = random_rows(random, (n + steps) * 2 * group * dim),
                 k = random_rows(random, (n + steps) * 2 * dim),
                 v = random_rows(random, (n + steps) * 2 * dim);
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
  for (RopeConfig rope : variants()) {
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
          Eigen::Map<const Eigen::MatrixXf>(random_rows(random, dim * dim).data(), dim, dim);
      const Eigen::MatrixXf columns =
          Eigen::HouseholderQR<Eigen::MatrixXf>(random_map).householderQ();
      maps.key_down = cpu::to_row_major(columns.leftCols(maps.key_rank).cast<double>());
      maps.value_down = cpu::to_row_major(columns.cast<double>());
      maps.key_mean = random_rows(random, dim);
      maps.value_mean = random_rows(random, dim);
      basis.heads.push_back(maps);
    }
    CompressedKVCache<Cpu, PerHead, Static, SinkRecent, NoQuantizer>::PolicySet policies;
    policies.basis.centred = true;
    CompressedKVCache<Cpu, PerHead, Static, SinkRecent, NoQuantizer> cache(config, basis, policies);
    cache.create(0);
    const auto q = random_rows(random, n * 3 * dim), k = random_rows(random, n * 3 * dim),
               v = random_rows(random, n * 3 * dim);
    cache.ingest(0, {k.data(), n, 3, dim}, {v.data(), n, 3, dim});
    cache.shift_positions(0, 100, 1000);
    std::vector<float> alone(3 * dim), together(2 * 3 * dim);
    const QueryView query(q.data(), n, 3, dim);
    cache.attend(0, query.tokens(n - 1, 1), {alone.data(), 1, 3, dim});
    cache.attend(0, query.tokens(n - 2, 2), {together.data(), 2, 3, dim});
    for (std::size_t i = 0; i < alone.size(); ++i)
      REQUIRE(alone[i] == together[3 * dim + i]);  // not a bit: splits leave no trace
    // The lifted form, which a group of two takes, says the same to rounding.
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
  const CacheConfig config = exact({2, 1, dim}, unrotated());
  StreamingLLM<>::PolicySet policies;
  policies.token_policy = {sinks, recent};
  StreamingLLM<> cache(config, {}, policies);
  CompressedKVCache<Cpu, PerHead, Static, KeepFull, NoQuantizer> kept_alone(config);
  cache.create(0);
  kept_alone.create(0);
  const auto k = random_rows(random, n * dim), v = random_rows(random, n * dim),
             q = random_rows(random, 2 * dim);
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
  // Moved back, nothing is left of it.
  cache.shift_positions(0, sinks + dropped, dropped);
  CHECK(cache.memory(0).total() == bytes);
}

TEST_CASE("attention depends on differences of positions alone") {
  Random random(4);
  constexpr int dim = 16, n = 90;
  const CacheConfig config = exact({2, 1, dim}, unrotated());
  CompressedKVCache<Cpu, PerHead, Static, KeepFull, NoQuantizer> cache(config);
  cache.create(0);
  const auto k = random_rows(random, n * dim), v = random_rows(random, n * dim),
             q = random_rows(random, 2 * dim);
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
      plain(exact({4, 2, dim}, unrotated()), {}, policies);
  const auto q = random_rows(random, n * 4 * dim), k = random_rows(random, n * 2 * dim),
             v = random_rows(random, n * 2 * dim);
  const auto rotated_k = rotate_rows(k, 2, dim, unrotated());
  std::vector<RowState> expected(n), found(n);
  for (auto [cache, keys, states] :
       {std::tuple{&rotated, &rotated_k, &expected}, std::tuple{&plain, &k, &found}}) {
    cache->create(0);
    cache->ingest(0, {keys->data(), n, 2, dim}, {v.data(), n, 2, dim}, {q.data(), n, 4, dim});
    cache->row_states(0, 1, 0, *states);
  }
  CHECK(found == expected);
}

TEST_CASE("positions are what was asked for, token by token: sums, and quotients rounded down") {
  Random random(6);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int round = 0; round < 200; ++round) {
    PositionShifts shifts;
    std::vector<std::int64_t> expected(60);
    std::iota(expected.begin(), expected.end(), 0);
    for (int i = 0; i < 10; ++i) {
      const int what = draw(0, 8);
      if (what == 0) {
        const std::size_t length = static_cast<std::size_t>(draw(1, 59));
        shifts.truncate(static_cast<std::int64_t>(length));
        for (std::size_t token = length; token < expected.size(); ++token)
          expected[token] = expected[token - 1] + 1;
        continue;
      }
      if (what == 1) {
        const int count = draw(0, 20), begin = draw(0, 59 - count);
        shifts.remove(begin, count);
        expected.erase(expected.begin() + begin, expected.begin() + begin + count);
        while (expected.size() < 60) expected.push_back(expected.back() + 1);
        continue;
      }
      if (what <= 3) {
        const int count = draw(0, 59), begin = draw(0, 59 - count), divisor = draw(1, 4);
        shifts.divide(begin, count, divisor);
        for (int token = begin; token < begin + count; ++token) {
          std::int64_t& position = expected[static_cast<std::size_t>(token)];
          position = static_cast<std::int64_t>(std::floor(static_cast<double>(position) / divisor));
        }
        continue;
      }
      const int first = draw(0, 59), delta = draw(-3, 3);
      shifts.add(first, delta);
      for (std::size_t token = static_cast<std::size_t>(first); token < expected.size(); ++token)
        expected[token] += delta;
    }
    for (std::size_t token = 0; token < expected.size(); ++token)
      REQUIRE(shifts.position(static_cast<std::int64_t>(token)) == expected[token]);
    REQUIRE(shifts.piece(60).divisor == 1);
    REQUIRE(shifts.bytes() == 24 * shifts.pieces().size());
    PositionShift last;
    for (const PositionShift& piece : shifts.pieces())
      REQUIRE(!std::exchange(last, piece).maps_like(piece));  // as few pieces as can be
    const int first = draw(0, 59), count = draw(0, 60 - first);
    std::int64_t next = first;
    shifts.for_each(first, count,
                    [&](std::int64_t token, std::int64_t length, std::int64_t position) {
                      REQUIRE(token == next);
                      for (std::int64_t i = 0; i < length; ++i)
                        REQUIRE(position + i == expected[static_cast<std::size_t>(token + i)]);
                      next += length;
                    });
    REQUIRE(next == first + count);
  }
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
  config.rope = unrotated();
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
    wrong.rope.keys = Rope::post;  // nobody asks
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
  config.rope = unrotated();
  using Cache = CompressedKVCache<Cpu, PerHead, Static, KeepFull, NoQuantizer>;
  Cache cache(config);
  cache.create(0);
  const auto k = random_rows(random, n * dim), v = random_rows(random, n * dim),
             q = random_rows(random, 2 * dim);
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

TEST_CASE("coding statistics of pre-RoPE keys: every reader rotated back by the token it reads") {
  Random random(8);
  constexpr int dim = 8, n = 400, context = 300, exempt = 10;
  const CacheShape shape{2, 1, dim};
  const RopeConfig rope = unrotated(RopePairing::interleaved, 100.0);
  auto q = random_rows(random, n * 2 * dim), k = random_rows(random, n * dim),
       v = random_rows(random, n * dim);
  for (float& x : q) x *= 2.0F;
  calibrate::CodingStatistics statistics(shape, rope, exempt);
  statistics.add({q.data(), n, 2, dim}, {k.data(), n, 1, dim}, {v.data(), n, 1, dim}, context);
  const auto keys = rotate_rows(k, 1, dim, rope);
  const auto row = [&](const std::vector<float>& all, int token, int heads, int head) {
    return Eigen::VectorXd(
        Eigen::Map<const Eigen::VectorXf>(all.data() + (token * heads + head) * dim, dim)
            .cast<double>());
  };
  Eigen::MatrixXd expected = Eigen::MatrixXd::Zero(dim, dim);
  for (int token = context; token < n; ++token) {
    for (int head = 0; head < 2; ++head) {
      const Eigen::VectorXd query = row(q, token, 2, head) / std::sqrt(static_cast<double>(dim));
      Eigen::VectorXd weights(token + 1), out = Eigen::VectorXd::Zero(dim);
      for (int j = 0; j <= token; ++j) weights[j] = query.dot(row(keys, j, 1, 0));
      weights = (weights.array() - weights.maxCoeff()).exp();
      weights /= weights.sum();
      for (int j = 0; j <= token; ++j) out += weights[j] * row(v, j, 1, 0);
      std::vector<float> back(dim);
      for (int j = exempt; j < context; ++j) {
        Eigen::Map<Eigen::VectorXf>(back.data(), dim) = query.cast<float>();
        const auto rotated_back = rotate_rows(back, 1, dim, rope, -j);
        const Eigen::VectorXd reader = row(rotated_back, 0, 1, 0);
        expected += weights[j] * weights[j] * (row(v, j, 1, 0) - out).squaredNorm() * reader *
                    reader.transpose();
      }
    }
  }
  const Eigen::MatrixXd& found = statistics.head(0).key_metric;
  CHECK(std::abs(found.trace() / expected.trace() - 1.0) <
        1e-4);  // sampling keeps every reader's total
  CHECK((found - expected).norm() < 0.05 * expected.norm());
  // Statistics of rotated keys are something else.
  calibrate::CodingStatistics rotated(shape, {}, exempt);
  rotated.add({q.data(), n, 2, dim}, {keys.data(), n, 1, dim}, {v.data(), n, 1, dim}, context);
  CHECK((rotated.head(0).key_metric - expected).norm() > 0.2 * expected.norm());
  CHECK((rotated.head(0).value_metric - statistics.head(0).value_metric).norm() <
        1e-3 * rotated.head(0).value_metric.norm());
}

TEST_CASE("a calibration bundle knows the form of its keys") {
  const CacheShape shape{2, 1, 8};
  Random random(9);
  const auto q = random_rows(random, 50 * 2 * 8), k = random_rows(random, 50 * 8),
             v = random_rows(random, 50 * 8);
  std::vector<calibrate::LayerMoments> layers(
      2, calibrate::LayerMoments(shape, unrotated(RopePairing::interleaved, 50.0)));
  for (auto& layer : layers)
    layer.add({q.data(), 50, 2, 8}, {k.data(), 50, 1, 8}, {v.data(), 50, 1, 8});
  const char* path = "unrotated_test.safetensors";
  calibrate::save_moments(path, layers);
  const auto loaded = calibrate::load_moments(path, shape, 2);
  CHECK(loaded[1].rope().keys == Rope::pre);
  CHECK(loaded[1].rope().pairing == RopePairing::interleaved);
  CHECK(loaded[1].rope().frequencies == rope_frequencies(layers[0].rope(), 8));
  CHECK(loaded[1].head(0).key.second == layers[1].head(0).key.second);
  std::remove(path);
}

TEST_CASE(
    "queries' moments for pre-RoPE keys are those at all distances, so a fast pair has no "
    "preferred direction") {
  Random random(10);
  constexpr int dim = 4, n = 4000;
  const CacheShape shape{1, 1, dim};
  RopeConfig rope = unrotated();
  rope.frequencies = {
      1.0, 1e-6};  // pairs (0, 2) and (1, 3): one turns with every token, one hardly at all
  std::vector<float> q(n * dim, 0.0F), zero(n * dim, 0.0F);
  for (int token = 0; token < n; ++token)
    q[static_cast<std::size_t>(token * dim)] = q[static_cast<std::size_t>(token * dim + 1)] =
        1.0F;  // always (1, 1, 0, 0) before turning
  const auto rotated_queries = rotate_rows(q, 1, dim, rope);
  calibrate::LayerMoments moments(shape, rope);
  moments.add({rotated_queries.data(), n, 1, dim}, {zero.data(), n, 1, dim},
              {zero.data(), n, 1, dim});
  const Eigen::MatrixXd mean = moments.head(0).query.second / n;
  CHECK(mean(0, 0) == doctest::Approx(0.5).epsilon(0.03));
  CHECK(mean(2, 2) == doctest::Approx(0.5).epsilon(0.03));
  CHECK(std::abs(mean(0, 2)) < 0.02);
  CHECK(mean(1, 1) > 0.99);
  CHECK(mean(3, 3) < 0.01);
}

TEST_CASE("a cache whose rows are not finite certifies nothing, and still loads what it saved") {
  CacheConfig config;
  config.shape = {1, 1, 8};
  config.full_type = DType::f32;
  config.check_finite = false;
  config.keep_residuals = true;
  LayerBasis basis;
  HeadBasis maps;
  maps.key_rank = maps.value_rank = 2;
  maps.key_down.assign(16, 0.0F);
  maps.key_down[0] = maps.key_down[3] = 1.0F;
  maps.value_down = maps.key_down;
  basis.heads.push_back(maps);
  config.max_sequences = 2;
  StaticPCA<> cache(config, basis);
  std::vector<float> rows(100 * 8, 1.0F);
  rows[40] = NAN;
  cache.create(0);
  cache.ingest(0, {rows.data(), 100, 1, 8}, {rows.data(), 100, 1, 8});
  std::vector<std::byte> saved(cache.save_bytes(0));
  cache.save(0, saved);
  cache.load(1, saved);
  std::vector<float> q(8, 1.0F), out(8), lse(1);
  cache.append(0, {q.data(), 1, 1, 8}, {q.data(), 1, 1, 8});
  cache.attend(0, {q.data(), 1, 1, 8}, {out.data(), 1, 1, 8}, {lse.data(), 1, 1});
  std::vector<Certificate> found(1);
  CHECK(cache.certify(0, {q.data(), 1, 1, 8}, {lse.data(), 1, 1}, {found.data(), 1, 1},
                      {1e30F, 3.0F, 1e30F}) == 1);
  CHECK(std::isinf(found[0].output));
}
