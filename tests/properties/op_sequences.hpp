// SPDX-License-Identifier: Apache-2.0
// Long random sequences of operations on one cache, every answer compared with the oracle.
#pragma once

#include <doctest/doctest.h>

#include <map>
#include <vector>

#include "support/effort.hpp"
#include "support/random_layer.hpp"
#include "lowrankkv/presets.hpp"

namespace properties {

using namespace support;

/// What a run draws its shapes and policies from.
struct Case {
  lowrankkv::CacheShape shape;
  int key_rank = 0, value_rank = 0;
  int sinks = 0, recent = 0, interval = 0;
  std::int64_t chunk = 0;
  std::int64_t publish_interval = 0;
  std::int64_t merge_rows = 0;
  lowrankkv::PerHead basis;
  lowrankkv::ScoreScope scope = lowrankkv::ScoreScope::kv_head;
};

/// Everything f32: the cache must agree with the oracle to f32 rounding.
template <class Cache>
class Driver {
 public:
  static constexpr bool adapts =
      std::is_same_v<decltype(Cache::PolicySet::updater), lowrankkv::Oja>;

  Driver(Random& random, const Case& what, int threads)
      : random_(random),
        case_(what),
        basis_(random_basis(random, what.shape, what.basis, what.key_rank, what.value_rank)) {
    lowrankkv::CacheConfig config;
    config.shape = what.shape;
    config.max_sequences = 4;
    config.max_tokens = support::length(900);
    config.full_type = lowrankkv::DType::f32;
    config.epoch_type = lowrankkv::DType::f32;
    config.flush_interval = what.interval;
    config.prefill_chunk = what.chunk;
    config.publish_interval = what.publish_interval;
    config.merge_rows = what.merge_rows;
    config.num_threads = threads;
    typename Cache::PolicySet policies;
    policies.basis = what.basis;
    policies.quantizer.type = lowrankkv::DType::f32;
    options_.num_qo_heads = what.shape.num_qo_heads;
    options_.num_kv_heads = what.shape.num_kv_heads;
    options_.head_dim = what.shape.head_dim;
    using Token = decltype(policies.token_policy);
    if constexpr (std::is_same_v<Token, lowrankkv::SinkRecent>) {
      policies.token_policy = {what.sinks, what.recent};
      options_.sinks = what.sinks;
      options_.recent = what.recent;
    } else if constexpr (std::is_same_v<Token, lowrankkv::KeepFull>) {
      policies.token_policy.recent = what.recent;
      options_.recent = what.recent;
      options_.compresses = false;
    }
    options_.interval = what.interval;
    options_.adapts = adapts;
    options_.max_epochs = Epochs::max_epochs;
    options_.rotate = Epochs::rotates_calibrated_rows;
    options_.chunk = what.chunk;
    int largest = 1;
    for (const auto& head : basis_.heads) {
      largest = std::max({largest, head.key_rank, head.value_rank});
      options_.row_elements += head.key_rank + head.value_rank;
      options_.epoch_elements +=
          static_cast<int>(head.key_down.size() + head.value_down.size() + head.query_down.size() +
                           head.key_mean.size() + head.value_mean.size());
    }
    options_.publish_interval = what.publish_interval != 0 ? what.publish_interval : 4 * largest;
    options_.merge_rows =
        what.merge_rows != 0 ? what.merge_rows : std::max(512, 16 * what.interval);
    if constexpr (adapts) {
      policies.updater.importance_scope = what.scope;
      options_.over_heads = what.scope == lowrankkv::ScoreScope::layer;
      options_.share = policies.updater.prefill_share;
      options_.window = policies.updater.importance_window;
      options_.prefill_rate = policies.updater.prefill_rate;
      options_.decode_rate = policies.updater.decode_rate;
    }
    cache_ = std::make_unique<Cache>(config, basis_, policies);
  }

  void run(int operations) {
    support::count_operations(operations);
    for (int i = 0; i < operations; ++i) {
      const int kind = draw(0, 9);
      if (oracles_.empty() || (kind == 0 && oracles_.size() < 4))
        start();
      else if (kind == 1 && oracles_.size() < 4)
        fork();
      else if (kind == 2 && oracles_.size() > 1)
        erase();
      else if (kind == 3)
        draw(0, 1) == 0 ? truncate() : remove();
      else if (kind == 4)
        draw(0, 2) > 0 ? check_reconstruct(pick()) : reload();
      else
        decode();
    }
    for (const auto& [seq, oracle] : oracles_) check_reconstruct(seq);
    while (!oracles_.empty()) erase();
    CHECK(cache_->pool().allocator().num_free() == cache_->pool().allocator().num_pages());
  }
  lowrankkv::CacheStatistics statistics() const { return cache_->statistics(); }

