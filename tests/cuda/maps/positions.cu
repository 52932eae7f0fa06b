// SPDX-License-Identifier: Apache-2.0
// Positions of tokens that are shifted and divided, over pre-RoPE keys: against float64, in forks,
// truncated sequences, saved states and captured steps.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cuda/support/attention_error.cuh"
#include "cuda/support/random_layer.hpp"

namespace positions_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;
using support::Answer;
using support::attention_error;
using support::DeviceCache;
using support::effort;
using support::message_of;
using support::Method;
using support::Random;
using support::Settings;

namespace {

using Codes = CompressedKVCache<Cuda, PerHead, Static, SinkRecent, TransformCode>;
using Moving = CompressedKVCache<Cuda, PerHead, Oja, SinkRecent, NoQuantizer, KeepEpochs<2>>;
using MovingCodes = CompressedKVCache<Cuda, PerHead, Oja, SinkRecent, Int8>;
using Outliers =
    CompressedKVCache<Cuda, PerHead, Static, Compose<SinkRecent, ResidualOutliers>, NoQuantizer>;

CacheConfig random_config(Random& random, DType type) {
  CacheConfig config;
  config.shape = support::random_shape(random, 2, {1, 2, 4, 8}, {64, 80, 96, 128});
  config.max_sequences = 3;
  config.max_tokens = 2500;
  config.full_type = type;
  config.epoch_type = DType::f32;
  config.publish_interval = 40;
  config.rope = support::random_rope(random, config.shape.head_dim);
  return config;
}

template <class Cache>
void moved_tokens(DType type, std::uint64_t seed, double limit, bool moves = false,
                  int most_rows = 500) {
  Random random(seed);
  double worst = 0.0;
  std::int64_t publications = 0;
  for (int trial = 0; trial < (effort() == 0 ? 1 : 8 * effort()); ++trial) {
    const CacheConfig config = random_config(random, type);
    Settings settings;
    settings.sinks = static_cast<int>(random() % 20);
    settings.recent = 1 + static_cast<int>(random() % 40);
    settings.outliers = {OutlierError::relative, 0.05F, 0.0F};
    settings.directions.chunk_length = 60;
    if (moves && (seed + static_cast<std::uint64_t>(trial)) % 2 == 1)
      settings.basis = {KeyMetric::query_aware, ValueMetric::output_aware};
    const support::RandomLayer layer = support::random_layer(
        random, config.shape, settings,
        16 + static_cast<int>(random() % static_cast<unsigned>(config.shape.head_dim - 16)));
    const auto policies = support::configured(typename Cache::PolicySet{}, settings);
    DeviceCache<Cache> device(config, layer.basis, policies), other(config, layer.basis, policies);
    CAPTURE(trial);
    const SequenceId one = 1;
    device.cache.create(1);
    std::vector<PositionShift> said;  // the same shifts in a plain list
    const auto position = [&](std::int64_t token) {
      std::int64_t at = token;
      for (const PositionShift& shift : said) at += token >= shift.first ? shift.offset : 0;
      return at;
    };
    for (int part = 0; part < 4; ++part) {
      const std::int64_t n =
          1 + static_cast<std::int64_t>(random() % static_cast<unsigned>(most_rows));
      device.ingest(1, layer.rows(random, n, true), layer.rows(random, n, false));
      for (int shift = 0; shift < 2; ++shift) {
        const std::int64_t first = static_cast<std::int64_t>(
            random() % static_cast<std::uint64_t>(device.cache.num_tokens(1) + 1));
        const std::int64_t deltas[] = {-3, 40, -700, 5000, 300000};
        said.push_back({first, deltas[random() % 5]});
        device.cache.shift_positions(1, first, said.back().offset);
      }
      const std::int64_t
          tokens = device.cache.num_tokens(1),
          count = std::min<std::int64_t>(
              tokens / 4,
              30);  // tokens are removed from the middle, those behind keep their positions
      if constexpr (!std::is_same_v<Cache, Outliers>) {
        const std::int64_t first = tokens / 3 + settings.sinks;
        if (part > 0 && first + count < tokens) {
          std::vector<std::int64_t> stood;
          for (std::int64_t token = first + count; token <= tokens; ++token)
            stood.push_back(device.cache.position(1, token));
          device.cache.remove(1, first, count);
          for (std::int64_t token = first; token <= tokens - count; ++token)
            CHECK(device.cache.position(1, token) ==
                  stood[static_cast<std::size_t>(token - first)]);
          said = {};
          std::int64_t last = 0;
          for (std::int64_t token = 0; token <= tokens - count; ++token) {
            const std::int64_t offset = device.cache.position(1, token) - token;
            if (offset != last) said.push_back({token, offset - last});
            last = offset;
          }
        }
      }
      device.append(std::span(&one, 1), layer.rows(random, 1, true), layer.rows(random, 1, false));
      for (std::int64_t token = 0; token <= device.cache.num_tokens(1); token += 7)
        CHECK(device.cache.position(1, token) == position(token));
      if (part == 3) {  // several tokens share a position
        const std::int64_t length = device.cache.num_tokens(1), first = length / 5,
                           divided = length / 3 + 1;
        device.cache.divide_positions(1, first, divided, 3);
        for (std::int64_t token = 0; token <= length; token += 5) {
          const bool shares = token >= first && token < first + divided;
          CHECK(device.cache.position(1, token) ==
                (shares ? static_cast<std::int64_t>(
                              std::floor(static_cast<double>(position(token)) / 3.0))
                        : position(token)));
        }
      }
      const auto query = layer.queries(random, 1);
      const Answer answer = device.attend(std::span(&one, 1), query);
      worst = std::max(worst, attention_error(config, device, 1, query, answer));
      CHECK(attention_error(config, device, 1, query, answer) < limit);
    }
    const auto query = layer.queries(random, 1);
    const Answer before = device.attend(std::span(&one, 1), query);
    // A fork diverges; a loaded sequence continues.
    const SequenceId two = 2, three = 3;
    device.cache.fork(1, 2);
    device.cache.shift_positions(2, device.cache.num_tokens(2) / 2, -11);
    const Answer forked = device.attend(std::span(&two, 1), query);
    CHECK(attention_error(config, device, 2, query, forked) < limit);
    CHECK(forked != before);
    CHECK(device.attend(std::span(&one, 1), query) == before);
    other.cache.load(3, device.save(2));
    CHECK(other.attend(std::span(&three, 1), query) == forked);
    CHECK(other.cache.position_shifts(3) == device.cache.position_shifts(2));
    CHECK(other.save(3) == device.save(2));
    // Shifts of truncated tokens are forgotten.
    const std::int64_t length = device.cache.rollback_limit(2) + 1;
    device.cache.shift_positions(2, length, 9);
    device.cache.truncate(2, length);
    device.append(std::span(&two, 1), layer.rows(random, 1, true), layer.rows(random, 1, false));
    CHECK(device.cache.position(2, length) == device.cache.position(2, length - 1) + 1);
    CHECK(attention_error(config, device, 2, query, device.attend(std::span(&two, 1), query)) <
          limit);
    device.cache.erase(2);
    device.cache.create(2);
    CHECK(device.cache.position_shifts(2).pieces().empty());
    device.ingest(2, layer.rows(random, 70, true), layer.rows(random, 70, false));
    device.append(std::span(&two, 1), layer.rows(random, 1, true), layer.rows(random, 1, false));
    CHECK(attention_error(config, device, 2, query, device.attend(std::span(&two, 1), query)) <
          limit);
    publications += device.cache.statistics().publications;
  }
  MESSAGE("moved positions: " << worst << ", publications " << publications);
  CHECK((publications > 0) == moves);
}

}  // namespace

