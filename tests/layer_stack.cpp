// SPDX-License-Identifier: Apache-2.0
// Layers that share a pool, threads and sequences; what is done to all of them or to none.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
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
  const auto threads = OjaKV<>::make_shared({.shape = kShape, .num_threads = 2}, bases, {});
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