 private:
  template <class C>
  struct EpochOf;
  template <class Be, class Ba, class Up, class To, class Qu, class Ep>
  struct EpochOf<lowrankkv::CompressedKVCache<Be, Ba, Up, To, Qu, Ep>> {
    using type = Ep;
  };
  using Epochs = typename EpochOf<Cache>::type;

  int draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  lowrankkv::SequenceId pick() {
    auto entry = oracles_.begin();
    std::advance(entry, draw(0, static_cast<int>(oracles_.size()) - 1));
    return entry->first;
  }
  lowrankkv::KeyView keys(const std::vector<float>& rows) const {
    return {
        rows.data(),
        static_cast<std::int64_t>(rows.size()) / (case_.shape.num_kv_heads * case_.shape.head_dim),
        case_.shape.num_kv_heads, case_.shape.head_dim};
  }
  lowrankkv::ValueView values(const std::vector<float>& rows) const {
    return {rows.data(), keys(rows).num_tokens, case_.shape.num_kv_heads, case_.shape.head_dim};
  }

  void compare(const reference::Cache& oracle, const std::vector<float>& q,
               const std::vector<float>& out, const std::vector<float>& lse, std::int64_t token,
               int visible) {
    const auto& shape = case_.shape;
    for (int head = 0; head < shape.num_qo_heads; ++head) {
      const auto [expected, expected_lse] =
          oracle.attend(head, row_of(q, token, shape.num_qo_heads, head, shape.head_dim), visible);
      const double error = (row_of(out, token, shape.num_qo_heads, head, shape.head_dim) - expected)
                               .cwiseAbs()
                               .maxCoeff();
      REQUIRE(error <
              3e-4 * (1.0 + expected.cwiseAbs()
                                .maxCoeff()));  // f32 sums over up to 900 rows, logits up to ~30
      REQUIRE(std::abs(lse[static_cast<std::size_t>(token * shape.num_qo_heads + head)] -
                       expected_lse) < 3e-4 * (1.0 + std::abs(expected_lse)));
    }
  }

