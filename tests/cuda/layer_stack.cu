// SPDX-License-Identifier: Apache-2.0
// The layers of a model on the device, which share pages, a workspace and sequence ids: as layers
// alone, bit for bit, and all of them or none.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cuda/support/device_cache.cuh"
#include "cuda/support/random_layer.hpp"

namespace layer_stack_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;
using support::Answer;
using support::DeviceCache;
using support::message_of;
using support::Random;

namespace {

using Cache = StaticPCAHybrid<Cuda>;
using Stack = LayerStack<Cache>;

CacheConfig config_of(Random& random) {
  CacheConfig config;
  config.shape = support::random_shape(random, 3, {1, 2, 4}, {64, 80, 128});
  config.max_sequences = 4;
  config.max_tokens = 1200;
  config.full_type = DType::f16;
  config.rope = support::random_rope(random, config.shape.head_dim);
  return config;
}

/// Layers of different ranks, so that their tiles and workspaces have different sizes.
struct Model {
  explicit Model(Random& random) : config(config_of(random)) {
    support::Settings settings;
    settings.sinks = 3;
    settings.recent = 20;
    policies = support::configured(Cache::PolicySet{}, settings);
    for (const int rank : {16, 56, 33})
      layers.push_back(support::random_layer(random, config.shape, settings, rank));
  }
  std::vector<LayerBasis> bases() const {
    std::vector<LayerBasis> all;
    for (const support::RandomLayer& layer : layers) all.push_back(layer.basis);
    return all;
  }
  int num_layers() const { return static_cast<int>(layers.size()); }
  /// One a layer: full rows in 16, 8 and 16 bits, and softmax scales of their own.
  std::vector<CacheConfig> configs() const {
    std::vector<CacheConfig> all(layers.size(), config);
    all[1].full_row_bits = 8;
    all[2].softmax_scale = 0.5F * config.scale();
    return all;
  }

  CacheConfig config;
  Cache::PolicySet policies;
  std::vector<support::RandomLayer> layers;
};

DeviceCache<Cache&> device(Stack& stack, int layer) {
  return DeviceCache<Cache&>(stack.layer(layer));
}

/// What every layer answers to the same query.
std::vector<Answer> answers(Stack& stack, std::span<const SequenceId> seqs,
                            const std::vector<float>& query) {
  std::vector<Answer> all;
  for (int i = 0; i < stack.num_layers(); ++i) all.push_back(device(stack, i).attend(seqs, query));
  return all;
}

}  // namespace

