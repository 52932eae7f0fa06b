// SPDX-License-Identifier: Apache-2.0
// A prompt's attention: over its own rows and what is stored.
#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "cuda/support/compositions.cuh"

namespace prefill_tests {

using namespace lowrankkv;
using support::distance;
using support::furthest;
using support::make_device;
using support::Method;
using support::Random;
using support::Settings;

TEST_CASE(
    "prefill is exact attention over the prompt's own rows and what is stored, and stores as "
    "ingest") {
  Random random(11);
  for (int trial = 0; trial < 18; ++trial) {
    Settings settings;
    const Method methods[] = {Method::full, Method::hybrid, Method::codes};
    settings.method = methods[trial % 3];
    settings.pre_rope = trial >= 12;
    CacheConfig config;
    const int groups[] = {1, 2, 4, 7}, dims[] = {64, 128, 256};
    config.shape.num_kv_heads = 2;
    config.shape.num_qo_heads = 2 * groups[random() % 4];
    config.shape.head_dim = dims[random() % 3];
    config.max_tokens = 2000;
    config.max_sequences = 2;
    config.epoch_type = DType::f32;
    settings.recent = 20;
    if (settings.pre_rope) config.rope = support::random_rope(random, config.shape.head_dim);
    const auto layer = support::random_layer(random, config.shape, settings, 40);
    const auto device = make_device(settings, config, layer.basis);
    device->create(1);
    device->create(2);
    const int lengths[] = {1, 15, 16, 100, 257, 600};
    for (int part = 0; part < 2; ++part) {
      std::vector<float> before_key, before_value, out, lse;
      device->reconstruct(1, before_key, before_value);
      const int n = lengths[random() % 6];
      auto key = layer.rows(random, n, true), value = layer.rows(random, n, false);
      for (auto* rows : {&key, &value}) {
        for (float& x : *rows) x = round_to(DType::f16, x);
      }
      const auto query = layer.queries(random, n);
      device->prefill(1, query, key, value, out, lse);
      device->ingest(2, key, value);
      before_key.insert(before_key.end(), key.begin(), key.end());
      before_value.insert(before_value.end(), value.begin(), value.end());
      std::vector<double> expected, expected_lse;
      support::attend_f64(config.shape, config.scale(), support::rotated(config, before_key),
                          before_value, query, expected, expected_lse);
      CAPTURE(trial);
      CAPTURE(n);
      const double limit = settings.pre_rope                               ? 4e-3
                           : settings.method == Method::codes && part == 1 ? 1e-3
                                                                           : 2e-5;
      CHECK(distance(out, expected) < limit);
      CHECK(furthest(lse, expected_lse) <
            limit *
                std::max(1.0, furthest(expected_lse, std::vector<double>(expected_lse.size()))));
      std::vector<float> keys[2], values[2];
      for (const SequenceId seq : {1, 2}) device->reconstruct(seq, keys[seq - 1], values[seq - 1]);
      CHECK(keys[0] == keys[1]);
      CHECK(values[0] == values[1]);
    }
  }
}

}  // namespace prefill_tests