TEST_CASE("tokens that move are attended to where they stand") {
  moved_tokens<FullKV<Cuda>>(DType::f16, 951, 4e-3);
  moved_tokens<FullKV<Cuda>>(DType::bf16, 952, 4e-3);
  moved_tokens<Codes>(DType::f16, 953, 4e-3);
  moved_tokens<Outliers>(DType::f16, 954, 4e-3);
}

TEST_CASE("tokens that move are attended to where they stand, under bases that move") {
  moved_tokens<Moving>(DType::f16, 957, 4e-3, true);
  moved_tokens<Moving>(DType::bf16, 958, 4e-3, true);
  moved_tokens<MovingCodes>(DType::f16, 959, 4e-3, true);
}

TEST_CASE("tokens that move are attended to where they stand, under bases that sketches move") {
  moved_tokens<SubSpaceA<Cuda>>(DType::f16, 961, 4e-3, true, effort() == 0 ? 100 : 500);
}

TEST_CASE("a captured step sees positions that move between replays") {
  Random random(955);
  const CacheConfig config = random_config(random, DType::f16);
  const support::RandomLayer layer = support::random_layer(random, config.shape, {}, 32);
  DeviceCache<Codes> device(config, layer.basis, {});
  const SequenceId one = 1;
  device.cache.create(1);
  device.ingest(1, layer.rows(random, 300, true), layer.rows(random, 300, false));
  const std::size_t row =
      static_cast<std::size_t>(config.shape.num_kv_heads * config.shape.head_dim);
  const auto query = layer.queries(random, 1);
  const gpu::DeviceArray<float> q(query), k(layer.rows(random, 1, true)),
      v(layer.rows(random, 1, false)), out(query.size()),
      lse(static_cast<std::size_t>(config.shape.num_qo_heads));
  REQUIRE(k.size() == row);
  const support::CapturedStep step([&](cudaStream_t stream) {
    device.cache.append(1, device.keys(k, 1), device.values(v, 1), stream);
    device.cache.attend(1, device.queries(q, 1),
                        {out.data(), 1, config.shape.num_qo_heads, config.shape.head_dim},
                        {lse.data(), 1, config.shape.num_qo_heads}, stream);
  });
  for (int replay = 0; replay < 5; ++replay) {
    device.cache.shift_positions(1, 50 * replay, replay % 2 == 0 ? 17 : -30, step.stream);
    step.replay(device.cache, std::span(&one, 1));
    CHECK(attention_error(config, device, 1, query, {support::host(out), support::host(lse)}) <
          4e-3);
  }
}

