// SPDX-License-Identifier: Apache-2.0
// Layers that share a pool, threads and sequences; what is done to all of them or to none.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lowrankkv/layer_stack.hpp"
#include "lowrankkv/presets.hpp"
#include "support/grouped_cache.hpp"
#include "support/random_layer.hpp"

namespace layer_stack_tests {

using namespace lowrankkv;
using namespace support::grouped;

TEST_CASE("a stack of layers shares a pool and the sequences") {
  support::Random random(7);
  const auto q = support::random_rows(random, 150, 8, 64),
             k = support::random_rows(random, 150, 2, 64),
             v = support::random_rows(random, 150, 2, 64);
  LayerStack<OjaKV<>> stack({.shape = kShape, .max_sequences = 2},
                            {basis(), basis(12, 12), basis(40, 8)});
  CHECK(stack.num_layers() == 3);
  stack.create(5);
  CHECK_THROWS_AS(stack.create(5), SequenceError);
  for (int layer = 0; layer < 3; ++layer) {
    std::vector<float> out(q.size());
    stack.layer(layer).prefill(5, {q.data(), 150, 8, 64}, {k.data(), 150, 2, 64},
                               {v.data(), 150, 2, 64}, {out.data(), 150, 8, 64});
  }
  std::size_t sum = 0;
  for (int layer = 0; layer < 3; ++layer) sum += stack.layer(layer).memory(5).total();
  CHECK(stack.memory(5).total() == sum);
  CHECK(stack.memory().total() == sum);
  stack.fork(5, 6);
  CHECK_THROWS_AS(stack.fork(5, 7), CapacityError);
  CHECK_THROWS_WITH_AS(stack.truncate(6, 200), "truncate: length 200, sequence has 150 tokens",
                       ShapeError);
  CHECK(stack.rollback_limit(6) == 118);
  CHECK(stack.truncate(6, 120) == TruncateResult::exact);
  CHECK(stack.truncate(6, 100) == TruncateResult::inexact);
  CHECK(stack.num_tokens(6) == 100);
  CHECK(stack.num_tokens(5) == 150);
  for (int layer = 0; layer < 3; ++layer)
    stack.layer(layer).append(5, {k.data(), 40, 2, 64}, {v.data(), 40, 2, 64});
  stack.maintain(5);
  CHECK(stack.layer(2).tail_length(5) == 40);
  CHECK_THROWS_AS(stack.shift_positions(5, 0, 1), StateError);
  stack.erase(5);
  stack.erase(6);
  CHECK(stack.pool().allocator().num_free() == stack.pool().allocator().num_pages());
  CHECK_THROWS_AS(stack.erase(6), SequenceError);
  CHECK_THROWS_WITH_AS(LayerStack<OjaKV<>>({.shape = kShape}, {}),
                       "LayerStack: num_layers 0, at least 1 needed", ShapeError);
}

TEST_CASE("stacks may share a pool and threads that somebody else made") {
  const CacheConfig config{.shape = kShape, .max_sequences = 1, .max_tokens = 300};
  const std::vector<LayerBasis> bases{basis(), basis(12, 12)};
  using Stack = LayerStack<OjaKV<>>;
  const PoolSize size = Stack::pool_size(config, bases);
  CHECK(Stack(config, bases).pool().allocator().num_pages() == size.num_pages);
  CHECK(Stack(config, bases).pool().page_bytes() == size.page_bytes);
  CHECK_THROWS_AS(Stack::pool_size(config, {}), ShapeError);
  const CacheConfig two_threads{.shape = kShape, .num_threads = 2};
  const auto threads = OjaKV<>::make_shared({&two_threads, 1}, bases, {});
  const auto pool = std::make_shared<Stack::Pool>(size.page_bytes, 2 * size.num_pages);
  Stack one(config, bases, {}, threads, pool), two(config, bases, {}, threads, pool);
  CHECK(&one.pool() == pool.get());
  const std::vector<float> rows(200 * 2 * 64, 0.25F);
  for (Stack* stack : {&one, &two}) {
    stack->create(0);
    for (int layer = 0; layer < 2; ++layer)
      stack->layer(layer).ingest(0, {rows.data(), 200, 2, 64}, {rows.data(), 200, 2, 64},
                                 {rows.data(), 50, 8, 64});
  }
  CHECK(pool->allocator().num_free() < 2 * size.num_pages);
  CHECK(one.memory().reserved_bytes == two.memory().reserved_bytes);
  one.erase(0);
  two.erase(0);
  CHECK(pool->allocator().num_free() == 2 * size.num_pages);
}

TEST_CASE(
    "the layers of a stack move their tokens together or not at all, and a saved stack whose "
    "layers disagree is refused") {
  const CacheShape shape{1, 1, 8};
  CacheConfig config{.shape = shape, .max_sequences = 2};
  config.rope.keys = Rope::pre;
  LayerStack<FullKV<>> stack(config, std::vector<LayerBasis>(2));
  std::vector<float> rows(10 * 8, 1.0F);
  stack.create(0);
  stack.layer(0).append(0, {rows.data(), 10, 1, 8}, {rows.data(), 10, 1, 8});
  stack.layer(1).append(0, {rows.data(), 4, 1, 8}, {rows.data(), 4, 1, 8});
  CHECK_THROWS_WITH_AS(stack.shift_positions(0, 8, 5),
                       "shift_positions: token 8, sequence has 4 tokens", ShapeError);
  CHECK_THROWS_WITH_AS(stack.divide_positions(0, 2, 6, 2),
                       "divide_positions: 6 tokens from token 2 on, sequence has 4 tokens",
                       ShapeError);
  CHECK(stack.position(0, 10) == 10);
  CHECK_THROWS_WITH_AS(stack.truncate(0, 8), "truncate: length 8, sequence has 4 tokens",
                       ShapeError);
  CHECK(stack.layer(0).num_tokens(0) == 10);
  stack.layer(1).append(0, {rows.data(), 6, 1, 8}, {rows.data(), 6, 1, 8});
  stack.shift_positions(0, 8, 5);
  CHECK(stack.position(0, 9) == 14);
  CHECK(stack.layer(1).position(0, 9) == 14);
  stack.divide_positions(0, 2, 5, 3);
  CHECK(stack.layer(0).position(0, 6) == 2);
  CHECK(stack.layer(1).position(0, 7) == 7);
  std::vector<std::byte> saved(stack.save_bytes(0));
  stack.save(0, saved);
  stack.load(1, saved);
  CHECK(stack.layer(1).position(1, 9) == 14);
  stack.erase(1);
  stack.layer(1).shift_positions(0, 3, 1);
  saved.resize(stack.save_bytes(0));
  stack.save(0, saved);
  CHECK_THROWS_WITH_AS(stack.load(1, saved),
                       "saved state: layer 1 moved its tokens otherwise than layer 0", FormatError);
  saved[7] = std::byte{0};
  CHECK_THROWS_WITH_AS(stack.load(1, saved),
                       "saved state: begins with 'LRKVSTK\\x00', expected 'LRKVSTK1'", FormatError);
  CHECK(!stack.layer(0).contains(1));
}

TEST_CASE("layers of a stack may store their rows in ways of their own") {
  support::Random random(19);
  CacheConfig rotated{.shape = {2, 1, 16}, .max_sequences = 2, .max_tokens = 200};
  rotated.rope.keys = Rope::pre;
  std::vector<CacheConfig> configs(4, rotated);
  configs[1].full_row_bits = 8;
  configs[2].rope = {};  // a layer without a rotary embedding
  configs[2].softmax_scale = 0.125F;
  configs[3].full_type = DType::f32;
  using Stack = LayerStack<FullKV<>>;
  Stack stack(configs, std::vector<LayerBasis>(4));
  CHECK(stack.pool().page_bytes() == 16 * 2 * 16 * 4);  // the largest of the layers' defaults
  const auto q = support::random_rows(random, 180, 2, 16),
             k = support::random_rows(random, 180, 1, 16),
             v = support::random_rows(random, 180, 1, 16);
  std::vector<std::size_t> bytes;
  const auto check = [&](Stack& own, SequenceId seq) {
    for (int layer = 0; layer < 4; ++layer) {
      CacheConfig config = configs[static_cast<std::size_t>(layer)];
      config.page_bytes = own.pool().page_bytes();
      FullKV<> alone(config);
      alone.create(0);
      alone.ingest(0, {k.data(), 180, 1, 16}, {v.data(), 180, 1, 16});
      alone.maintain(0);
      std::vector<float> out(32), expected(32);
      own.layer(layer).attend(seq, {q.data(), 1, 2, 16}, {out.data(), 1, 2, 16});
      alone.attend(0, {q.data(), 1, 2, 16}, {expected.data(), 1, 2, 16});
      CHECK(out == expected);
      CHECK(own.layer(layer).memory(seq).total() == alone.memory(0).total());
      bytes.push_back(alone.memory(0).total());
    }
  };
  stack.create(0);
  for (int layer = 0; layer < 4; ++layer)
    stack.layer(layer).ingest(0, {k.data(), 180, 1, 16}, {v.data(), 180, 1, 16});
  stack.maintain(0);
  check(stack, 0);
  CHECK(bytes[1] < bytes[0]);
  CHECK(bytes[2] == bytes[0]);
  CHECK(bytes[3] > bytes[0]);
  // Saved and loaded, by stacks whose layers are the same, and no others.
  std::vector<std::byte> saved(stack.save_bytes(0));
  stack.save(0, saved);
  Stack other(configs, std::vector<LayerBasis>(4));
  other.load(1, saved);
  check(other, 1);
  CHECK_THROWS_WITH_AS(Stack(rotated, std::vector<LayerBasis>(4)).load(1, saved),
                       "full_row_bits: cache 0, saved 8", ShapeError);
  // A layer whose keys are stored as they arrived cannot move its tokens: then none does.
  CHECK_THROWS_AS(stack.shift_positions(0, 5, 3), StateError);
  CHECK(stack.position(0, 179) == 179);
}

TEST_CASE("layers of a stack have in common what their sequences and their pool need") {
  using Stack = LayerStack<FullKV<>>;
  const std::vector<CacheConfig> configs(
      4, {.shape = {2, 1, 16}, .max_sequences = 2, .max_tokens = 200});
  const std::vector<LayerBasis> bases(4);
  CHECK_THROWS_WITH_AS(Stack({configs.begin(), configs.begin() + 3}, bases),
                       "configs: 3, one for all layers or num_layers 4 expected", ShapeError);
  CHECK_THROWS_WITH_AS(Stack(std::vector<CacheConfig>(), bases),
                       "configs: 0, one for all layers or num_layers 4 expected", ShapeError);
  std::vector<CacheConfig> wrong = configs;
  wrong[3].shape = {4, 2, 16};
  CHECK_THROWS_WITH_AS(
      Stack(wrong, bases),
      "shape: layer 0 has 2 and 1 heads of 16, layer 3 has 4 and 2 of 16; the same "
      "expected",
      ShapeError);
  const auto message_with = [&](auto&& change) {
    wrong = configs;
    change(wrong[2]);
    try {
      Stack refused(wrong, bases);
    } catch (const ValueError& error) {
      return std::string(error.what());
    }
    return std::string("nothing was raised");
  };
  CHECK(message_with([](CacheConfig& own) { own.max_sequences = 3; }) ==
        "max_sequences: layer 0 has 2, layer 2 has 3; the same expected");
  CHECK(message_with([](CacheConfig& own) { own.max_tokens = 100; }) ==
        "max_tokens: layer 0 has 200, layer 2 has 100; the same expected");
  CHECK(message_with([](CacheConfig& own) { own.page_bytes = 4096; }) ==
        "page_bytes: layer 0 has 0, layer 2 has 4096; the same expected");
  CHECK(message_with([](CacheConfig& own) { own.num_pages = 7; }) ==
        "num_pages: layer 0 has 0, layer 2 has 7; the same expected");
  CHECK(message_with([](CacheConfig& own) { own.flush_interval = 8; }) ==
        "flush_interval: layer 0 has 32, layer 2 has 8; the same expected");
  CHECK(message_with([](CacheConfig& own) { own.tail_capacity = 99; }) ==
        "tail_capacity: layer 0 has 0, layer 2 has 99; the same expected");
  CHECK(message_with([](CacheConfig& own) { own.prefill_chunk = 16; }) ==
        "prefill_chunk: layer 0 has 0, layer 2 has 16; the same expected");
  CHECK(message_with([](CacheConfig& own) { own.max_query_tokens = 2; }) ==
        "max_query_tokens: layer 0 has 1, layer 2 has 2; the same expected");
  CHECK(message_with([](CacheConfig& own) { own.num_threads = 2; }) ==
        "num_threads: layer 0 has 1, layer 2 has 2; the same expected");
}

TEST_CASE("a sequence may be given less room than others") {
  support::Random random(13);
  CacheConfig config{.shape = {2, 1, 16}, .max_sequences = 3, .max_tokens = 100};
  LayerStack<FullKV<>> stack(config, {{}, {}});
  stack.create(0);
  stack.create(1);
  const auto rows = support::random_rows(random, 100, 1, 16);
  const auto ingest = [&](SequenceId seq, std::int64_t n) {
    for (int layer = 0; layer < 2; ++layer)
      stack.layer(layer).ingest(seq, {rows.data(), n, 1, 16}, {rows.data(), n, 1, 16});
  };
  CHECK(stack.layer(0).max_tokens(0) == 100);
  CHECK_THROWS_WITH_AS(stack.limit(0, 101), "limit: max_tokens 101, those of the cache are 100",
                       CapacityError);
  stack.limit(0, 40);
  CHECK_THROWS_WITH_AS(ingest(0, 41), "max_tokens: 40, sequence has 0, given 41", CapacityError);
  ingest(0, 39);
  CHECK_THROWS_WITH_AS(stack.limit(0, 38), "limit: max_tokens 38, sequence has 39", CapacityError);
  stack.fork(0, 2);
  CHECK(stack.layer(1).max_tokens(2) == 40);
  const std::vector<SequenceId> two{0, 2};
  CHECK_THROWS_WITH_AS(stack.layer(0).append(two, {rows.data(), 4, 1, 16}, {rows.data(), 4, 1, 16}),
                       "max_tokens: 40, sequence 0 has 39, given 2", CapacityError);
  stack.limit(0, 41);
  CHECK_THROWS_WITH_AS(stack.layer(0).append(two, {rows.data(), 4, 1, 16}, {rows.data(), 4, 1, 16}),
                       "max_tokens: 40, sequence 2 has 39, given 2", CapacityError);
  ingest(1, 100);  // others are as before
  stack.erase(0);
  stack.create(3);
  CHECK(stack.layer(0).max_tokens(3) == 100);
  CHECK_THROWS_AS(stack.limit(0, 5), SequenceError);
}

}  // namespace layer_stack_tests