  /// A new sequence with a prompt, in random pieces.
  void start() {
    const auto& shape = case_.shape;
    const lowrankkv::SequenceId seq = next_++;
    cache_->create(seq);
    reference::Cache oracle(
        options_, options_.compresses ? reference_maps(basis_, shape.head_dim) : zero_maps());
    const int n = draw(1, support::length(260));
    const auto q = random_rows(random_, n, shape.num_qo_heads, shape.head_dim);
    const auto k = random_rows(random_, n, shape.num_kv_heads, shape.head_dim);
    const auto v = random_rows(random_, n, shape.num_kv_heads, shape.head_dim, 0.5);
    std::vector<float> out(q.size()), lse(static_cast<std::size_t>(n * shape.num_qo_heads));
    for (int done = 0; done < n;) {
      const int count = draw(1, n - done);
      const auto prompt =
          done + count < n ? lowrankkv::Prompt::continues : lowrankkv::Prompt::complete;
      const lowrankkv::QueryView query(q.data(), n, shape.num_qo_heads, shape.head_dim);
      const lowrankkv::OutputView result(out.data(), n, shape.num_qo_heads, shape.head_dim);
      cache_->prefill(seq, query.tokens(done, count), keys(k).tokens(done, count),
                      values(v).tokens(done, count), result.tokens(done, count),
                      lowrankkv::LseView(lse.data(), n, shape.num_qo_heads).tokens(done, count),
                      prompt);
      done += count;
    }
    for (int token = 0; token < n; ++token) {
      oracle.prefill_token(token_of(k, token, shape.num_kv_heads, shape.head_dim),
                           token_of(v, token, shape.num_kv_heads, shape.head_dim),
                           token_of(q, token, shape.num_qo_heads, shape.head_dim));
      if (token % 7 == 0 || token == n - 1) compare(oracle, q, out, lse, token, token + 1);
      if (oracle.chunk_full()) oracle.end_chunk();
      if (oracle.undecided()) break;
    }
    oracle.end_chunk();
    if (oracle.undecided()) return cache_->erase(seq);
    oracles_.emplace(seq, std::move(oracle));
  }
  /// Tokens appended, attended to, and flushed, for one or several sequences in one call.
  void decode() {
    const lowrankkv::CacheStatistics before = cache_->statistics();
    const auto& shape = case_.shape;
    std::vector<lowrankkv::SequenceId> seqs{pick()};
    for (const auto& [seq, oracle] : oracles_) {
      if (seq != seqs[0] && draw(0, 2) == 0) seqs.push_back(seq);
    }
    const int m = draw(1, case_.interval);
    for (const auto seq : seqs) {
      if (cache_->num_tokens(seq) + m > support::length(880)) return;
    }
    const std::int64_t n = static_cast<std::int64_t>(seqs.size()) * m;
    const auto q = random_rows(random_, n, shape.num_qo_heads, shape.head_dim);
    const auto k = random_rows(random_, n, shape.num_kv_heads, shape.head_dim);
    const auto v = random_rows(random_, n, shape.num_kv_heads, shape.head_dim, 0.5);
    std::vector<float> out(q.size()), lse(static_cast<std::size_t>(n * shape.num_qo_heads));
    cache_->append(seqs, keys(k), values(v));
    const std::int64_t queries = draw(1, m);  // the last few of the appended tokens
    std::vector<float> part;
    for (std::size_t i = 0; i < seqs.size(); ++i) {
      const auto row = static_cast<std::size_t>(shape.num_qo_heads * shape.head_dim);
      const auto end =
          q.begin() + static_cast<std::ptrdiff_t>((i + 1) * static_cast<std::size_t>(m) * row);
      part.insert(part.end(),
                  end - static_cast<std::ptrdiff_t>(static_cast<std::size_t>(queries) * row), end);
    }
    const std::int64_t rows = static_cast<std::int64_t>(seqs.size()) * queries;
    out.assign(part.size(), -1.0F);
    lse.assign(static_cast<std::size_t>(rows * shape.num_qo_heads), -1.0F);
    cache_->attend(seqs, {part.data(), rows, shape.num_qo_heads, shape.head_dim},
                   {out.data(), rows, shape.num_qo_heads, shape.head_dim},
                   {lse.data(), rows, shape.num_qo_heads});
    for (std::size_t i = 0; i < seqs.size(); ++i) {
      reference::Cache& oracle = oracles_.at(seqs[i]);
      for (int token = 0; token < m; ++token) {
        const std::int64_t row = static_cast<std::int64_t>(i) * m + token;
        oracle.append(token_of(k, row, shape.num_kv_heads, shape.head_dim),
                      token_of(v, row, shape.num_kv_heads, shape.head_dim));
      }
      for (std::int64_t token = 0; token < queries; ++token) {
        compare(oracle, part, out, lse, static_cast<std::int64_t>(i) * queries + token,
                oracle.size() - static_cast<int>(queries - token) + 1);
      }
      oracle.maintain();
    }
    cache_->maintain(seqs);
    if (Epochs::rotates_calibrated_rows) return;
    const lowrankkv::CacheStatistics after = cache_->statistics();
    REQUIRE(after.rows_reprojected - before.rows_reprojected <=
            (after.flushes - before.flushes) * options_.merge_rows * shape.num_kv_heads);
  }
  void fork() {
    const lowrankkv::SequenceId source = pick();
    cache_->fork(source, next_);
    oracles_.emplace(next_, oracles_.at(source));
    ++next_;
  }
  /// A sequence is saved, erased and loaded.
  void reload() {
    const lowrankkv::SequenceId seq = pick();
    std::vector<std::byte> saved(cache_->save_bytes(seq));
    cache_->save(seq, saved);
    cache_->erase(seq);
    cache_->load(seq, saved);
  }
  void erase() {
    const lowrankkv::SequenceId seq = pick();
    cache_->erase(seq);
    oracles_.erase(seq);
  }
  void truncate() {
    const lowrankkv::SequenceId seq = pick();
    reference::Cache& oracle = oracles_.at(seq);
    const int limit = static_cast<int>(cache_->rollback_limit(seq));
    REQUIRE(limit == oracle.flushed());
    const int length = draw(0, 3) == 0 ? draw(0, oracle.size()) : draw(limit, oracle.size());
    const auto result = cache_->truncate(seq, length);
    REQUIRE((result == lowrankkv::TruncateResult::exact) == (length >= limit));
    oracle.truncate(length);
    if (oracle.size() == 0) {  // nothing to attend to: start over
      cache_->erase(seq);
      oracles_.erase(seq);
    }
  }
  void remove() {
    const lowrankkv::SequenceId seq = pick();
    reference::Cache& oracle = oracles_.at(seq);
    const int first = draw(0, oracle.size() - 1),
              count = draw(0, std::min(oracle.size() - first, draw(0, 2) == 0 ? 900 : 40));
    if (count == oracle.size()) return;
    cache_->remove(seq, first, count);
    oracle.remove(first, count);
    REQUIRE(cache_->num_tokens(seq) == oracle.size());
    REQUIRE(cache_->rollback_limit(seq) == oracle.flushed());
  }
  void check_reconstruct(lowrankkv::SequenceId seq) {
    const auto& shape = case_.shape;
    const reference::Cache& oracle = oracles_.at(seq);
    const int first = draw(0, oracle.size() - 1);
    const int count = draw(1, oracle.size() - first);
    std::vector<float> k(static_cast<std::size_t>(count * shape.num_kv_heads * shape.head_dim)),
        v(k.size());
    cache_->reconstruct(seq, first, {k.data(), count, shape.num_kv_heads, shape.head_dim},
                        {v.data(), count, shape.num_kv_heads, shape.head_dim});
    for (int token = 0; token < count; ++token) {
      for (int head = 0; head < shape.num_kv_heads; ++head) {
        const reference::Row& row = oracle.row(head, first + token);
        const double error =
            std::max((row_of(k, token, shape.num_kv_heads, head, shape.head_dim) - row.key)
                         .cwiseAbs()
                         .maxCoeff(),
                     (row_of(v, token, shape.num_kv_heads, head, shape.head_dim) - row.value)
                         .cwiseAbs()
                         .maxCoeff());
        REQUIRE(error < 1e-4);
      }
    }
  }
  std::vector<reference::Maps> zero_maps() const {
    return std::vector<reference::Maps>(static_cast<std::size_t>(case_.shape.num_kv_heads));
  }