TEST_CASE("layers of a stack on the device: as layers alone") {
  Random random(31);
  for (int trial = 0; trial < std::max(1, 3 * support::effort()); ++trial) {
    CAPTURE(trial);
    const Model model(random);
    std::vector<CacheConfig> configs(1, model.config);
    if (trial % 2 == 0) configs = model.configs();
    Stack stack(configs, model.bases(), model.policies);
    std::vector<std::unique_ptr<DeviceCache<Cache>>> alone;
    for (std::size_t layer = 0; layer < model.layers.size(); ++layer) {
      CacheConfig config = configs[configs.size() == 1 ? 0 : layer];
      config.page_bytes = stack.pool().page_bytes();  // page tables are as long as pages are small
      alone.push_back(
          std::make_unique<DeviceCache<Cache>>(config, model.layers[layer].basis, model.policies));
    }
    const auto each = [&](auto&& call) {
      for (const auto& layer : alone) call(layer->cache);
    };
    const std::vector<SequenceId> both{1, 2};
    const auto same = [&] {
      const std::vector<float> query = model.layers[0].queries(random, 2);
      for (int i = 0; i < model.num_layers(); ++i)
        CHECK(device(stack, i).attend(both, query) ==
              alone[static_cast<std::size_t>(i)]->attend(both, query));
    };
    for (const SequenceId seq : both) {
      stack.create(seq);
      each([&](Cache& cache) { cache.create(seq); });
      for (int i = 0; i < model.num_layers(); ++i) {
        const support::RandomLayer& layer = model.layers[static_cast<std::size_t>(i)];
        const std::vector<float> key = layer.rows(random, 200 * seq, true),
                                 value = layer.rows(random, 200 * seq, false);
        device(stack, i).ingest(seq, key, value);
        alone[static_cast<std::size_t>(i)]->ingest(seq, key, value);
      }
    }
    for (int step = 0; step < 40; ++step) {
      for (int i = 0; i < model.num_layers(); ++i) {
        const support::RandomLayer& layer = model.layers[static_cast<std::size_t>(i)];
        const std::vector<float> key = layer.rows(random, 2, true),
                                 value = layer.rows(random, 2, false);
        device(stack, i).append(both, key, value);
        alone[static_cast<std::size_t>(i)]->append(both, key, value);
      }
      stack.maintain(both);
      each([&](Cache& cache) { cache.maintain(both); });
      if (step == 5) {
        stack.shift_positions(1, 60, -25);
        each([&](Cache& cache) { cache.shift_positions(1, 60, -25); });
        stack.divide_positions(1, 10, 20, 2);
        each([&](Cache& cache) { cache.divide_positions(1, 10, 20, 2); });
        CHECK(stack.position(1, 29) == 14);
        CHECK(stack.position(1, 100) == 75);
      }
      if (step == 12 || step == 25) {
        const std::int64_t length = step == 12 ? stack.num_tokens(2) - 3 : 150;
        CHECK(stack.truncate(2, length) ==
              (step == 12 ? TruncateResult::exact : TruncateResult::inexact));
        each([&](Cache& cache) { cache.truncate(2, length); });
      }
      if (step == 18) {
        stack.remove(1, 70, 33);
        each([&](Cache& cache) { cache.remove(1, 70, 33); });
      }
      if (step % 8 == 0) same();
    }
    same();

    // Bytes: those of the layers; what is there once is counted once.
    MemoryUsage expected;
    std::size_t workspaces = 0, largest = 0;
    each([&](Cache& cache) {
      expected += cache.memory(1);
      workspaces += cache.workspace_bytes();
      largest = std::max(largest, cache.workspace_bytes());
    });
    CHECK(stack.memory(1).coefficient_bytes == expected.coefficient_bytes);
    CHECK(stack.memory(1).full_row_bytes == expected.full_row_bytes);
    MemoryUsage separate;
    std::size_t idle = 0;
    each([&](Cache& cache) {
      separate += cache.memory();
      idle += cache.pool().idle_bytes();
    });
    CHECK(stack.memory().reserved_bytes - stack.pool().idle_bytes() - largest ==
          separate.reserved_bytes - idle - workspaces);
    for (int i = 0; i < model.num_layers(); ++i) CHECK(stack.layer(i).workspace_bytes() <= largest);

    // Copies, and what was saved, answer as the original does.
    const std::vector<float> query = model.layers[0].queries(random, 1);
    const std::vector<SequenceId> first{1}, copied{3}, loaded{9};
    const std::vector<Answer> original = answers(stack, first, query);
    stack.fork(1, 3);
    CHECK(answers(stack, copied, query) == original);
    std::vector<std::byte> saved(stack.save_bytes(1));
    CHECK(stack.save(1, saved) == saved.size());
    Stack other(configs, model.bases(), model.policies);
    other.load(9, saved);
    CHECK(answers(other, loaded, query) == original);
    // Tokens are removed from a copy, none from the original; what is left is what a cache has that
    // was given the rest.
    stack.fork(1, 4);
    const std::int64_t tokens = stack.num_tokens(4),
                       needed = stack.layer(0).pages_to_remove(4, 40, 90);
    CHECK(needed > 0);
    stack.remove(4, 40, 90);
    CHECK(stack.num_tokens(4) == tokens - 90);
    CHECK(answers(stack, first, query) == original);
    for (int i = 0; i < model.num_layers(); ++i) {
      std::vector<float> key, value, key_left, value_left;
      device(stack, i).reconstruct(1, key, value);
      device(stack, i).reconstruct(4, key_left, value_left);
      const std::ptrdiff_t row =
          std::ptrdiff_t{model.config.shape.num_kv_heads} * model.config.shape.head_dim;
      for (std::vector<float>* all : {&key, &value})
        all->erase(all->begin() + 40 * row, all->begin() + 130 * row);
      CHECK(key_left == key);
      CHECK(value_left == value);
    }
    CHECK(message_of([&] { stack.remove(4, tokens - 100, 20); }) ==
          "remove: 20 tokens from token " + std::to_string(tokens - 100) + " on, sequence has " +
              std::to_string(tokens - 90) + " tokens");
    stack.erase(4);
    stack.erase(1);
    CHECK(answers(stack, copied, query) == original);
    stack.erase(2);
    stack.erase(3);
    CHECK(stack.pool().allocator().num_free() == stack.pool().allocator().num_pages());
  }
}

