// SPDX-License-Identifier: Apache-2.0
// Input that a call refuses, with both values, and what is as it was then.
#include <doctest/doctest.h>

#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "cuda/support/compositions.cuh"

namespace checks_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too
using support::host;
using support::make_device;
using support::Method;
using support::Random;
using support::Settings;

TEST_CASE("what keys stored before their rotary embedding do not go with is refused") {
  Random random(47);
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.rope.keys = Rope::pre;
  const auto layer = support::random_layer(random, config.shape, {}, 16);
  const auto message = [&](Method method) {
    Settings settings;
    settings.method = method;
    try {
      make_device(settings, config, layer.basis);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(message(Method::hybrid).empty());
  CHECK(message(Method::oja).empty());
  CHECK(message(Method::snapkv_only).empty());
  config.rope.rotary_dim = 24;
  CHECK(message(Method::hybrid).find("rotary_dim 24, a multiple of 16") != std::string::npos);
}

TEST_CASE("sketches refuse a basis without thresholds, unless every flush ends a chunk") {
  Random random(48);
  CacheConfig config;
  config.shape = {4, 2, 64};
  Settings settings;
  settings.method = Method::subspace_a;
  auto layer = support::random_layer(random, config.shape, settings, 16);
  CHECK_NOTHROW(make_device(settings, config, layer.basis));
  layer.basis.heads[1].value_threshold = HeadBasis{}.value_threshold;
  CHECK_THROWS_WITH_AS(make_device(settings, config, layer.basis),
                       "FrequentDirections: KV head 1 has key_threshold inf and value_threshold "
                       "nan, residual norms expected, or infinity for never",
                       ValueError);
  settings.directions.threshold_scale = 0.0F;  // they are not read
  CHECK_NOTHROW(make_device(settings, config, layer.basis));
}

TEST_CASE(
    "bad input is refused with both values, and values that are not finite never reach the store") {
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.max_tokens = 100;
  FullKV<Cuda> cache(config);
  cache.create(1);
  gpu::DeviceArray<float> rows(200 * 2 * 64), out(200 * 4 * 64);
  const auto message = [](auto&& call) {
    try {
      call();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("nothing was raised");
  };
  CHECK(message([&] {
          cache.ingest(1, {rows.data(), 10, 2, 32}, {rows.data(), 10, 2, 32});
        }) == "head_dim: cache 64, key 32");
  CHECK(message([&] {
          cache.ingest(1, {rows.data(), 101, 2, 64}, {rows.data(), 101, 2, 64});
        }) == "max_tokens: 100, sequence has 0, given 101");
  CHECK(message([&] {
          cache.ingest(2, {rows.data(), 1, 2, 64}, {rows.data(), 1, 2, 64});
        }) == "unknown sequence 2; 1 sequences exist");
  CHECK(message([&] {
          cache.attend(1, {rows.data(), 1, 4, 64}, {out.data(), 1, 4, 64});
        }) == "attend: 1 query tokens, sequence 1 has 0 tokens in its tail");
  CHECK(message([&] {
          cache.append(1, {rows.data(), 97, 2, 64}, {rows.data(), 97, 2, 64});
        }) == "tail_capacity: 96, sequence 1 has 0 rows in its tail, given 97; call maintain");
  CHECK(message([&] {
          FullKV<Cuda> other({.shape = {4, 2, 40}});
        }) == "head_dim: 40, a multiple of 16 up to 256 expected on this backend");
  CHECK(cache.num_tokens(1) == 0);
  cudaStream_t stream;
  cudaGraph_t graph;
  gpu::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  gpu::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  CHECK(message([&] { cache.maintain(1, stream); }) ==
        "maintain: the stream is capturing a graph; only append, attend, attend_partial and "
        "accumulate can be captured");
  CHECK(message([&] { cache.create(3, stream); }) ==
        "create: the stream is capturing a graph; only append, attend, attend_partial and "
        "accumulate can be captured");
  CHECK(message([&] {
          cache.reconstruct(1, 0, {rows.data(), 0, 2, 64}, {rows.data(), 0, 2, 64}, stream);
        }) ==
        "reconstruct: the stream is capturing a graph; only append, attend, attend_partial and "
        "accumulate can be captured");
  gpu::check(cudaStreamEndCapture(stream, &graph), "capture");
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  CHECK(!cache.contains(3));
  // No tokens and no sequences are nothing to do: nothing is launched with a grid of 0.
  const std::span<const SequenceId> nobody;
  gpu::DeviceArray<float> scores(2 * 100);
  cache.append(nobody, {rows.data(), 0, 2, 64}, {rows.data(), 0, 2, 64});
  cache.append_maintained(nobody, {rows.data(), 0, 2, 64}, {rows.data(), 0, 2, 64});
  cache.attend(1, {rows.data(), 0, 4, 64}, {out.data(), 0, 4, 64});
  cache.attend(nobody, {rows.data(), 0, 4, 64}, {out.data(), 0, 4, 64});
  const SequenceId one = 1;
  cache.attend(std::span(&one, 1), {rows.data(), 0, 4, 64}, {out.data(), 0, 4, 64}, {},
               {scores.data(), 1, 2, 100});
  CHECK(host(scores) == std::vector<float>(2 * 100));
  CHECK(message([&] {
          cache.attend(nobody, {rows.data(), 1, 4, 64}, {out.data(), 1, 4, 64});
        }) == "attend: 1 query tokens for 0 sequences");
  std::vector<float> bad(3 * 2 * 64, 1.0F);
  bad[2 * 64 + 5] = std::nanf("");
  bad[2 * 2 * 64 + 7] = 70000.0F;
  const gpu::DeviceArray<float> device(bad);
  cache.append(1, {device.data(), 3, 2, 64}, {device.data(), 3, 2, 64});
  CHECK(cache.faults() == 2);
  gpu::DeviceArray<float> k(bad.size()), v(bad.size());
  cache.reconstruct(1, 0, {k.data(), 3, 2, 64}, {v.data(), 3, 2, 64});
  const auto stored = host(k);
  CHECK(stored[0] == 1.0F);
  for (std::size_t i = 2 * 64; i < stored.size(); ++i) CHECK(stored[i] == 0.0F);
}

}  // namespace checks_tests
