// SPDX-License-Identifier: Apache-2.0
// After any error a cache is as it was: every allocation, every page that a source hands out and
// every call of a policy fails in turn, in every operation.
#pragma once

#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lowrankkv/compressed_kv_cache.hpp"
#include "lowrankkv/layer_stack.hpp"

namespace undo {

using namespace lowrankkv;

/// What fails: the n-th event of one kind while armed. Events are counted by failing_new.cpp, by
/// Source, by policies of the tests and by an allocator of device memory.
enum class Event { allocation, take, taken_page, policy, device_allocation, launch };
struct Failure {
  std::atomic<bool> armed{false}, came{false};
  std::atomic<long> left{0};
  Event kind = Event::allocation;
  bool (*ignored)() = nullptr;  ///< whether events of this moment do not count
};
inline Failure failure;
inline std::atomic<long> num_freed{0};  ///< blocks that operator delete has freed
inline void arm(Event kind, long n) {
  failure.kind = kind;
  failure.left = n;
  failure.came = false;
  failure.armed = true;
}
/// Ends it. @return whether the event came to pass
inline bool disarm() {
  failure.armed = false;
  return failure.came;
}
/// Whether this event is the one that fails.
inline bool fails(Event kind) {
  if (!failure.armed || kind != failure.kind) return false;
  if (failure.ignored != nullptr && failure.ignored()) return false;
  if (failure.left.fetch_sub(1) != 0) return false;
  failure.came = true;
  failure.armed = false;  // once: throwing allocates
  return true;
}

/// An engine's block manager.
class Source : public PageSource {
 public:
  explicit Source(std::int32_t pages) {
    for (std::int32_t page = pages; page-- > 0;) free_.push_back(page);
  }
  std::int64_t num_free() const override { return static_cast<std::int64_t>(free_.size()); }
  std::int32_t take() override {
    if (fails(Event::take)) throw std::runtime_error("engine: no block");
    if (fails(Event::taken_page) && !out.empty()) return *out.begin();
    const std::int32_t page = free_.back();
    out.insert(page);
    free_.pop_back();
    return page;
  }
  void release(std::int32_t page) noexcept override {
    out.erase(page);
    free_.push_back(page);
  }
  std::unordered_set<std::int32_t> out;

 private:
  std::vector<std::int32_t> free_;
};

/// Numbers where a backend's views point to.
template <class Pool>
struct Memory {
  using Array = std::vector<float>;
  static const std::vector<float>& host(const Array& array) { return array; }
};

/// Rows of a stream.
template <class Pool>
class Rows {
 public:
  using Array = typename Memory<Pool>::Array;
  static constexpr std::int64_t kTokens = 700;
  explicit Rows(const CacheShape& shape)
      : shape_(shape),
        q(normal(1, shape.num_qo_heads)),
        k(normal(2, shape.num_kv_heads)),
        v(normal(3, shape.num_kv_heads)),
        out(static_cast<std::size_t>(kTokens * shape.num_qo_heads * shape.head_dim)) {}
  QueryView query(std::int64_t first, std::int64_t n) const {
    return QueryView(q.data(), kTokens, shape_.num_qo_heads, shape_.head_dim).tokens(first, n);
  }
  KeyView key(std::int64_t first, std::int64_t n) const {
    return KeyView(k.data(), kTokens, shape_.num_kv_heads, shape_.head_dim).tokens(first, n);
  }
  ValueView value(std::int64_t first, std::int64_t n) const {
    return ValueView(v.data(), kTokens, shape_.num_kv_heads, shape_.head_dim).tokens(first, n);
  }
  OutputView output(std::int64_t n) {
    return {out.data(), n, shape_.num_qo_heads, shape_.head_dim};
  }