TEST_CASE("layers of a stack on the device: one graph for a step of all of them") {
  Random random(32);
  const Model model(random);
  Stack replayed(model.config, model.bases(), model.policies),
      called(model.config, model.bases(), model.policies);
  const std::vector<SequenceId> one{7};
  const CacheShape& shape = model.config.shape;
  std::vector<gpu::DeviceArray<float>> keys, values, queries, outs;
  for (Stack* stack : {&replayed, &called}) stack->create(7);
  for (int i = 0; i < model.num_layers(); ++i) {
    const support::RandomLayer& layer = model.layers[static_cast<std::size_t>(i)];
    const std::vector<float> key = layer.rows(random, 300, true),
                             value = layer.rows(random, 300, false);
    for (Stack* stack : {&replayed, &called}) device(*stack, i).ingest(7, key, value);
    for (auto* rows : {&keys, &values})
      rows->emplace_back(static_cast<std::size_t>(shape.num_kv_heads * shape.head_dim));
    for (auto* rows : {&queries, &outs})
      rows->emplace_back(static_cast<std::size_t>(shape.num_qo_heads * shape.head_dim));
  }
  const support::CapturedStep step([&](cudaStream_t stream) {
    for (int i = 0; i < model.num_layers(); ++i) {
      const auto at = static_cast<std::size_t>(i);
      Cache& cache = replayed.layer(i);
      cache.append(one, {keys[at].data(), 1, shape.num_kv_heads, shape.head_dim},
                   {values[at].data(), 1, shape.num_kv_heads, shape.head_dim}, stream);
      cache.attend(one, {queries[at].data(), 1, shape.num_qo_heads, shape.head_dim},
                   {outs[at].data(), 1, shape.num_qo_heads, shape.head_dim}, {}, stream);
    }
    CHECK(message_of([&] { replayed.create(8, stream); }).find("captured") != std::string::npos);
  });
  CHECK_FALSE(replayed.layer(0).contains(8));
  for (int token = 0; token < 60; ++token) {
    std::vector<std::vector<float>> expected;
    for (int i = 0; i < model.num_layers(); ++i) {
      const auto at = static_cast<std::size_t>(i);
      const std::vector<float> key = model.layers[at].rows(random, 1, true),
                               value = model.layers[at].rows(random, 1, false),
                               query = model.layers[at].queries(random, 1);
      support::upload(key, keys[at]);
      support::upload(value, values[at]);
      support::upload(query, queries[at]);
      device(called, i).append(one, key, value);
      expected.push_back(device(called, i).attend(one, query).out);
    }
    called.maintain(7);
    if (token == 30) {  // between replays
      replayed.remove(7, 100, 50, step.stream);
      called.remove(7, 100, 50);
      expected.clear();
    }
    step.replay(replayed, one);
    if (expected.empty()) continue;  // one has lost tokens before the step, the other behind it
    for (std::size_t i = 0; i < outs.size(); ++i) CHECK(support::host(outs[i]) == expected[i]);
  }
  CHECK(replayed.num_tokens(7) == 310);
}

