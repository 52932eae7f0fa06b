// SPDX-License-Identifier: Apache-2.0
// Layers of a stack on the CPU that are called from several threads at a time: they share pages and
// threads, and answer bit for bit as layers that are called one after the other. Built under the
// thread sanitizer by check.sh's part `sanitizers`.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "lowrankkv/layer_stack.hpp"
#include "lowrankkv/presets.hpp"
#include "support/blocks.hpp"
#include "support/grouped_cache.hpp"
#include "support/random_layer.hpp"

namespace layer_stack_threads_tests {

using namespace lowrankkv;
using namespace support::grouped;

// Bases that move: every flush takes pages, publishes epochs and merges segments.
using Cache = OjaKV<>;
using Stack = LayerStack<Cache>;

constexpr int kLayers = 4, kPrompt = 120, kSteps = 90;

std::vector<LayerBasis> bases() { return {basis(), basis(12, 12), basis(40, 8), basis(16, 48)}; }

CacheConfig config_of(int threads) {
  CacheConfig config{.shape = kShape, .max_sequences = 3, .max_tokens = 400};
  config.num_threads = threads;
  config.publish_interval = 40;
  return config;
}

/// What one layer is given, the same in every run.
struct Rows {
  explicit Rows(int layer) {
    support::Random random(static_cast<unsigned>(100 + layer));
    query = support::random_rows(random, kPrompt + kSteps, 8, 64);
    key = support::random_rows(random, kPrompt + kSteps, 2, 64);
    value = support::random_rows(random, kPrompt + kSteps, 2, 64);
  }
  QueryView queries(int first, int n) const {
    return {query.data() + std::ptrdiff_t{first} * 8 * 64, n, 8, 64};
  }
  KeyView keys(int first, int n) const {
    return {key.data() + std::ptrdiff_t{first} * 2 * 64, n, 2, 64};
  }
  ValueView values(int first, int n) const {
    return {value.data() + std::ptrdiff_t{first} * 2 * 64, n, 2, 64};
  }
  std::vector<float> query, key, value;
};

/// A stream of calls on one layer: what an engine that pipelines layers makes of it. Returns every
/// output.
std::vector<float> drive(Cache& layer, const Rows& rows) {
  std::vector<float> all(static_cast<std::size_t>(kPrompt * 8 * 64)), out(8 * 64);
  layer.prefill(1, rows.queries(0, kPrompt), rows.keys(0, kPrompt), rows.values(0, kPrompt),
                {all.data(), kPrompt, 8, 64});
  const auto ask = [&](SequenceId seq, int token) {
    layer.attend(seq, rows.queries(token, 1), {out.data(), 1, 8, 64});
    all.insert(all.end(), out.begin(), out.end());
  };
  layer.fork(1, 2);
  for (int token = kPrompt; token < kPrompt + kSteps; ++token) {
    for (const SequenceId seq : {1, 2}) {
      layer.append(seq, rows.keys(token, 1), rows.values(token, 1));
      ask(seq, token);
      if (layer.pages_to_maintain({&seq, 1}) > 0) layer.maintain(seq);
    }
    if (token == kPrompt + 50) {
      layer.remove(2, 40, 30);
      layer.truncate(1, 100);
      std::vector<std::byte> saved(layer.save_bytes(1));
      layer.save(1, saved);
      layer.load(3, saved);
      layer.append(3, rows.keys(token, 1), rows.values(token, 1));
      ask(3, token);
      all.push_back(static_cast<float>(layer.memory(3).total()));
      layer.erase(3);
      static_cast<void>(layer.memory());  // counts the pages that are free just now
    }
  }
  return all;
}

std::vector<float> one_after_the_other(int layer) {
  static const std::vector<std::vector<float>> answers = [] {
    Stack stack(config_of(1), bases());
    stack.create(1);
    std::vector<std::vector<float>> all;
    for (int i = 0; i < kLayers; ++i) all.push_back(drive(stack.layer(i), Rows(i)));
    return all;
  }();
  return answers[static_cast<std::size_t>(layer)];
}

/// Calls drive() of each layer on a thread of its own.
std::vector<std::vector<float>> at_once(Stack& stack) {
  std::vector<std::vector<float>> answers(kLayers);
  std::vector<std::string> errors(kLayers);
  std::latch start(kLayers);
  std::vector<std::thread> threads;
  for (int i = 0; i < kLayers; ++i)
    threads.emplace_back([&, i] {
      const Rows rows(i);
      start.arrive_and_wait();
      try {
        answers[static_cast<std::size_t>(i)] = drive(stack.layer(i), rows);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(i)] = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) CHECK(error == "");
  return answers;
}

TEST_CASE("layers of a stack may be called from different threads at a time") {
  const PoolSize size = Stack::pool_size(config_of(1), bases());
  std::vector<std::int32_t> numbers;
  for (std::int64_t page = 0; page < size.num_pages; ++page)
    numbers.push_back(static_cast<std::int32_t>(page));
  for (const int threads : {1, 3}) {
    for (const bool engine : {false, true}) {  // the pool's own pages, or an engine's
      CAPTURE(threads);
      CAPTURE(engine);
      const auto pool = std::make_shared<Stack::Pool>(
          size.page_bytes, size.num_pages,
          engine ? std::make_shared<support::Blocks>(numbers) : nullptr);
      Stack stack(config_of(threads), bases(), {}, {}, pool);
      stack.create(1);
      const std::vector<std::vector<float>> answers = at_once(stack);
      for (int i = 0; i < kLayers; ++i) {
        CAPTURE(i);
        CHECK(answers[static_cast<std::size_t>(i)] == one_after_the_other(i));
      }
      // And the stack is whole: no page is lost, none is in two lists.
      stack.maintain(1);
      for (const SequenceId seq : {1, 2}) stack.erase(seq);
      CHECK(pool->allocator().num_free() == size.num_pages);
    }
  }
}

TEST_CASE("a pool that is too small for all layers at a time refuses calls, and nothing is lost") {
  Stack whole(config_of(1), bases());
  whole.create(1);
  std::vector<std::vector<float>> expected(kLayers, std::vector<float>(8 * 64));
  std::int64_t used = 0, most = 0;
  for (int i = 0; i < kLayers; ++i) {
    const Rows rows(i);
    const std::int64_t before = whole.pool().allocator().num_free();
    whole.layer(i).ingest(1, rows.keys(0, kPrompt), rows.values(0, kPrompt),
                          rows.queries(0, kPrompt));
    whole.layer(i).attend(1, rows.queries(kPrompt - 1, 1),
                          {expected[static_cast<std::size_t>(i)].data(), 1, 8, 64});
    const std::int64_t taken = before - whole.pool().allocator().num_free();
    used += taken;
    most = std::max(most, taken);
  }
  // A call takes what it may need at most, and gives back what it has not used.
  const auto pool = std::make_shared<Stack::Pool>(
      Stack::pool_size(config_of(1), bases()).page_bytes, most + used / 2);
  Stack poor(config_of(1), bases(), {}, {}, pool);
  std::vector<int> stored(kLayers), refused(kLayers), wrong(kLayers);
  std::latch start(kLayers);
  std::vector<std::thread> threads;
  for (int i = 0; i < kLayers; ++i)
    threads.emplace_back([&, i] {
      const auto at = static_cast<std::size_t>(i);
      const Rows rows(i);
      Cache& layer = poor.layer(i);
      std::vector<float> out(8 * 64);
      start.arrive_and_wait();
      for (int round = 0; round < 30; ++round) {
        layer.create(1);
        try {
          layer.ingest(1, rows.keys(0, kPrompt), rows.values(0, kPrompt), rows.queries(0, kPrompt));
          layer.attend(1, rows.queries(kPrompt - 1, 1), {out.data(), 1, 8, 64});
          ++stored[at];
          wrong[at] += out != expected[at];
        } catch (const CapacityError&) {
          ++refused[at];
          wrong[at] += layer.num_tokens(1) != 0;
        }
        layer.erase(1);
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < kLayers; ++i) {
    const auto at = static_cast<std::size_t>(i);
    CHECK(stored[at] + refused[at] == 30);
    CHECK(wrong[at] == 0);
  }
  CHECK(pool->allocator().num_free() == pool->allocator().num_pages());
}

}  // namespace layer_stack_threads_tests