TEST_CASE("positions that cannot be moved stay") {
  Random random(956);
  CacheConfig config = random_config(random, DType::f16);
  const support::RandomLayer layer = support::random_layer(random, config.shape, {}, 32);
  DeviceCache<FullKV<Cuda>> device(config, {}, {});
  device.cache.create(1);
  device.ingest(1, layer.rows(random, 200, true), layer.rows(random, 200, false));
  const std::int64_t limit = (std::int64_t{1} << 30) - 1 - config.max_tokens;
  CHECK(message_of([&] { device.cache.shift_positions(1, 201, 1); }) ==
        "shift_positions: token 201, sequence has 200 tokens");
  CHECK(message_of([&] { device.cache.shift_positions(1, -1, 1); }) ==
        "shift_positions: token -1, sequence has 200 tokens");
  device.cache.shift_positions(1, 100, limit);
  CHECK(message_of([&] { device.cache.shift_positions(1, 50, 1); }) ==
        "shift_positions: by 1 after " + std::to_string(limit) + ", at most " +
            std::to_string(limit) + " in all");
  CHECK(message_of([&] {
          device.cache.check_shift_positions(1, 0, std::numeric_limits<std::int64_t>::min());
        }).find("shift_positions: by ") == 0);
  CHECK(device.cache.position(1, 50) == 50);
  CHECK(device.cache.position(1, 150) == 150 + limit);
  device.cache.shift_positions(1, 100, -limit);
  for (std::int64_t piece = 0; piece < 32; ++piece)
    device.cache.shift_positions(1, 3 * piece + 1, 1);
  CHECK(message_of([&] { device.cache.shift_positions(1, 199, 1); }) ==
        "shift_positions: positions in 33 pieces, at most 32 on this backend");
  CHECK(device.cache.position_shifts(1).pieces().size() == 32);
  CHECK(message_of([&] { device.cache.divide_positions(1, 198, 1, 2); }) ==
        "divide_positions: positions in 34 pieces, at most 32 on this backend");
  CHECK(message_of([&] { device.cache.divide_positions(1, 100, 101, 2); }) ==
        "divide_positions: 101 tokens from token 100 on, sequence has 200 tokens");
  CHECK(device.cache.memory(1).position_bytes == 32 * 24);
  const auto saved = device.save(1);
  CHECK(message_of([&] { static_cast<void>(device.cache.position(1, 201)); }) ==
        "position: token 201, sequence has 200 tokens");
  // Saved states are checked more strictly. The last piece is token 94, moved by 32.
  const PositionShift piece{94, 32};
  const auto last =
      std::search(saved.begin(), saved.end(), reinterpret_cast<const std::byte*>(&piece),
                  reinterpret_cast<const std::byte*>(&piece) + sizeof piece) -
      saved.begin();
  REQUIRE(last < static_cast<std::ptrdiff_t>(saved.size()));
  const std::ptrdiff_t at = last - 31 * static_cast<std::ptrdiff_t>(sizeof piece);
  const auto with = [&](std::int64_t number, PositionShift other) {
    auto changed = saved;
    std::memcpy(changed.data() + at + number * static_cast<std::int64_t>(sizeof other), &other,
                sizeof other);
    return message_of([&] { device.cache.load(7, support::with_checksum(changed)); });
  };
  CHECK(with(0, {4, 1}) ==
        "saved state: positions move by 2 and are divided by 1 from token 4 on, in a sequence of "
        "200 tokens");
  CHECK(with(0, {-1, 1}) ==
        "saved state: positions move by 1 and are divided by 1 from token -1 on, in a sequence of "
        "200 tokens");
  CHECK(with(31, {201, 1}) ==
        "saved state: positions move by 1 and are divided by 1 from token 201 on, in a sequence of "
        "200 tokens");
  CHECK(with(0, {1, 1, 0}) ==
        "saved state: positions move by 1 and are divided by 0 from token 1 on, in a sequence of "
        "200 tokens");
  CHECK(with(31, {94, 1, 2}) ==
        "saved state: positions of tokens to come are divided by 2, 1 expected");
  CHECK(with(31, {94, limit + 1}) == "positions: moved by " + std::to_string(limit + 1) +
                                         ", at most " + std::to_string(limit) + " expected");
  CHECK(!device.cache.contains(7));
  config.max_tokens = 1000;
  DeviceCache<FullKV<Cuda>> other(config, {}, {});
  other.cache.load(5, saved);
  CHECK(other.cache.position(5, 199) == 199 + 32);
  config.rope = {};
  DeviceCache<FullKV<Cuda>> rotated(config, {}, {});
  rotated.cache.create(1);
  CHECK(message_of([&] { rotated.cache.shift_positions(1, 0, 3); }) ==
        "shift_positions: keys are stored rotated (Rope::post), Rope::pre is needed to move them "
        "by 3");
}

}  // namespace positions_tests
