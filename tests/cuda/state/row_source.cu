// SPDX-License-Identifier: Apache-2.0
// Rows of any type and strides.
#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

#include "cuda/support/compositions.cuh"

namespace row_source_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too
using support::Codes;
using support::host;
using support::Method;
using support::Random;
using support::Settings;

TEST_CASE("rows give the same whatever their type and strides") {
  Random random(17);
  Settings settings;
  settings.method = Method::codes;
  CacheConfig config;
  config.shape = {4, 2, 96};
  config.max_tokens = 1000;
  config.max_sequences = 3;
  config.epoch_type = DType::f32;
  const auto layer = support::random_layer(random, config.shape, settings, 60);
  Codes::PolicySet policies;
  policies.token_policy = {4, 32};
  Codes cache(config, layer.basis, policies);
  const int n = 333;
  auto key = layer.rows(random, n, true), value = layer.rows(random, n, false);
  for (auto* rows : {&key, &value}) {
    for (float& x : *rows) x = round_to(DType::f16, x);
  }
  // As f32; as f16, aligned for wide loads; as f16 with the heads outside, which starts at an odd
  // element.
  const gpu::DeviceArray<float> key32(key), value32(value);
  std::vector<__half> halves[2], strided[2];
  for (int part = 0; part < 2; ++part) {
    const std::vector<float>& rows = part == 0 ? key : value;
    for (const float x : rows) halves[part].push_back(__float2half(x));
    strided[part].assign(rows.size() + 1, __half{});
    for (int token = 0; token < n; ++token) {
      for (int head = 0; head < 2; ++head) {
        for (int i = 0; i < 96; ++i)
          strided[part][static_cast<std::size_t>(1 + (head * n + token) * 96 + i)] =
              halves[part][static_cast<std::size_t>((token * 2 + head) * 96 + i)];
      }
    }
  }
  const gpu::DeviceArray<__half> key16(halves[0]), value16(halves[1]), key_out(strided[0]),
      value_out(strided[1]);
  for (const SequenceId seq : {1, 2, 3}) cache.create(seq);
  cache.ingest(1, {key32.data(), n, 2, 96}, {value32.data(), n, 2, 96});
  cache.ingest(2, KeyView(key16.data(), DType::f16, n, 2, 96, 2 * 96, 96),
               ValueView(value16.data(), DType::f16, n, 2, 96, 2 * 96, 96));
  cache.ingest(3, KeyView(key_out.data() + 1, DType::f16, n, 2, 96, 96, n * 96),
               ValueView(value_out.data() + 1, DType::f16, n, 2, 96, 96, n * 96));
  std::vector<float> keys[3], values[3];
  for (const SequenceId seq : {1, 2, 3}) {
    const gpu::DeviceArray<float> k(key.size()), v(key.size());
    cache.reconstruct(seq, 0, {k.data(), n, 2, 96}, {v.data(), n, 2, 96});
    keys[seq - 1] = host(k);
    values[seq - 1] = host(v);
  }
  for (int i = 1; i < 3; ++i) {
    CHECK(keys[0] == keys[i]);
    CHECK(values[0] == values[i]);
  }
}

}  // namespace row_source_tests