 private:
  std::vector<float> normal(unsigned seed, int heads) const {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> number;
    std::vector<float> rows(static_cast<std::size_t>(kTokens * heads * shape_.head_dim));
    for (float& value : rows) value = number(random);
    return rows;
  }
  CacheShape shape_;
  Array q, k, v, out;
};

/// Everything that a caller can learn about a cache.
struct Seen {
  std::vector<std::vector<std::byte>> saved;
  std::vector<std::vector<float>> rows;
  std::vector<std::int64_t> numbers, statistics;
  friend bool operator==(const Seen&, const Seen&) = default;
};

/// One layer, or a stack of three, with sequences 1 (long), 2 (a fork of it that went on) and 3
/// (its prompt goes on).
template <class Cache, bool stacked>
class Setup {
 public:
  using Stack = LayerStack<Cache>;
  using Pool = typename Cache::Pool;
  Setup(const CacheConfig& config, const LayerBasis& basis)
      : rows(config.shape), shape_(config.shape) {
    const int num_layers = stacked ? 3 : 1;
    const PoolSize size = Cache::pool_size({&config, 1}, {&basis, 1}, {});
    const std::int64_t pages = num_layers * size.num_pages;
    source_ = std::make_shared<Source>(static_cast<std::int32_t>(pages));
    pool_ = std::make_shared<Pool>(size.page_bytes, pages, source_);
    if constexpr (stacked) {
      stack_ = std::make_unique<Stack>(
          config, std::vector<LayerBasis>(static_cast<std::size_t>(num_layers), basis),
          typename Cache::PolicySet{}, typename Stack::Shared{}, pool_);
      for (int i = 0; i < num_layers; ++i) layers.push_back(&stack_->layer(i));
    } else {
      cache_ = std::make_unique<Cache>(config, basis, typename Cache::PolicySet{}, pool_);
      layers.push_back(cache_.get());
    }
    for (Cache* layer : layers) {
      layer->create(1);
      layer->ingest(1, rows.key(0, 150), rows.value(0, 150), rows.query(0, 150));
      layer->append_maintained(1, rows.key(150, 60), rows.value(150, 60));
      layer->fork(1, 2);
      layer->append_maintained(2, rows.key(300, 13), rows.value(300, 13));
      layer->create(3);
      layer->prefill(3, rows.query(0, 30), rows.key(0, 30), rows.value(0, 30), rows.output(30), {},
                     Prompt::continues);
      layer->append(1, rows.key(210, 9), rows.value(210, 9));
    }
  }
  Cache& cache() { return *layers.front(); }
  Stack& stack() { return *stack_; }

  Seen seen() const {
    Seen all;
    for (const Cache* layer : layers) {
      for (SequenceId seq = 1; seq <= 5; ++seq) {
        all.numbers.push_back(layer->contains(seq) ? 1 : 0);
        if (!layer->contains(seq)) continue;
        if (is_unusable(*layer, seq)) {
          all.numbers.push_back(-2);
          continue;
        }
        const std::int64_t n = layer->num_tokens(seq);
        const int heads = shape_.num_kv_heads, dim = shape_.head_dim;
        const std::size_t size = static_cast<std::size_t>(n * heads * dim);
        typename Memory<Pool>::Array keys(size), values(size);
        layer->reconstruct(seq, 0, {keys.data(), n, heads, dim}, {values.data(), n, heads, dim});
        all.rows.push_back(Memory<Pool>::host(keys));
        all.rows.push_back(Memory<Pool>::host(values));
        // Memory for the rows of a prompt that goes on may stay larger.
        const MemoryUsage memory = layer->memory(seq);
        all.numbers.insert(all.numbers.end(),
                           {n, layer->tail_length(seq),
                            static_cast<std::int64_t>(memory.total() - memory.pending_bytes)});
        try {
          auto& saved = all.saved.emplace_back(layer->save_bytes(seq));
          layer->save(seq, saved);
        } catch (const StateError&) {  // its prompt goes on
          all.numbers.push_back(-1);
        }
      }
      all.numbers.push_back(layer->num_free_sequences());
      const CacheStatistics counts = layer->statistics();
      all.statistics.insert(all.statistics.end(), {counts.flushes, counts.merges,
                                                   counts.publications, counts.rows_reprojected});
    }
    all.numbers.push_back(static_cast<std::int64_t>(source_->out.size()));
    all.numbers.push_back(pool_->allocator().num_free());
    return all;
  }
  std::vector<std::byte> saved(SequenceId seq) const {
    if constexpr (stacked) {
      std::vector<std::byte> bytes(stack_->save_bytes(seq));
      stack_->save(seq, bytes);
      return bytes;
    } else {
      std::vector<std::byte> bytes(cache_->save_bytes(seq));
      cache_->save(seq, bytes);
      return bytes;
    }
  }

  /// Sequences that a failed call has left unusable.
  std::vector<SequenceId> unusable() const {
    std::vector<SequenceId> all;
    for (SequenceId seq = 1; seq <= 5; ++seq) {
      if (layers.front()->contains(seq) && is_unusable(*layers.front(), seq)) all.push_back(seq);
    }
    return all;
  }
  void erase(const std::vector<SequenceId>& seqs) {
    for (const SequenceId seq : seqs) layers.front()->erase(seq);
  }

  std::vector<Cache*> layers;
  Rows<Pool> rows;