TEST_CASE("layers of a stack on the device: all of them or none") {
  Random random(33);
  const Model model(random);
  const auto grow = [&](Stack& stack, int layer, std::int64_t tokens) {
    const support::RandomLayer& own = model.layers[static_cast<std::size_t>(layer)];
    device(stack, layer).ingest(1, own.rows(random, tokens, true), own.rows(random, tokens, false));
  };
  Stack stack(model.config, model.bases(), model.policies);
  stack.create(1);
  for (int i = 0; i < model.num_layers(); ++i)
    grow(stack, i, i == 2 ? 40 : 100);  // the last layer is behind
  CHECK(message_of([&] { stack.truncate(1, 60); }) ==
        "truncate: length 60, sequence has 40 tokens");
  CHECK(message_of([&] { stack.shift_positions(1, 60, 5); }).find("60") != std::string::npos);
  CHECK(stack.layer(0).num_tokens(1) == 100);
  CHECK(stack.layer(0).position(1, 70) == 70);
  std::vector<std::byte> saved(stack.save_bytes(1));
  stack.save(1, saved);
  Stack other(model.config, model.bases(), model.policies);
  CHECK(message_of([&] { other.load(5, saved); }) ==
        "saved state: layer 0 has 100 tokens, layer 2 has 40");
  for (int i = 0; i < other.num_layers(); ++i) CHECK_FALSE(other.layer(i).contains(5));
  std::vector<LayerBasis> fewer = model.bases();
  fewer.pop_back();
  Stack shallow(model.config, fewer, model.policies);
  CHECK(message_of([&] { shallow.load(5, saved); }) == "num_layers: stack 2, saved 3");
  CHECK(message_of([&] { Stack none(model.config, {}, model.policies); }) ==
        "LayerStack: num_layers 0, at least 1 needed");

  // Advancing: the tail of one layer is full.
  const SequenceId one = 1;
  const int room = model.config.tail_capacity != 0 ? model.config.tail_capacity
                                                   : stack.layer(0).config().tail_capacity;
  const int fill = room - stack.layer(1).tail_length(1);
  for (int token = 0; token < fill; ++token)
    device(stack, 1).append({&one, 1}, model.layers[1].rows(random, 1, true),
                            model.layers[1].rows(random, 1, false));
  CHECK(message_of([&] {
          stack.advance({&one, 1}, 1);
        }).find("call maintain") != std::string::npos);
  CHECK(stack.layer(0).num_tokens(1) == 100);

  // Pages: enough for two of three layers that are due.
  const PoolSize size = Stack::pool_size(model.config, model.bases(), model.policies);
  Stack due(model.config, model.bases(), model.policies);
  due.create(1);
  for (int i = 0; i < due.num_layers(); ++i) {
    for (int token = 0; token < room; ++token)
      device(due, i).append({&one, 1},
                            model.layers[static_cast<std::size_t>(i)].rows(random, 1, true),
                            model.layers[static_cast<std::size_t>(i)].rows(random, 1, false));
  }
  std::int64_t wanted = 0;
  for (int i = 0; i < due.num_layers(); ++i) wanted += due.layer(i).pages_to_maintain({&one, 1});
  REQUIRE(wanted > due.layer(0).pages_to_maintain({&one, 1}));
  const auto pool = std::make_shared<gpu::PagePool>(size.page_bytes, wanted - 1);
  Stack poor(model.config, model.bases(), model.policies, {}, pool);
  poor.create(1);
  for (int i = 0; i < poor.num_layers(); ++i) {
    for (int token = 0; token < room; ++token)
      device(poor, i).append({&one, 1},
                             model.layers[static_cast<std::size_t>(i)].rows(random, 1, true),
                             model.layers[static_cast<std::size_t>(i)].rows(random, 1, false));
  }
  CHECK(message_of([&] { poor.maintain(1); }) == "page pool: " + std::to_string(wanted) +
                                                     " pages needed, " +
                                                     std::to_string(wanted - 1) + " free");
  for (int i = 0; i < poor.num_layers(); ++i) CHECK(poor.layer(i).tail_length(1) == room);
  due.maintain(1);
  CHECK(due.layer(0).tail_length(1) < room);

  // A workspace that is lent must do for the largest layer.
  const gpu::LentMemory enough =
      Cache::make_shared({&model.config, 1}, model.bases(), model.policies);
  const gpu::LentMemory little{enough.data, enough.bytes - 128};
  CHECK(message_of([&] { Stack lent(model.config, model.bases(), model.policies, little); }) ==
        "workspace: " + std::to_string(little.bytes) + " bytes lent, " +
            std::to_string(enough.bytes) + " needed");
  CHECK(Stack(model.config, model.bases(), model.policies, enough).memory().reserved_bytes +
            enough.bytes ==
        Stack(model.config, model.bases(), model.policies).memory().reserved_bytes);
}

}  // namespace layer_stack_tests
