// SPDX-License-Identifier: Apache-2.0
// What a cache takes: every byte, no allocation in append and attend, a pool in memory of the
// caller.
#include <doctest/doctest.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "lowrankkv/presets.hpp"
#include "support/grouped_cache.hpp"
#include "support/random_layer.hpp"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"  // the replacements below do match
#endif
namespace memory_tests {
namespace {
std::atomic<long> allocations{0};
}
}  // namespace memory_tests
void* operator new(std::size_t size) {
  ++memory_tests::allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace memory_tests {

using namespace lowrankkv;
using namespace support::grouped;

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

TEST_CASE("append and attend allocate nothing") {
  support::Random random(3);
  const int n = 700;
  const auto q = support::random_rows(random, n, 8, 64), k = support::random_rows(random, n, 2, 64),
             v = support::random_rows(random, n, 2, 64);
  for (const bool pre_rope : {false, true}) {
    CacheConfig config{.shape = kShape,
                       .max_sequences = 2,
                       .full_row_bits = pre_rope ? 8 : 0,
                       .num_threads = pre_rope ? 1 : 2};
    if (pre_rope) config.rope.keys = Rope::pre;
    OjaKV<> cache(config, basis());
    cache.create(0);
    cache.ingest(0, {k.data(), n, 2, 64}, {v.data(), n, 2, 64}, {q.data(), n, 8, 64});
    if (pre_rope) cache.shift_positions(0, 300, 17);
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

TEST_CASE("attend to splits on several threads allocates nothing") {
  support::Random random(4);
  const int n = 6500;
  const auto q = support::random_rows(random, 1, 8, 64), k = support::random_rows(random, n, 2, 64);
  StaticPCAHybrid<> cache({.shape = kShape, .max_tokens = n, .num_threads = 2}, basis());
  cache.create(0);
  cache.ingest(0, {k.data(), n - 1, 2, 64}, {k.data(), n - 1, 2, 64});
  cache.append(0, {k.data(), 1, 2, 64}, {k.data(), 1, 2, 64});
  std::vector<float> out(8 * 64);
  const long before = allocations;
  for (int step = 0; step < 3; ++step)
    cache.attend(0, {q.data(), 1, 8, 64}, {out.data(), 1, 8, 64});
  CHECK(allocations == before);
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

}  // namespace memory_tests
