// SPDX-License-Identifier: Apache-2.0
// Codes of which some channels, or all, have no bits.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "cuda/support/compositions.cuh"

namespace transform_code_tests {

using namespace lowrankkv;
using support::make_device;
using support::Method;
using support::Random;
using support::Settings;
using support::Worst;

TEST_CASE("heads whose keys, or values, or both have no bits at all") {
  Random random(13);
  Settings settings;
  settings.method = Method::codes;
  settings.basis.centred = true;
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.epoch_type = DType::f32;
  config.max_tokens = 6000;
  config.max_query_tokens = 3;
  const auto without = [](std::vector<std::uint8_t>& bits) {
    std::fill(bits.begin(), bits.end(), std::uint8_t{0});
  };
  for (const int which : {0, 1, 2}) {  // keys of one head and values of the other; both of one;
                                       // both of both, of which nothing is read
    auto layer = support::random_layer(random, config.shape, settings, 20);
    without(layer.basis.heads[0].key_bits);
    without(layer.basis.heads[which == 0 ? 1 : 0].value_bits);
    if (which == 2) {
      without(layer.basis.heads[1].key_bits);
      without(layer.basis.heads[1].value_bits);
    }
    for (const int rows : {300, 5000}) {  // one split, and three
      CAPTURE(which);
      CAPTURE(rows);
      const auto device = make_device(settings, config, layer.basis);
      const auto cpu = support::make_cpu_side(settings, config, layer.basis);
      device->create(1);
      const auto key = layer.rows(random, rows, true), value = layer.rows(random, rows, false);
      device->ingest(1, key, value);
      cpu->ingest(key, value, {});
      const SequenceId seq = 1;
      for (const int m : {1, 3}) {
        const auto query = layer.queries(random, m);
        std::vector<float> out, lse;
        device->attend(std::span(&seq, 1), query, out, lse);
        Worst worst;
        compare(settings, config, *device, 1, *cpu, query, out, lse, worst);
      }
    }
  }
}

}  // namespace transform_code_tests
