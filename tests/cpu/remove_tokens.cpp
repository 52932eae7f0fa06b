// SPDX-License-Identifier: Apache-2.0
// Tokens that leave the middle of a sequence.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/layer_stack.hpp"
#include "lowrankkv/presets.hpp"
#include "support/random_layer.hpp"

namespace remove_tokens_tests {

using namespace lowrankkv;

TEST_CASE(
    "tokens leave the middle of a sequence: the others keep their positions, forks keep them all, "
    "and what cannot be done changes nothing") {
  support::Random random(11);
  const CacheShape shape{2, 1, 32};
  CacheConfig config{.shape = shape, .max_sequences = 2, .max_tokens = 400, .page_bytes = 1024};
  config.rope.keys = Rope::pre;
  const LayerBasis maps = support::random_basis(random, shape, {.centred = false}, 16, 16);
  using Cache = StaticPCAHybrid<>;
  const std::int64_t pages = Cache::num_pages(config, maps, {}) / 2;  // for one sequence
  const auto rows = support::random_rows(random, 300, 1, 32);
  const std::vector<LayerBasis> bases{maps, maps};
  config.num_pages = 2 * pages;
  LayerStack<Cache> stack(config, bases);
  stack.create(0);
  for (int layer = 0; layer < 2; ++layer)
    stack.layer(layer).ingest(0, {rows.data(), 300, 1, 32}, {rows.data(), 300, 1, 32});
  const std::vector<float> query = support::random_rows(random, 1, 2, 32);
  const auto answer = [&](SequenceId seq) {
    std::vector<float> out(64);
    stack.layer(1).attend(seq, {query.data(), 1, 2, 32}, {out.data(), 1, 2, 32});
    return out;
  };
  const std::vector<float> before = answer(0);
  CHECK_THROWS_WITH_AS(stack.remove(0, 290, 11),
                       "remove: 11 tokens from token 290 on, sequence has 300 tokens", ShapeError);
  CHECK_THROWS_WITH_AS(stack.remove(0, -1, 2),
                       "remove: 2 tokens from token -1 on, sequence has 300 tokens", ShapeError);
  CHECK_THROWS_AS(stack.remove(3, 0, 1), SequenceError);
  CHECK(answer(0) == before);

  // A fork shares every page: those that change need copies of their own.
  stack.fork(0, 1);
  const std::int64_t needed = stack.layer(0).pages_to_remove(0, 100, 50) +
                              stack.layer(1).pages_to_remove(0, 100, 50),
                     free_pages = stack.pool().allocator().num_free();
  CHECK(needed > 0);
  CHECK(stack.layer(0).pages_to_remove(0, 280, 5) == 0);  // the tail is a sequence's own
  CHECK(needed < 2 * stack.layer(0).pages_to_remove(0, 0, 50));
  if (needed > free_pages) {
    CHECK_THROWS_AS(stack.remove(0, 100, 50), CapacityError);
    CHECK(stack.num_tokens(0) == 300);
  }
  const SequenceId other = 1;
  stack.erase(0);
  stack.remove(other, 100, 50);
  CHECK(stack.num_tokens(1) == 250);
  CHECK(stack.position(1, 99) == 99);
  CHECK(stack.position(1, 100) == 150);
  CHECK(stack.position(1, 250) == 300);
  stack.shift_positions(1, 100, -50);
  CHECK(stack.position(1, 250) == 250);
  CHECK(stack.layer(0).position_shifts(1).pieces().empty());

  // As a sequence that never had those tokens, whose rows were compressed one by one: the maps are
  // static.
  const std::vector<float> after = answer(1);
  std::vector<std::byte> saved(stack.save_bytes(1));
  stack.save(1, saved);
  stack.erase(1);
  stack.create(0);
  std::vector<float> left(rows.begin(), rows.begin() + 100 * 32);
  left.insert(left.end(), rows.begin() + 150 * 32, rows.end());
  for (int layer = 0; layer < 2; ++layer)
    stack.layer(layer).ingest(0, {left.data(), 250, 1, 32}, {left.data(), 250, 1, 32});
  CHECK(answer(0) == after);
  std::vector<std::byte> fresh(stack.save_bytes(0));
  stack.save(0, fresh);
  CHECK(saved == fresh);
}

}  // namespace remove_tokens_tests
