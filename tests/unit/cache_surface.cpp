// SPDX-License-Identifier: Apache-2.0
// What an engine relies on besides the numbers: bytes, allocation, layouts and types of its
// tensors, stacks of layers.
#include <doctest/doctest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"  // the replacements below do match
#endif
#define EIGEN_RUNTIME_NO_MALLOC
#include "../support/random_layer.hpp"
#include "lowrankkv/layer_stack.hpp"
#include "lowrankkv/presets.hpp"

namespace {
std::atomic<long> allocations{0};
}
void* operator new(std::size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

using namespace lowrankkv;

namespace {
constexpr CacheShape kShape{8, 2, 64};
LayerBasis basis(int key_rank = 24, int value_rank = 32) {
  support::Random random(1);
  LayerBasis layer = support::random_basis(random, kShape, {}, key_rank, value_rank);
  return layer;
}
}  // namespace

TEST_CASE("memory counts every byte once") {
  support::Random random(2);
  const int n = 500;
  const auto q = support::random_rows(random, n, 8, 64), k = support::random_rows(random, n, 2, 64),
             v = support::random_rows(random, n, 2, 64);
  OjaKV<> cache({.shape = kShape, .max_sequences = 2}, basis());
  cache.create(0);
  const std::size_t reserved = cache.memory().reserved_bytes;
  cache.ingest(0, {k.data(), n, 2, 64}, {v.data(), n, 2, 64}, {q.data(), n, 8, 64});
  const MemoryUsage usage = cache.memory(0);
  const LayerBasis maps = basis();
  std::size_t row = 0, epoch = 0, pages = 0;
  for (const HeadBasis& head : maps.heads) {
    const std::size_t ranks = static_cast<std::size_t>(head.key_rank + head.value_rank);
    row += 2 * ranks;
    epoch += 2 * 64 * ranks;
    const std::size_t per_page = 4096 / (2 * ranks);  // a page: 16 rows of 2 x 64 f16
    pages += (n - 64 + per_page - 1) / per_page + 2;  // and 32 sinks in 2 pages
  }
  CHECK(cache.statistics().publications == 1);
  CHECK(usage.coefficient_bytes == (n - 64) * row);
  CHECK(usage.full_row_bytes == 32 * 512);
  CHECK(usage.tail_bytes == 32 * 512);
  CHECK(usage.epoch_bytes == epoch);
  CHECK(usage.updater_bytes == 0);
  CHECK(usage.pending_bytes == 0);
  CHECK(usage.slack_bytes == pages * 4096 - usage.coefficient_bytes - usage.full_row_bytes);
  CHECK(usage.position_bytes == 2 * 2 * 8);  // per head: a run of sinks and one of compressed rows
  CHECK(usage.total() == pages * 4096 + 32 * 512 + epoch + usage.position_bytes);
  CHECK(cache.memory().reserved_bytes == reserved - pages * 4096 - 32 * 512);
  CHECK(cache.memory().shared_bytes ==
        epoch + 2 * epoch);  // the stored maps, and their f32 originals
  CHECK(cache.tokens_per_page(0) ==
        static_cast<int>(4096 / (2 * (maps.heads[0].key_rank + maps.heads[0].value_rank))));
  CHECK(cache.bytes_for(n - 64) == (pages - 4) * 4096);
  // One flush: the updater's working bases appear, in the type of the maps.
  cache.append_maintained(0, {k.data(), 40, 2, 64}, {v.data(), 40, 2, 64});
  CHECK(cache.memory(0).updater_bytes == epoch);
  cache.fork(0, 1);
  CHECK(cache.memory(1).total() == cache.memory(0).total());
  cache.erase(0);
  cache.erase(1);
  CHECK(cache.memory().total() == 0);
  CHECK(cache.memory().reserved_bytes == reserved);
}

TEST_CASE("what FullKV says of its pages is what it takes") {
  support::Random random(8);
  const auto k = support::random_rows(random, 352, 2, 64);
  FullKV<> cache({.shape = kShape, .full_type = DType::f32}, {}, {.token_policy = {.recent = 32}});
  cache.create(0);
  cache.ingest(0, {k.data(), 352, 2, 64}, {k.data(), 352, 2, 64});
  CHECK(cache.bytes_for(320) == cache.memory(0).full_row_bytes + cache.memory(0).slack_bytes);
}

namespace {
/// An updater that returns nonsense.
struct Broken {};
}  // namespace
template <>
struct lowrankkv::Impl<Broken, lowrankkv::Cpu> {
  static constexpr bool adapts = true;
  struct State {};
  static PromptSelection prompt_selection(const Broken&) { return {}; }
  static void observe(const Broken&, State&, MatrixView, MatrixView, Phase) {}
  static bool maybe_update(const Broken&, State&, MatrixView, MutableMatrixView updated, Phase) {
    for (std::int64_t row = 0; row < updated.rows; ++row)
      std::fill_n(updated.row(row), updated.cols, row % 2 == 0 ? 1.0F : 0.0F / 0.0F);
    return true;
  }
  static std::size_t state_bytes(const State&) { return 0; }
};

TEST_CASE("a basis that is no basis is not published") {
  support::Random random(9);
  const auto k = support::random_rows(random, 500, 2, 64),
             v = support::random_rows(random, 500, 2, 64);
  CompressedKVCache<Cpu, PerHead, Broken> cache({.shape = kShape}, basis());
  StaticPCAHybrid<> plain({.shape = kShape}, basis());
  cache.create(0);
  plain.create(0);
  cache.ingest(0, {k.data(), 500, 2, 64}, {v.data(), 500, 2, 64});
  plain.ingest(0, {k.data(), 500, 2, 64}, {v.data(), 500, 2, 64});
  CHECK(cache.statistics().rejected_updates == 4);
  CHECK(cache.statistics().publications == 0);
  CHECK(cache.memory(0).total() == plain.memory(0).total());
}

TEST_CASE("append and attend allocate nothing") {
  support::Random random(3);
  const int n = 700;
  const auto q = support::random_rows(random, n, 8, 64), k = support::random_rows(random, n, 2, 64),
             v = support::random_rows(random, n, 2, 64);
  for (const bool unrotated : {false, true}) {
    CacheConfig config{.shape = kShape,
                       .max_sequences = 2,
                       .full_row_bits = unrotated ? 8 : 0,
                       .num_threads = unrotated ? 1 : 2};
    if (unrotated) config.rope.keys = Rope::pre;
    OjaKV<> cache(config, basis());
    cache.create(0);
    cache.ingest(0, {k.data(), n, 2, 64}, {v.data(), n, 2, 64}, {q.data(), n, 8, 64});
    if (unrotated) cache.shift_positions(0, 300, 17);
    std::vector<float> out(8 * 64 * 8);
    cache.append(0, {k.data(), 1, 2, 64}, {v.data(), 1, 2, 64});
    cache.attend(0, {q.data(), 1, 8, 64}, {out.data(), 1, 8, 64});
    const long before = allocations;
    Eigen::internal::set_is_malloc_allowed(false);
    cache.append(0, {k.data(), 8, 2, 64}, {v.data(), 8, 2, 64});
    cache.attend(0, {q.data(), 8, 8, 64}, {out.data(), 8, 8, 64});
    Eigen::internal::set_is_malloc_allowed(true);
    CHECK(allocations == before);
  }
}

TEST_CASE("tensors of any type and layout are taken as they are") {
  support::Random random(4);
  const int n = 90;
  const auto q = support::random_rows(random, n, 8, 64);
  auto k = support::random_rows(random, n, 2, 64), v = support::random_rows(random, n, 2, 64);
  for (float& x : k) x = round_to(DType::bf16, x);
  for (float& x : v) x = round_to(DType::f16, x);
  StaticPCAHybrid<> plain({.shape = kShape}, basis()), foreign({.shape = kShape}, basis());
  std::vector<float> out(q.size()), transposed(q.size());
  plain.create(0);
  foreign.create(0);
  plain.prefill(0, {q.data(), n, 8, 64}, {k.data(), n, 2, 64}, {v.data(), n, 2, 64},
                {out.data(), n, 8, 64});
  // Keys as bf16 head-major, values as f16 with channels outermost, outputs head-major.
  std::vector<BFloat16> keys(k.size());
  std::vector<Half> values(v.size());
  for (int t = 0; t < n; ++t) {
    for (int h = 0; h < 2; ++h) {
      for (int i = 0; i < 64; ++i) {
        const std::size_t from = static_cast<std::size_t>((t * 2 + h) * 64 + i);
        keys[static_cast<std::size_t>((h * n + t) * 64 + i)] = to_bfloat16(k[from]);
        values[static_cast<std::size_t>((i * 2 + h) * n + t)] = to_half(v[from]);
      }
    }
  }
  foreign.prefill(0, {q.data(), n, 8, 64}, {keys.data(), DType::bf16, n, 2, 64, 64, n * 64},
                  {values.data(), DType::f16, n, 2, 64, 1, n, 2 * n},
                  {transposed.data(), n, 8, 64, 64, n * 64});
  for (int t = 0; t < n; ++t) {
    for (int h = 0; h < 8; ++h) {
      for (int i = 0; i < 64; ++i)
        CHECK(out[static_cast<std::size_t>((t * 8 + h) * 64 + i)] ==
              transposed[static_cast<std::size_t>((h * n + t) * 64 + i)]);
    }
  }
}

TEST_CASE("a caller's memory can be the pool") {
  std::vector<std::byte> memory(64 * 4096);
  auto pool = std::make_shared<Cpu::Pool>(memory.data(), 4096, 64);
  StaticPCAHybrid<> cache({.shape = kShape}, basis(), {}, pool);
  support::Random random(5);
  const auto k = support::random_rows(random, 200, 2, 64);
  cache.create(0);
  cache.ingest(0, {k.data(), 200, 2, 64}, {k.data(), 200, 2, 64});
  bool touched = false;
  for (const std::byte byte : memory) touched = touched || byte != std::byte{0};
  CHECK(touched);
  CHECK_THROWS_AS(Cpu::Pool(nullptr, 4096, 1), ShapeError);
}

TEST_CASE("the rates and the selection of Oja act") {
  support::Random random(6);
  const int n = 600;
  const auto q = support::random_rows(random, n, 8, 64), k = support::random_rows(random, n, 2, 64),
             v = support::random_rows(random, n, 2, 64);
  const auto stored = [&](const Oja& updater, bool decode) {
    OjaKV<>::PolicySet policies;
    policies.updater = updater;
    OjaKV<> cache({.shape = kShape, .publish_interval = 64}, basis(), policies);
    cache.create(0);
    const int prompt = decode ? 300 : n;
    cache.ingest(0, {k.data(), prompt, 2, 64}, {v.data(), prompt, 2, 64},
                 {q.data(), prompt, 8, 64});
    if (decode)
      cache.append_maintained(0, KeyView(k.data(), n, 2, 64).tokens(300, 300),
                              ValueView(v.data(), n, 2, 64).tokens(300, 300));
    std::vector<float> rows(static_cast<std::size_t>(2 * n * 128));
    cache.reconstruct(0, 0, {rows.data(), n, 2, 64}, {rows.data() + n * 128, n, 2, 64});
    return rows;
  };
  const auto base = stored({}, false);
  CHECK(base == stored({}, false));
  CHECK(base != stored({.prefill_rate = 0.3F}, false));
  CHECK(base != stored({.prefill_share = 0.5F}, false));
  CHECK(base != stored({.importance_window = 8}, false));
  CHECK(base != stored({.form = OjaForm::printed_normalised}, false));
  CHECK(base == stored({.decode_rate = 0.5F}, false));  // nothing was decoded
  CHECK(stored({}, true) != stored({.decode_rate = 0.5F}, true));
}

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
  CHECK(!stack.layer(0).contains(1));
}