 private:
  static bool is_unusable(const Cache& layer, SequenceId seq) {
    try {
      return layer.num_tokens(seq) < 0;
    } catch (const StateError&) {
      return true;
    }
  }
  CacheShape shape_;
  std::shared_ptr<Source> source_;
  std::shared_ptr<Pool> pool_;
  std::unique_ptr<Stack> stack_;
  std::unique_ptr<Cache> cache_;
};

template <class Cache>
constexpr bool has_streams = !std::is_empty_v<typename Cache::Stream>;

/// Fails the first, the second, ... event of each kind during `operation` until it succeeds. After
/// each failure the cache must be as it was; in the end as if nothing had failed.
///
/// On a device, what has been enqueued cannot be taken back. If a host allocation or a launch then
/// fails, the sequences of the call may be unusable, and everything else must be as it was.
template <class MakeSetup, class Operation>
void check_operation(const std::string& name, bool recovers_by_erasing, MakeSetup&& make,
                     Operation&& operation, std::vector<Event> kinds) {
  CAPTURE(name);
  auto expected = make();
  auto victim = make();
  const Seen before = victim->seen();
  REQUIRE(before == expected->seen());
  for (const Event kind : kinds) {
    CAPTURE(static_cast<int>(kind));
    // Step by step at first, later in longer steps: on a device, a failure costs a new setup.
    const bool costly = recovers_by_erasing && (kind == Event::allocation || kind == Event::launch);
    for (long n = 0;; n += 1 + n / (costly ? 2 : 40)) {
      CAPTURE(n);
      bool threw = false, failed = false;
      // Events that are counted in the run are those of the operation alone.
      arm(kind, n);
      try {
        operation(*victim);
        failed = disarm();
      } catch (const std::exception&) {
        failed = disarm();
        threw = true;
      }
      if (!failed) {
        CHECK_FALSE(threw);
        break;
      }
      REQUIRE(threw);
      if (const auto gone = victim->unusable(); costly && !gone.empty()) {
        victim->erase(gone);
        auto without = make();
        without->erase(gone);
        Seen rest = victim->seen();
        rest.statistics = without->seen().statistics;  // count what was done
        CHECK(rest == without->seen());
        victim = make();
        continue;
      }
      const bool as_it_was = victim->seen() == before;
      CHECK(as_it_was);
      if (!as_it_was) break;
    }
    if (kind != kinds.back()) victim = make();
  }
  operation(*expected);
  CHECK(victim->seen() == expected->seen());
}

/// All operations of one cache.
template <class Cache>
void check_cache(const CacheConfig& config, const LayerBasis& basis,
                 std::vector<Event> kinds = {Event::allocation, Event::take, Event::taken_page}) {
  using S = Setup<Cache, false>;
  const auto make = [&] { return std::make_unique<S>(config, basis); };
  const auto check = [&](const char* name, auto&& operation) {
    check_operation(name, has_streams<Cache>, make, operation, kinds);
  };
  check("create", [](S& s) { s.cache().create(4); });
  check("fork", [](S& s) { s.cache().fork(2, 4); });
  const std::vector<std::byte> saved = make()->saved(2);
  check("load", [&](S& s) { s.cache().load(4, saved); });
  check("append", [](S& s) { s.cache().append(1, s.rows.key(400, 3), s.rows.value(400, 3)); });
  check("append_maintained",
        [](S& s) { s.cache().append_maintained(1, s.rows.key(400, 50), s.rows.value(400, 50)); });
  check("append_maintained of a batch", [](S& s) {
    const SequenceId seqs[] = {2, 1};
    s.cache().append_maintained(seqs, s.rows.key(400, 14), s.rows.value(400, 14));
  });
  check("maintain", [](S& s) { s.cache().maintain(1); });
  check("prefill", [](S& s) {
    s.cache().prefill(1, s.rows.query(400, 100), s.rows.key(400, 100), s.rows.value(400, 100),
                      s.rows.output(100));
  });
  check("prefill goes on", [](S& s) {
    s.cache().prefill(3, s.rows.query(30, 100), s.rows.key(30, 100), s.rows.value(30, 100),
                      s.rows.output(100), {}, Prompt::continues);
  });
  check("ingest", [](S& s) {
    s.cache().ingest(3, s.rows.key(30, 70), s.rows.value(30, 70), s.rows.query(30, 70));
  });
  check("finish_prompt", [](S& s) { s.cache().finish_prompt(3); });
  check("remove", [](S& s) { s.cache().remove(1, 40, 50); });
  check("truncate", [](S& s) { s.cache().truncate(1, 90); });
  check("erase", [](S& s) { s.cache().erase(2); });
  check("attend", [](S& s) { s.cache().attend(1, s.rows.query(219, 1), s.rows.output(1)); });
}

/// Operations on a whole stack.
template <class Cache>
void check_stack(const CacheConfig& config, const LayerBasis& basis,
                 std::vector<Event> kinds = {Event::allocation, Event::take, Event::taken_page}) {
  using S = Setup<Cache, true>;
  const auto make = [&] { return std::make_unique<S>(config, basis); };
  const auto check = [&](const char* name, auto&& operation) {
    check_operation(name, has_streams<Cache>, make, operation, kinds);
  };
  const std::vector<std::byte> saved = make()->saved(2);
  check("create", [](S& s) { s.stack().create(4); });
  check("fork", [](S& s) { s.stack().fork(2, 4); });
  check("load", [&](S& s) { s.stack().load(4, saved); });
  check("maintain", [](S& s) { s.stack().maintain(1); });
  check("remove", [](S& s) { s.stack().remove(1, 40, 50); });
  check("truncate", [](S& s) { s.stack().truncate(1, 90); });
}

}  // namespace undo
