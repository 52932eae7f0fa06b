// SPDX-License-Identifier: Apache-2.0
// Bases that move over codes of principal axes: aligned with the axes of the rows written under
// them, as on the CPU.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/support/device_cache.cuh"
#include "cuda/support/random_layer.hpp"

namespace align_axes_tests {

using namespace lowrankkv;
using support::Answer;
using support::effort;
using support::Method;
using support::Random;

namespace {

using OjaCodes = CompressedKVCache<Cuda, PerHead, Oja, Compose<SinkRecent, ResidualOutliers>,
                                   TransformCode, KeepEpochs<2>>;
using OjaBlocks = CompressedKVCache<Cuda, PerHead, Oja, SinkRecent, BlockHadamard, RotateNow>;
using DirectionsCodes =
    CompressedKVCache<Cuda, PerHead, FrequentDirections, SinkRecent, TransformCode, KeepEpochs<3>>;

/// Mean squares of what is lost, of keys and of values, of rows [first, end), and of those rows.
struct Loss {
  double lost[2] = {}, whole[2] = {};
  double share(int part) const { return lost[part] / whole[part]; }
};
Loss loss_of(const CacheShape& shape, const std::vector<float> (&exact)[2],
             const std::vector<float> (&stored)[2], std::int64_t first, std::int64_t end) {
  Loss loss;
  const std::int64_t width = shape.num_kv_heads * shape.head_dim;
  for (int part = 0; part < 2; ++part) {
    for (std::int64_t i = first * width; i < end * width; ++i) {
      const double x = static_cast<double>(exact[part][static_cast<std::size_t>(i)]),
                   away = x - static_cast<double>(stored[part][static_cast<std::size_t>(i)]);
      loss.lost[part] += away * away;
      loss.whole[part] += x * x;
    }
  }
  return loss;
}

/// Sequences whose rows leave the calibrated axes: what is lost is what the CPU loses, answers are
/// those of float64, copies go on as the original.
template <class Cache>
void check_sequences(Method method, std::uint64_t seed, int dim, int rank, int group,
                     DType epoch_type, bool metrics, bool pre_rope = false) {
  CAPTURE(seed);
  Random random(seed);
  support::Settings settings;
  settings.method = method;
  settings.recent = 16;
  settings.sinks = 3;
  settings.share = seed % 2 == 0 ? 0.5F : 1.0F;
  settings.outliers.share = 0.05F;
  settings.basis.centred = seed % 3 != 0;
  if (metrics) {
    settings.basis.key_metric = KeyMetric::query_aware;
    settings.basis.value_metric = ValueMetric::output_aware;
  }
  settings.directions = {2.0F, 150, 1.0F};
  CacheConfig config;
  config.shape = {2 * group, 2, dim};
  config.max_sequences = 4;
  config.max_tokens = 3000;
  config.flush_interval = 48;
  config.epoch_type = epoch_type;
  config.publish_interval = 40;
  if (pre_rope) config.rope.keys = Rope::pre;
  const support::RandomLayer layer = support::random_layer(random, config.shape, settings, rank),
                             other = support::random_layer(random, config.shape, settings, rank);
  using Device = support::DeviceCache<Cache>;
  const auto policies = support::configured(typename Device::PolicySet{}, settings);
  Device device(config, layer.basis, policies);
  const auto cpu = support::make_cpu_side(settings, config, layer.basis);
  device.cache.create(1);
  const std::vector<SequenceId> one{1}, two{2}, three{3};
  std::vector<float> exact[2], stored[2], cpu_stored[2];
  const auto rows = [&](const support::RandomLayer& from, std::int64_t n, std::vector<float>& key,
                        std::vector<float>& value) {
    key = from.rows(random, n, true);
    value = from.rows(random, n, false);
    for (std::vector<float>* all : {&key, &value}) {
      for (float& x : *all) x = round_to(config.full_type, x);
    }
    exact[0].insert(exact[0].end(), key.begin(), key.end());
    exact[1].insert(exact[1].end(), value.begin(), value.end());
  };
  const auto check = [&](const char* when, std::int64_t first) {
    CAPTURE(when);
    const auto query = layer.queries(random, 1);
    const Answer answer = device.attend(one, query);
    CHECK(answer == device.attend(one, query));
    device.reconstruct(1, stored[0], stored[1]);
    cpu->reconstruct(cpu_stored[0], cpu_stored[1]);
    const std::int64_t end = device.cache.rollback_limit(1);
    const Loss own = loss_of(config.shape, exact, stored, first, end),
               others = loss_of(config.shape, exact, cpu_stored, first, end);
    for (int part = 0; part < 2; ++part) {
      CAPTURE(part);
      CHECK(own.share(part) < 1.04 * others.share(part) + 1e-5);
      CHECK(own.share(part) > 0.96 * others.share(part) - 1e-5);
    }
    std::vector<double> expected, lse;
    const std::vector<float> keys = support::rotated(
        config, stored[0], [&](std::int64_t token) { return device.cache.position(1, token); });
    support::attend_f64(config.shape, config.scale(), keys, stored[1], query, expected, lse);
    CHECK(support::distance(answer.out, expected) < (pre_rope ? 4e-3 : 1e-3));
    return own;
  };
  std::vector<float> key, value;
  rows(layer, 200, key, value);
  const auto window = layer.queries(random, 32);
  device.ingest(1, key, value, window);
  cpu->ingest(key, value, window);
  check("prompt", settings.sinks);
  rows(other, 700, key, value);  // other axes
  device.ingest(1, key, value, window);
  cpu->ingest(key, value, window);
  check("prompt of other axes", settings.sinks);
  for (int step = 0; step < (effort() == 0 ? 120 : 400); ++step) {
    rows(other, 1, key, value);
    device.append(one, key, value);
    device.cache.maintain(one);
    cpu->append_maintained(key, value);
  }
  check("steps", settings.sinks);
  CHECK(device.cache.statistics().publications == cpu->publications());
  CHECK(device.cache.statistics().merges == cpu->merges());
  CHECK(device.cache.statistics().publications > 2);
  CHECK(device.cache.statistics().merges > 0);
  device.cache.fork(1, 2);
  device.cache.load(3, device.save(1));
  const auto query = layer.queries(random, 1);
  const Answer before = device.attend(one, query);
  CHECK(device.attend(two, query) == before);
  CHECK(device.attend(three, query) == before);
  for (int step = 0; step < 60; ++step) {
    rows(other, 1, key, value);
    for (const auto* seq : {&one, &two, &three}) {
      device.append(*seq, key, value);
      device.cache.maintain(*seq);
    }
    cpu->append_maintained(key, value);
  }
  const Answer later = device.attend(one, query);
  CHECK(device.attend(two, query) == later);
  CHECK(device.attend(three, query) == later);
  CHECK(device.save(2) == device.save(1));
  const std::vector<SequenceId> all{1, 2, 3};
  std::vector<float> queries;
  for (int i = 0; i < 3; ++i) queries.insert(queries.end(), query.begin(), query.end());
  CHECK(support::part_of(device.attend(all, queries).out, 2, 3) ==
        later.out);  // the same in any batch
  check("in the end", settings.sinks);
  device.cache.truncate(1, std::is_same_v<Cache, OjaCodes> ? device.cache.rollback_limit(1) : 500);
  rows(other, 1, key, value);
  device.append(one, key, value);
  CHECK(device.cache.faults() == 0);
}

}  // namespace

TEST_CASE(
    "bases that move over codes of principal axes: what is lost is what the CPU loses, answers are "
    "those of float64") {
  check_sequences<OjaCodes>(Method::oja_codes, 301, 64, 30, 1, DType::f16, false);
  check_sequences<OjaBlocks>(Method::oja_blocks, 302, 64, 40, 3, DType::f16, false);
  check_sequences<DirectionsCodes>(Method::directions_codes, 303, 64, 33, 2, DType::f32, false);
  if (effort() == 0) return;
  check_sequences<OjaCodes>(Method::oja_codes, 304, 128, 128, 4, DType::f32, true);
  check_sequences<OjaCodes>(Method::oja_codes, 305, 80, 77, 1, DType::bf16, false);
  check_sequences<OjaBlocks>(Method::oja_blocks, 306, 128, 96, 4, DType::f16, true);
  check_sequences<DirectionsCodes>(Method::directions_codes, 307, 128, 64, 8, DType::f16, true);
  check_sequences<OjaCodes>(Method::oja_codes, 308, 256, 200, 2, DType::f16, false);
  check_sequences<DirectionsCodes>(Method::directions_codes, 309, 256, 250, 2, DType::f16, false);
}

TEST_CASE("bases that move over codes of principal axes, of pre-RoPE keys") {
  check_sequences<OjaCodes>(Method::oja_codes, 321, 64, 30, 1, DType::f16, false, true);
  if (effort() == 0) return;
  check_sequences<OjaBlocks>(Method::oja_blocks, 322, 64, 40, 3, DType::f16, false, true);
  check_sequences<DirectionsCodes>(Method::directions_codes, 323, 128, 64, 4, DType::f32, false,
                                   true);
  check_sequences<OjaCodes>(Method::oja_codes, 324, 128, 128, 4, DType::f32, true, true);
}

TEST_CASE(
    "bases that move: prompts of which an updater sees nothing publish nothing, as on the CPU, in "
    "copies too") {
  Random random(331);
  support::Settings settings;
  settings.method = Method::oja_codes;
  settings.sinks = 3;
  settings.recent = 8;
  settings.share = 0.0F;
  CacheConfig config;
  config.shape = {2, 2, 64};
  config.max_sequences = 2;
  config.max_tokens = 1500;
  config.flush_interval = 8;
  config.publish_interval = 12;
  const support::RandomLayer layer = support::random_layer(random, config.shape, settings, 20);
  support::DeviceCache<OjaCodes> device(config, layer.basis,
                                        support::configured(OjaCodes::PolicySet{}, settings));
  const auto cpu = support::make_cpu_side(settings, config, layer.basis);
  SequenceId now = 1;
  device.cache.create(now);
  std::int64_t publications = 0;
  const auto check = [&](const char* when, std::int64_t more) {
    CAPTURE(when);
    CHECK(cpu->publications() == publications + more);
    CHECK(device.cache.statistics().publications == cpu->publications());
    publications = cpu->publications();
  };
  const auto prompt = [&] {
    const auto key = layer.rows(random, 300, true), value = layer.rows(random, 300, false),
               window = layer.queries(random, 32);
    device.ingest(now, key, value, window);
    cpu->ingest(key, value, window);
  };
  const auto steps = [&](int count) {
    for (int step = 0; step < count; ++step) {
      const auto key = layer.rows(random, 1, true), value = layer.rows(random, 1, false);
      device.append(std::span(&now, 1), key, value);
      device.cache.maintain(now);
      cpu->append_maintained(key, value);
    }
  };
  prompt();
  check("a prompt", 0);
  // Bases that never moved cannot have moved since they were published: somewhere in the first
  // bytes a number says so.
  int refused = 0;
  const std::vector<std::byte> still = device.save(now);
  for (std::size_t at = 0; at < 2000; at += 4) {
    std::vector<std::byte> hostile = still;
    std::fill_n(hostile.begin() + static_cast<std::ptrdiff_t>(at), 4, std::byte{1});
    refused += support::message_of([&] {
                 device.cache.load(2, support::with_checksum(hostile));
               }).find("bases moved since they were published: 16843009, moved at all: 0") !=
                       std::string::npos
                   ? 1
                   : 0;
    if (device.cache.contains(2)) device.cache.erase(2);
  }
  CHECK(refused == 1);
  steps(10);
  check("steps", 1);
  prompt();
  check("a prompt for bases that are published", 0);
  const std::vector<std::byte> saved = device.save(now);
  device.cache.erase(now);
  device.cache.load(now = 2, saved);
  prompt();
  check("a prompt for a loaded copy", 0);
  steps(64);
  CHECK(cpu->publications() > publications + 1);
  CHECK(device.cache.statistics().publications == cpu->publications());
}

}  // namespace align_axes_tests