TEST_CASE("8-bit full rows refuse what their steps cannot reach") {
  CacheConfig config{.shape = {1, 1, 8}, .full_type = DType::f32, .full_row_bits = 8};
  FullKV<> cache(config);
  cache.create(0);
  std::vector<float> rows(8, 8e6F);
  cache.append(0, {rows.data(), 1, 1, 8}, {rows.data(), 1, 1, 8});
  rows[3] = 1e8F;
  CHECK_THROWS_AS(cache.append(0, {rows.data(), 1, 1, 8}, {rows.data(), 1, 1, 8}), ValueError);
}

TEST_CASE(
    "tokens leave the middle of a sequence: the others keep their positions, forks keep them all, "
    "and what cannot be done changes nothing") {
  support::Random random(11);
  const CacheShape shape{2, 1, 32};
  CacheConfig config{.shape = shape, .max_sequences = 2, .max_tokens = 400, .page_bytes = 1024};
  config.rope.keys = Rope::pre;
  const LayerBasis maps = support::random_basis(random, shape, {}, 16, 16);
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

TEST_CASE("positions of tokens behind those that were removed") {
  PositionShifts shifts;
  std::vector<std::int64_t> positions;
  for (int i = 0; i < 200; ++i) positions.push_back(i);
  support::Random random(12);
  for (int step = 0; step < 300 && positions.size() > 20; ++step) {
    const std::int64_t first = static_cast<std::int64_t>(random() % (positions.size() - 1));
    if (step % 3 == 0) {
      const std::int64_t count = static_cast<std::int64_t>(random() % 4);
      if (first + count > static_cast<std::int64_t>(positions.size()) - 1) continue;
      shifts.remove(first, count);
      positions.erase(positions.begin() + first, positions.begin() + first + count);
    } else {
      const std::int64_t delta = static_cast<std::int64_t>(random() % 9) - 4;
      shifts.add(first, delta);
      for (std::size_t i = static_cast<std::size_t>(first); i < positions.size(); ++i)
        positions[i] += delta;
    }
    for (std::size_t i = 0; i < positions.size(); ++i)
      REQUIRE(shifts.position(static_cast<std::int64_t>(i)) == positions[i]);
    std::int64_t last = 0;
    for (const PositionShift& piece : shifts.pieces())
      REQUIRE(std::exchange(last, piece.offset) != piece.offset);
  }
  CHECK_THROWS_AS(detail::check_removal(shifts, 100, 50, 51, 1000), ShapeError);
  PositionShifts far;
  far.add(60, 990);
  CHECK_THROWS_WITH_AS(detail::check_removal(far, 100, 50, 11, 1000),
                       "remove: positions would be 1001 beyond their tokens, at most 1000",
                       ValueError);
  detail::check_removal(far, 100, 50, 10, 1000);
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