  Random& random_;
  Case case_;
  lowrankkv::LayerBasis basis_;
  reference::Options options_;
  std::unique_ptr<Cache> cache_;
  std::map<lowrankkv::SequenceId, reference::Cache> oracles_;
  lowrankkv::SequenceId next_ = 100;
};

/// Several random cases of one cache type. Shapes walk through head_dim 40 to 256 (small: 8 to 40),
/// groups 1 to 16, odd ranks. Returns the number of merges that happened, so that a test of merging
/// can tell that it tested something.
template <class Cache>
std::int64_t run_cases(std::uint64_t seed, int cases, int operations, bool query_aware) {
  Random random(seed_of(seed));
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  std::int64_t merges = 0;
  constexpr int usual_dims[] = {40, 64, 80, 96, 128, 256}, small_dims[] = {8, 8, 16, 16, 24, 40};
  const auto& dims = support::small() ? small_dims : usual_dims;
  constexpr int groups[] = {1, 2, 3, 4, 7, 8, 16};
  for (int i = 0; i < cases * support::effort(); ++i) {
    Case what;
    const int dim = dims[draw(0, i % 4 == 0 ? 5 : 3)];
    const int kv_heads = draw(1, support::small() ? 2 : 3);
    what.shape = {kv_heads * groups[draw(0, support::small() ? 2 : 6)], kv_heads, dim};
    what.key_rank = draw(1, dim);
    what.value_rank = draw(1, dim);
    what.sinks = draw(0, 2) * draw(0, support::length(20));
    what.recent = draw(0, support::length(40));
    what.interval = draw(1, support::length(32));
    what.chunk = draw(0, 1) * draw(1, support::length(100));
    what.publish_interval = draw(0, 1) * draw(1, support::length(60));
    what.merge_rows = draw(0, 2) * draw(1, 30);  // merges take several flushes
    what.basis.centred = draw(0, 1) == 1;
    if (query_aware) what.basis.key_metric = lowrankkv::KeyMetric::query_aware;
    what.scope = i % 2 == 0 ? lowrankkv::ScoreScope::kv_head : lowrankkv::ScoreScope::layer;
    CAPTURE(seed);
    CAPTURE(i);
    CAPTURE(dim);
    Driver<Cache> driver(random, what, draw(1, 2));
    driver.run(operations);
    merges += driver.statistics().merges;
  }
  return merges;
}

}  // namespace properties
