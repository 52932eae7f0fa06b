// SPDX-License-Identifier: Apache-2.0
// A captured step whose sequences are read from device memory: they come and go, and some places
// have none.
#include "cuda/support/step_slots.cuh"

#include <doctest/doctest.h>

#include <vector>

namespace step_slots_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too
using support::Method;
using support::Random;
using support::Settings;
using Codes = CompressedKVCache<Cuda, PerHead, Static, SinkRecent, TransformCode>;

TEST_CASE("a captured step serves the sequences whose slots are in device memory") {
  Random random(11);
  Settings settings;
  CacheConfig config;
  const CacheShape shape{8, 2, 64};
  const auto full = support::random_layer(random, shape, settings, 64);
  support::serve_slots<FullKV<Cuda>>(full, config, {}, random);
  settings.method = Method::codes;
  config.epoch_type = DType::f32;
  const auto coded = support::random_layer(random, shape, settings, 64);
  support::serve_slots<Codes>(coded, config, {{}, {}, {4, 32}, {}}, random);
  config.epoch_type = DType::f16;
  config.publish_interval = 40;
  const auto narrow = support::random_layer(random, shape, settings, 24);
  using Merging = CompressedKVCache<Cuda, PerHead, Oja, SinkRecent, NoQuantizer, KeepEpochs<2>>;
  support::serve_slots<Merging>(narrow, config, {{}, {}, {4, 32}, {}}, random);
  config.rope = {.keys = Rope::pre, .frequencies = rope_frequencies(64, 10000.0)};
  support::serve_slots<Codes>(coded, config, {{}, {}, {4, 32}, {}}, random);
  support::serve_slots<Merging>(narrow, config, {{}, {}, {4, 32}, {}}, random);
}

TEST_CASE("steps of slots refuse what does not fit, and take nothing") {
  Random random(12);
  CacheConfig config;
  config.shape = {8, 2, 64};
  config.max_sequences = 3;
  FullKV<Cuda> cache(config, {}, {});
  gpu::DeviceArray<float> rows(8 * 8 * 64);
  gpu::DeviceArray<std::int32_t> slots(4);
  const auto keys = [&](std::int64_t n) { return KeyView{rows.data(), n, 2, 64}; };
  const auto values = [&](std::int64_t n) { return ValueView{rows.data(), n, 2, 64}; };
  const auto queries = [&](std::int64_t n) { return QueryView{rows.data(), n, 8, 64}; };
  const auto outputs = [&](std::int64_t n) { return OutputView{rows.data(), n, 8, 64}; };
  CHECK_THROWS_WITH_AS(cache.append(SlotView{slots.data(), 4}, keys(4), values(4)),
                       "append: 4 slots, 0 to max_sequences 3 expected", CapacityError);
  CHECK_THROWS_WITH_AS(cache.attend(SlotView{slots.data(), 4}, queries(4), outputs(4)),
                       "attend: 4 slots, 0 to max_sequences 3 expected", CapacityError);
  CHECK_THROWS_WITH_AS(cache.append(SlotView{slots.data(), 2}, keys(3), values(3)),
                       "append: 3 tokens for 2 slots", ShapeError);
  CHECK_THROWS_WITH_AS(cache.append(SlotView{nullptr, 2}, keys(2), values(2)),
                       "append: null pointer with 2 slots", ShapeError);
  CHECK_THROWS_AS(
      cache.attend(SlotView{slots.data(), 1}, queries(cache.config().max_query_tokens + 1),
                   outputs(cache.config().max_query_tokens + 1)),
      ShapeError);
  const std::int64_t many = cache.config().tail_capacity + 1;
  CHECK_THROWS_AS(cache.append(SlotView{slots.data(), 1}, keys(many), values(many)), CapacityError);
  cache.append(SlotView{}, keys(0), values(0));
  cache.attend(SlotView{}, queries(0), outputs(0));
  CHECK_THROWS_AS(cache.slot(7), SequenceError);
  cache.create(7);
  CHECK(cache.slot(7) >= 0);
  CHECK(cache.slot(7) < 3);
}

TEST_CASE("a stack's slots are those of its layers, or none") {
  CacheConfig config;
  config.shape = {2, 1, 16};
  config.max_sequences = 2;
  config.max_tokens = 64;
  LayerStack<FullKV<Cuda>> stack(config, std::vector<LayerBasis>(2));
  stack.create(1);
  CHECK(stack.slot(1) == stack.layer(1).slot(1));
  CHECK_THROWS_AS(stack.slot(2), SequenceError);
  // The layers got their sequences in another order.
  stack.layer(0).create(2);
  stack.erase(1);
  stack.layer(1).create(2);
  CHECK_THROWS_WITH_AS(
      stack.slot(2), "sequence 2: slot 1 in layer 0, 0 in another, the same expected", StateError);
}

TEST_CASE("a sequence that is named twice among many is found") {
  CacheConfig config;
  config.shape = {2, 1, 16};
  config.max_sequences = 40;
  config.max_tokens = 64;
  FullKV<Cuda> cache(config, {}, {});
  std::vector<SequenceId> seqs;
  for (SequenceId seq = 0; seq < 40; ++seq) {
    cache.create(seq);
    seqs.push_back(seq);
  }
  const gpu::DeviceArray<float> rows(40 * 16);
  cache.append(seqs, {rows.data(), 40, 1, 16}, {rows.data(), 40, 1, 16});
  seqs[37] = 5;
  CHECK_THROWS_WITH_AS(cache.append(seqs, {rows.data(), 40, 1, 16}, {rows.data(), 40, 1, 16}),
                       "append: sequence 5 stands at place 37 and before", SequenceError);
  CHECK(cache.num_tokens(5) == 1);
  cache.maintain(seqs);  // each once
}

}  // namespace step_slots_tests
