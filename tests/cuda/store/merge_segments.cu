// SPDX-License-Identifier: Apache-2.0
// Merges that take several flushes, beside the CPU backend: the same rows move in the same flushes,
// also after tokens were removed, and a sequence that is forked or saved meanwhile goes on as the
// original does.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "cuda/support/cpu_side.hpp"
#include "cuda/support/device_cache.cuh"
#include "cuda/support/random_layer.hpp"

namespace merge_segments_tests {

using namespace lowrankkv;
using support::DeviceCache;
using support::Random;

namespace {

/// The host manages its epochs.
using Counted = CompressedKVCache<Cuda, PerHead, Oja, SinkRecent, NoQuantizer, KeepEpochs<2>>;
/// The device manages its epochs.
using Sketched =
    CompressedKVCache<Cuda, PerHead, FrequentDirections, SinkRecent, NoQuantizer, KeepEpochs<3>>;

/// The largest difference of two lists of numbers.
float furthest(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  float most = 0.0F;
  for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
  return most;
}

/// Appends a random token to some sequences, and flushes.
template <class Cache>
void step(DeviceCache<Cache>& device, std::span<const SequenceId> seqs,
          const std::vector<float>& key, const std::vector<float>& value) {
  std::vector<float> keys, values;
  for (std::size_t i = 0; i < seqs.size(); ++i) {
    keys.insert(keys.end(), key.begin(), key.end());
    values.insert(values.end(), value.begin(), value.end());
  }
  device.append(seqs, keys, values);
  device.cache.maintain(seqs);
}

}  // namespace

TEST_CASE_TEMPLATE("a merge takes several flushes, in which the same rows move as on the CPU",
                   Merging, Counted, Sketched) {
  for (const bool residuals : {false, true}) {
    Random random(31);
    CacheConfig config;
    config.shape = {4, 2, 64};
    config.max_sequences = 3;
    config.max_tokens = 700;
    config.flush_interval = 8;
    config.publish_interval = 16;
    config.merge_rows = 24;
    config.epoch_type = DType::f32;
    config.keep_residuals = residuals;
    support::Settings settings;
    settings.method = std::is_same_v<Merging, Counted> ? support::Method::oja_merging
                                                       : support::Method::directions;
    settings.directions = {2.0F, 16, 1e6F};  // chunks end by their length alone
    settings.sinks = 3;
    settings.recent = 5;
    const auto layer = support::random_layer(random, config.shape, settings, 16);
    DeviceCache<Merging> device(config, layer.basis,
                                support::configured(typename Merging::PolicySet{}, settings));
    const auto cpu = support::make_cpu_side(settings, config, layer.basis);
    device.cache.create(1);
    const SequenceId all[] = {1, 2, 3};
    // Sketches are dear where kernels run on the host.
    const int tokens = std::is_same_v<Merging, Counted> ? 600 : residuals ? 230 : 150;
    int unfinished = 0, tried = 0;
    CacheStatistics others;  // what sequences 2 and 3 did
    for (int token = 0; token < tokens; ++token) {
      const auto key = layer.rows(random, 1, true), value = layer.rows(random, 1, false);
      const CacheStatistics before = device.cache.statistics();
      step(device, std::span(all).first(1), key, value);
      cpu->append_maintained(key, value);
      const CacheStatistics after = device.cache.statistics();
      REQUIRE(after.rows_reprojected - before.rows_reprojected <=
              24 * 2 * (after.flushes - before.flushes));
      REQUIRE(after.merges - others.merges == cpu->merges());
      REQUIRE(after.publications - others.publications == cpu->publications());
      if (after.rows_reprojected == before.rows_reprojected || after.merges > before.merges)
        continue;
      ++unfinished;
      if (unfinished % 4 != 0) continue;
      std::vector<float> device_key, device_value, cpu_key, cpu_value;
      device.reconstruct(1, device_key, device_value);
      cpu->reconstruct(cpu_key, cpu_value);
      CHECK(furthest(device_key, cpu_key) < 0.02F);
      CHECK(furthest(device_value, cpu_value) < 0.02F);
      if (tried++ % 3 != 0) continue;
      device.cache.fork(1, 2);
      device.cache.load(3, device.save(1));
      for (int more = 0; more < 30; ++more)
        step(device, std::span(all).subspan(1), layer.rows(random, 1, true),
             layer.rows(random, 1, false));
      CHECK(device.save(2) == device.save(3));
      const CacheStatistics now = device.cache.statistics();
      others.merges += now.merges - after.merges;
      others.publications += now.publications - after.publications;
      device.cache.erase(2);
      device.cache.erase(3);
      std::vector<float> again_key, again_value;
      device.reconstruct(1, again_key, again_value);
      CHECK(again_key == device_key);
      CHECK(again_value == device_value);
      // Rows of both segments go, or of the newer one.
      const std::int64_t n = device.cache.num_tokens(1);
      if (tried % 2 == 0) {
        device.cache.remove(1, n / 3, n / 4);
        cpu->remove(n / 3, n / 4);
      } else {
        device.cache.truncate(1, n - 25);
        cpu->truncate(n - 25);
      }
    }
    CHECK(unfinished > 2);
    CHECK(cpu->merges() > 3);
  }
}

TEST_CASE("a prompt ends the merge in progress, where the device manages epochs too") {
  Random random(32);
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.max_sequences = 2;
  config.max_tokens = 2000;
  config.flush_interval = 8;
  config.merge_rows = 8;
  config.epoch_type = DType::f32;
  support::Settings settings;
  settings.method = support::Method::directions;
  settings.directions = {2.0F, 16, 1e6F};
  settings.sinks = 3;
  settings.recent = 5;
  const auto layer = support::random_layer(random, config.shape, settings, 16);
  DeviceCache<Sketched> device(config, layer.basis,
                               support::configured(Sketched::PolicySet{}, settings));
  const auto cpu = support::make_cpu_side(settings, config, layer.basis);
  device.cache.create(1);
  const SequenceId one[] = {1};
  int ended = 0;
  for (int turn = 0; turn < 6; ++turn) {
    for (int token = 0; token < 44 + 3 * turn; ++token) {
      const auto key = layer.rows(random, 1, true), value = layer.rows(random, 1, false);
      step(device, one, key, value);
      cpu->append_maintained(key, value);
    }
    const CacheStatistics before = device.cache.statistics();
    REQUIRE(before.merges == cpu->merges());
    const auto keys = layer.rows(random, 40, true), values = layer.rows(random, 40, false);
    device.ingest(1, keys, values);
    cpu->ingest(keys, values, {});
    const CacheStatistics after = device.cache.statistics();
    REQUIRE(after.merges == cpu->merges());
    REQUIRE(after.publications == cpu->publications());
    REQUIRE(after.rows_reprojected == cpu->rows_reprojected());
    if (after.merges > before.merges) ++ended;
    std::vector<float> device_key, device_value, cpu_key, cpu_value;
    device.reconstruct(1, device_key, device_value);
    cpu->reconstruct(cpu_key, cpu_value);
    CHECK(furthest(device_key, cpu_key) < 0.02F);
    CHECK(furthest(device_value, cpu_value) < 0.02F);
  }
  CHECK(ended > 2);
}

}  // namespace merge_segments_tests
