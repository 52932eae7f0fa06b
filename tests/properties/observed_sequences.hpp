// SPDX-License-Identifier: Apache-2.0
// Random operations on any cache, checked against plain float64 attention over what the cache says
// it stores, and against what no policy may do: change a full row, bring back a dropped one, touch
// rows that are not concerned.
#pragma once

#include <doctest/doctest.h>

#include <Eigen/Dense>
#include <array>
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "support/effort.hpp"
#include "lowrankkv/presets.hpp"

namespace observed {

using namespace lowrankkv;
using Random = std::mt19937_64;

/// Everything about one sequence that a test can know: what went in, and what the cache said it
/// stored.
struct Sequence {
  std::vector<std::vector<float>> keys,
      values;  // per position: [num_kv_heads * head_dim], rounded as stored
  std::vector<std::vector<RowState>> states;  // per head, of the positions that have left the tail
  std::vector<std::vector<double>> accumulated;  // per head, accumulated attention
  std::vector<std::int64_t> positions;           // rotary position of every token
  std::int64_t next_position = 0;
};

/// What a cache type is tested with.
template <class Cache>
struct Setup {
  CacheConfig config;
  LayerBasis basis;  // empty: the policy's own maps, the identity
  typename Cache::PolicySet policies;
  bool stores_change = false;  // an updater may rewrite compressed rows
  double tolerance = 1e300;    // largest ||x^ - P x|| / ||x|| of a compressed row, P the calibrated
                               // projection; 1e300: not checked
};

template <class Cache>
class Driver {
 public:
  Driver(Random& random, Setup<Cache> setup) : random_(random), setup_(std::move(setup)) {
    setup_.config.max_sequences = 5;
    setup_.config.max_tokens = support::length(700);
    cache_ = std::make_unique<Cache>(setup_.config, setup_.basis, setup_.policies);
    if (setup_.basis.heads.empty()) setup_.basis = identity_basis(shape());
  }

  void run(int operations) {
    support::count_operations(operations);
    start();
    for (int i = 0; i < operations; ++i) {
      const int what = draw(0, 9);
      if (sequences_.empty() || (what == 0 && sequences_.size() < 4))
        start();
      else if (what <= 5)
        decode();
      else if (what == 6 && sequences_.size() < 4)
        fork();
      else if (what == 7 && draw(0, 1) == 0)
        shift();
      else if (what == 7)
        draw(0, 1) == 0 ? truncate() : remove();
      else if (what == 8 && draw(0, 3) == 0)
        erase();
      else if (what == 8)
        save_and_load();
      if (!sequences_.empty()) check(pick());
    }
    for (const auto& [seq, sequence] : sequences_) check(seq);
    dropped_ = 0;
    full_ = 0;
    compressed_ = 0;
    for (const auto& [seq, sequence] : sequences_) {
      for (const auto& head : sequence.states) {
        dropped_ += std::count(head.begin(), head.end(), RowState::dropped);
        full_ += std::count(head.begin(), head.end(), RowState::full);
        compressed_ += std::count(head.begin(), head.end(), RowState::compressed);
      }
    }
    while (!sequences_.empty()) erase();
    CHECK(cache_->pool().allocator().num_free() == cache_->pool().allocator().num_pages());
  }
  std::int64_t dropped() const { return dropped_; }
  std::int64_t full() const { return full_; }
  std::int64_t compressed() const { return compressed_; }
  Cache& cache() { return *cache_; }

 private:
  static constexpr bool accumulates_scores =
      requires(Cache & cache, SequenceId seq, const ScoreView& accumulated) {
    cache.accumulate(seq, accumulated);
  };
  const CacheShape& shape() const { return setup_.config.shape; }
  int draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  SequenceId pick() {
    auto entry = sequences_.begin();
    std::advance(entry, draw(0, static_cast<int>(sequences_.size()) - 1));
    return entry->first;
  }
  /// Rows whose channels decay, so that a projection keeps most of them; now and then one that no
  /// basis expects.
  std::vector<float> rows(int count, int heads) {
    std::normal_distribution<float> normal;
    std::vector<float> all(static_cast<std::size_t>(count * heads * shape().head_dim));
    for (std::size_t i = 0; i < all.size(); ++i) {
      const int channel = static_cast<int>(i) % shape().head_dim;
      all[i] = normal(random_) *
               std::exp(-3.0F * static_cast<float>(channel) / static_cast<float>(shape().head_dim));
    }
    return all;
  }
  QueryView queries(const std::vector<float>& q, std::int64_t n) const {
    return {q.data(), n, shape().num_qo_heads, shape().head_dim};
  }
  KeyView keys(const std::vector<float>& k, std::int64_t n) const {
    return {k.data(), n, shape().num_kv_heads, shape().head_dim};
  }
  ValueView values(const std::vector<float>& v, std::int64_t n) const {
    return {v.data(), n, shape().num_kv_heads, shape().head_dim};
  }

  void note(Sequence& sequence, const std::vector<float>& k, const std::vector<float>& v, int n) {
    const int width = shape().num_kv_heads * shape().head_dim;
    for (int token = 0; token < n; ++token) {
      const auto stored = [&](const std::vector<float>& all) {
        std::vector<float> row(all.begin() + token * width, all.begin() + (token + 1) * width);
        for (float& value : row) value = round_to(setup_.config.full_type, value);
        return row;
      };
      sequence.keys.push_back(stored(k));
      sequence.values.push_back(stored(v));
      sequence.positions.push_back(sequence.next_position++);
    }
    for (auto& head : sequence.accumulated) head.resize(sequence.keys.size(), 0.0);
  }

  void start() {
    const SequenceId seq = next_++;
    cache_->create(seq);
    Sequence sequence;
    sequence.states.resize(static_cast<std::size_t>(shape().num_kv_heads));
    sequence.accumulated.resize(static_cast<std::size_t>(shape().num_kv_heads));
    const int n = draw(1, support::length(200));
    const std::vector<float> q = rows(n, shape().num_qo_heads), k = rows(n, shape().num_kv_heads),
                             v = rows(n, shape().num_kv_heads);
    note(sequence, k, v, n);
    if (draw(0, 1) == 0) {
      std::vector<float> out(q.size());
      for (int done = 0; done < n;) {
        const int count = draw(1, n - done);
        cache_->prefill(
            seq, queries(q, n).tokens(done, count), keys(k, n).tokens(done, count),
            values(v, n).tokens(done, count),
            OutputView(out.data(), n, shape().num_qo_heads, shape().head_dim).tokens(done, count),
            {}, done + count < n ? Prompt::continues : Prompt::complete);
        done += count;
      }
    } else {
      cache_->ingest(seq, keys(k, n), values(v, n), queries(q, n));
    }
    sequences_.emplace(seq, std::move(sequence));
    refresh(seq);
  }

  void decode() {
    const SequenceId seq = pick();
    Sequence& sequence = sequences_.at(seq);
    const int m = draw(1, setup_.config.flush_interval);
    if (cache_->num_tokens(seq) + m > setup_.config.max_tokens) return erase();
    const std::vector<float> q = rows(m, shape().num_qo_heads), k = rows(m, shape().num_kv_heads),
                             v = rows(m, shape().num_kv_heads);
    cache_->append(seq, keys(k, m), values(v, m));
    note(sequence, k, v, m);
    std::vector<float> out(q.size(), -1.0F),
        lse(static_cast<std::size_t>(m * shape().num_qo_heads));
    const std::int64_t positions = cache_->num_tokens(seq) + draw(0, 3);
    std::vector<float> accumulated(static_cast<std::size_t>(shape().num_kv_heads * positions),
                                   -1.0F);
    const ScoreView received(accumulated.data(), 1, shape().num_kv_heads, positions);
    cache_->attend(seq, queries(q, m), {out.data(), m, shape().num_qo_heads, shape().head_dim},
                   {lse.data(), m, shape().num_qo_heads}, received);
    compare(seq, q, out, lse, received, m);
    if (setup_.config.keep_residuals) certify(seq, q, lse, m);
    if constexpr (accumulates_scores) {
      cache_->accumulate(seq, received);
      for (int head = 0; head < shape().num_kv_heads; ++head) {
        for (std::size_t i = 0; i < sequence.keys.size(); ++i)
          sequence.accumulated[static_cast<std::size_t>(head)][i] +=
              static_cast<double>(received.row(0, head)[i]);
      }
    }
    cache_->maintain(seq);
    refresh(seq);
  }

  /// A key [head_dim] as attention must see it: a pre-RoPE key is rotated to the position of its
  /// token.
  Eigen::VectorXd rotated(Eigen::VectorXd key, std::int64_t position) const {
    const RopeConfig& rope = setup_.config.rope;
    if (rope.keys == Rope::post) return key;
    const std::vector<double> frequencies = rope_frequencies(rope, shape().head_dim);
    for (std::size_t pair = 0; pair < frequencies.size(); ++pair) {
      const bool interleaved = rope.pairing == RopePairing::interleaved;
      double& x = key[static_cast<Eigen::Index>(interleaved ? 2 * pair : pair)];
      double& y =
          key[static_cast<Eigen::Index>(interleaved ? 2 * pair + 1 : pair + frequencies.size())];
      const double angle = frequencies[pair] * static_cast<double>(position);
      const double first = x * std::cos(angle) - y * std::sin(angle);
      y = x * std::sin(angle) + y * std::cos(angle);
      x = first;
    }
    return key;
  }
  /// Tokens from some place on move; nothing that is stored may change. Post-RoPE keys cannot move.
  void shift() {
    const SequenceId seq = pick();
    Sequence& sequence = sequences_.at(seq);
    const int n = static_cast<int>(sequence.keys.size());
    const int first = draw(0, n), delta = draw(0, 3) == 0 ? draw(-100000, 100000) : draw(-5, 5);
    if (setup_.config.rope.keys == Rope::post) {
      REQUIRE_THROWS_AS(cache_->shift_positions(seq, first, delta), StateError);
      REQUIRE_THROWS_AS(cache_->divide_positions(seq, first, 0, 2), StateError);
      return;
    }
    if (draw(0, 2) == 0) {  // several tokens share a position
      const int count = draw(0, n - first), divisor = draw(1, 3);
      cache_->divide_positions(seq, first, count, divisor);
      for (int token = first; token < first + count; ++token) {
        std::int64_t& position = sequence.positions[static_cast<std::size_t>(token)];
        position = static_cast<std::int64_t>(std::floor(static_cast<double>(position) / divisor));
      }
    }
    cache_->shift_positions(seq, first, delta);
    for (int token = first; token < n; ++token)
      sequence.positions[static_cast<std::size_t>(token)] += delta;
    sequence.next_position += delta;
    for (int token = 0; token < n; ++token)
      REQUIRE(cache_->position(seq, token) == sequence.positions[static_cast<std::size_t>(token)]);
    REQUIRE(cache_->position(seq, n) == sequence.next_position);
  }

  /// attend() against float64 softmax attention over the rows that reconstruct() shows and
  /// row_states() does not call dropped.
  void compare(SequenceId seq, const std::vector<float>& q, const std::vector<float>& out,
               const std::vector<float>& lse, const ScoreView& accumulated, int m) {
    const int n = static_cast<int>(cache_->num_tokens(seq));
    const int dim = shape().head_dim;
    const auto [k, v] = stored_rows(seq, n);
    for (int kv = 0; kv < shape().num_kv_heads; ++kv) {
      std::vector<RowState> states(static_cast<std::size_t>(n));
      cache_->row_states(seq, kv, 0, states);
      Eigen::VectorXd expected_score = Eigen::VectorXd::Zero(n);
      Eigen::MatrixXd seen(dim, n);
      for (int i = 0; i < n; ++i)
        seen.col(i) = rotated(row(k, i, shape().num_kv_heads, kv),
                              sequences_.at(seq).positions[static_cast<std::size_t>(i)]);
      for (int member = 0; member < shape().group_size(); ++member) {
        const int head = kv * shape().group_size() + member;
        for (int token = 0; token < m; ++token) {
          const Eigen::VectorXd query = row(q, token, shape().num_qo_heads, head);
          Eigen::VectorXd logits = Eigen::VectorXd::Constant(n, -1e300);
          for (int i = 0; i <= n - m + token; ++i) {
            if (states[static_cast<std::size_t>(i)] != RowState::dropped)
              logits[i] = query.dot(seen.col(i)) * setup_.config.scale();
          }
          const double top = logits.maxCoeff();
          const Eigen::VectorXd weights = (logits.array() - top).exp();
          Eigen::VectorXd expected = Eigen::VectorXd::Zero(dim);
          for (int i = 0; i < n; ++i) {
            if (weights[i] > 0.0)
              expected += weights[i] / weights.sum() * row(v, i, shape().num_kv_heads, kv);
          }
          expected_score += weights / weights.sum();
          REQUIRE((row(out, token, shape().num_qo_heads, head) - expected).cwiseAbs().maxCoeff() <
                  2e-4 * (1.0 + expected.cwiseAbs().maxCoeff()));
          REQUIRE(std::abs(static_cast<double>(
                               lse[static_cast<std::size_t>(token * shape().num_qo_heads + head)]) -
                           top - std::log(weights.sum())) < 2e-4 * (1.0 + std::abs(top)));
        }
      }
      for (std::int64_t i = 0; i < accumulated.num_positions; ++i) {
        REQUIRE(std::abs(static_cast<double>(accumulated.row(0, kv)[i]) -
                         (i < n ? expected_score[i] : 0.0)) < 1e-4 * m * shape().group_size());
      }
    }
  }

  /// What compression changed, computed in f64 from the rows as they came in and as they are
  /// stored, never exceeds the bounds.
  void certify(SequenceId seq, const std::vector<float>& q, std::vector<float>& lse, int m) {
    const Sequence& sequence = sequences_.at(seq);
    const int n = static_cast<int>(cache_->num_tokens(seq));
    const int heads = shape().num_qo_heads;
    std::vector<Certificate> found(static_cast<std::size_t>(m * heads));
    const CertificateView view(found.data(), m, heads);
    std::uint32_t over = 0;
    cache_->certify(seq, queries(q, m), {lse.data(), m, heads}, view, kUnboundedCertificate, &over);
    REQUIRE(over == 0);
    cache_->certify(seq, queries(q, m), {lse.data(), m, heads}, view, {1e30F, 0.1F, 1e30F}, &over);
    REQUIRE(over == std::count_if(found.begin(), found.end(),
                                  [](const Certificate& c) { return c.softmax > 0.1F; }));
    const auto [k, v] = stored_rows(seq, n);
    for (int head = 0; head < heads; ++head) {
      const int kv = head / shape().group_size();
      std::vector<RowState> states(static_cast<std::size_t>(n));
      cache_->row_states(seq, kv, 0, states);
      for (int token = 0; token < m; ++token) {
        const Eigen::VectorXd query = row(q, token, heads, head) * setup_.config.scale();
        Eigen::VectorXd exact = Eigen::VectorXd::Constant(n, -1e300), stored = exact;
        Eigen::MatrixXd exact_values(shape().head_dim, n), stored_values(shape().head_dim, n);
        for (int i = 0; i < n; ++i) {
          const std::size_t at = static_cast<std::size_t>(i);
          exact_values.col(i) = row(sequence.values[at], 0, 1, kv);
          stored_values.col(i) = row(v, i, shape().num_kv_heads, kv);
          if (i > n - m + token || states[at] == RowState::dropped) continue;
          exact[i] = query.dot(rotated(row(sequence.keys[at], 0, 1, kv), sequence.positions[at]));
          stored[i] =
              query.dot(rotated(row(k, i, shape().num_kv_heads, kv), sequence.positions[at]));
        }
        const double logit = (exact - stored).cwiseAbs().maxCoeff();
        const auto softmax = [](const Eigen::VectorXd& logits) {
          const Eigen::VectorXd weights = (logits.array() - logits.maxCoeff()).exp();
          return Eigen::VectorXd(weights / weights.sum());
        };
        const Eigen::VectorXd before = softmax(exact), after = softmax(stored);
        const Certificate& bound = view.at(token, head);
        const double weights = (before - after).cwiseAbs().sum(),
                     output = (exact_values * before - stored_values * after).norm();
        REQUIRE(logit <= static_cast<double>(bound.logit) + 1e-9);
        REQUIRE(weights <= static_cast<double>(bound.softmax) + 1e-9);
        REQUIRE(output <= static_cast<double>(bound.output) + 1e-9);
        REQUIRE(bound.softmax <= 2.0F);
      }
    }
  }

  void fork() {
    const SequenceId source = pick();
    cache_->fork(source, next_);
    sequences_.emplace(next_, sequences_.at(source));
    stored_[next_] = stored_[source];
    refresh(next_++);
  }
  /// A sequence goes to bytes and comes back in its place; every check that follows is of the copy.
  /// Now and then the bytes are damaged first, which must be noticed.
  void save_and_load() {
    const SequenceId seq = pick();
    std::vector<std::byte> saved(cache_->save_bytes(seq));
    REQUIRE(cache_->save(seq, saved) == saved.size());
    const auto before = stored_rows(seq, static_cast<int>(sequences_.at(seq).keys.size()));
    cache_->erase(seq);
    if (draw(0, 2) == 0) {
      std::vector<std::byte> damaged = saved;
      damaged[static_cast<std::size_t>(draw(0, static_cast<int>(damaged.size()) - 1))] ^=
          std::byte{static_cast<unsigned char>(1 << draw(0, 7))};
      REQUIRE_THROWS_AS(cache_->load(seq, damaged), Error);
      damaged.resize(static_cast<std::size_t>(draw(0, static_cast<int>(damaged.size()) - 1)));
      REQUIRE_THROWS_AS(cache_->load(seq, damaged), Error);
      REQUIRE(!cache_->contains(seq));
    }
    cache_->load(seq, saved);
    REQUIRE(stored_rows(seq, static_cast<int>(sequences_.at(seq).keys.size())) == before);
    std::vector<std::byte> again(cache_->save_bytes(seq));
    cache_->save(seq, again);
    REQUIRE(again == saved);
  }
  void erase() {
    const SequenceId seq = pick();
    cache_->erase(seq);
    sequences_.erase(seq);
    stored_.erase(seq);
  }
  void truncate() {
    const SequenceId seq = pick();
    Sequence& sequence = sequences_.at(seq);
    const int limit = static_cast<int>(cache_->rollback_limit(seq));
    const int size = static_cast<int>(sequence.keys.size());
    const int length =
        draw(0, 2) == 0 ? draw(1, size) : draw(std::max(1, limit), std::max(1, size));
    cache_->truncate(seq, length);
    if (length < size)
      sequence.next_position = sequence.positions[static_cast<std::size_t>(length - 1)] + 1;
    sequence.positions.resize(static_cast<std::size_t>(length));
    sequence.keys.resize(static_cast<std::size_t>(length));
    sequence.values.resize(static_cast<std::size_t>(length));
    for (auto& head : sequence.states)
      head.resize(std::min(head.size(), static_cast<std::size_t>(length)));
    for (auto& head : sequence.accumulated) head.resize(static_cast<std::size_t>(length));
    refresh(seq);
  }

  void remove() {
    const SequenceId seq = pick();
    Sequence& sequence = sequences_.at(seq);
    const int size = static_cast<int>(sequence.keys.size()),
              flushed = static_cast<int>(cache_->rollback_limit(seq));
    const int first = draw(0, size - 1),
              count = draw(0, std::min(size - first, draw(0, 2) == 0 ? 700 : 40));
    if (count == size) return;
    cache_->remove(seq, first, count);
    const auto cut = [&](auto& values, int width = 1) {
      const auto clipped = [&](int token) {
        return values.begin() +
               std::min(static_cast<std::ptrdiff_t>(values.size()), std::ptrdiff_t{token} * width);
      };
      values.erase(clipped(first), clipped(first + count));
    };
    cut(sequence.positions);
    cut(sequence.keys);
    cut(sequence.values);
    for (auto& head : sequence.states) cut(head);
    for (auto& head : sequence.accumulated) cut(head);
    // What is left is what it was, and where it was: refresh() compares.
    auto& [keys, values] = stored_.at(seq);
    const int width = shape().num_kv_heads * shape().head_dim;
    cut(keys, width);
    cut(values, width);
    old_flushed_[seq] -= static_cast<std::size_t>(std::clamp(flushed - first, 0, count));
    REQUIRE(static_cast<std::size_t>(cache_->rollback_limit(seq)) == old_flushed_[seq]);
    for (int token = 0; token < size - count; ++token)
      REQUIRE(cache_->position(seq, token) == sequence.positions[static_cast<std::size_t>(token)]);
    REQUIRE(cache_->position(seq, size - count) == sequence.next_position);
    refresh(seq);
  }

  std::pair<std::vector<float>, std::vector<float>> stored_rows(SequenceId seq, int n) {
    std::vector<float> k(static_cast<std::size_t>(n * shape().num_kv_heads * shape().head_dim),
                         NAN),
        v(k.size(), NAN);
    cache_->reconstruct(seq, 0, {k.data(), n, shape().num_kv_heads, shape().head_dim},
                        {v.data(), n, shape().num_kv_heads, shape().head_dim});
    return {k, v};
  }
  Eigen::VectorXd row(const std::vector<float>& all, int token, int heads, int head) const {
    return Eigen::Map<const Eigen::VectorXf>(
               all.data() + (static_cast<std::ptrdiff_t>(token) * heads + head) * shape().head_dim,
               shape().head_dim)
        .template cast<double>();
  }

  /// Notes what the cache says it stores after an operation on `seq`, and checks what may have
  /// changed.
  void refresh(SequenceId seq) {
    Sequence& sequence = sequences_.at(seq);
    const int flushed = static_cast<int>(cache_->rollback_limit(seq));
    for (int head = 0; head < shape().num_kv_heads; ++head) {
      std::vector<RowState>& before = sequence.states[static_cast<std::size_t>(head)];
      std::vector<RowState> now(static_cast<std::size_t>(flushed));
      cache_->row_states(seq, head, 0, now);
      for (std::size_t i = 0; i < std::min(before.size(), now.size()); ++i) {
        REQUIRE((now[i] == before[i] ||
                 now[i] ==
                     RowState::dropped));  // a stored row stays what it is, or is dropped for good
      }
      before = std::move(now);
    }
    const int n = static_cast<int>(sequence.keys.size());
    auto rows_now = stored_rows(seq, n);
    auto& old = stored_[seq];
    if (!setup_.stores_change) {
      const std::size_t width = static_cast<std::size_t>(shape().head_dim);
      for (std::size_t at = 0; at + width <= std::min(old.first.size(), rows_now.first.size());
           at += width) {
        const std::size_t position = at / width / static_cast<std::size_t>(shape().num_kv_heads);
        const std::size_t head = at / width % static_cast<std::size_t>(shape().num_kv_heads);
        const auto& states = sequence.states[head];
        if (position >= states.size() || states[position] == RowState::dropped ||
            position >= old_flushed_[seq])
          continue;
        REQUIRE(std::equal(old.first.begin() + static_cast<std::ptrdiff_t>(at),
                           old.first.begin() + static_cast<std::ptrdiff_t>(at + width),
                           rows_now.first.begin() + static_cast<std::ptrdiff_t>(at)));
        REQUIRE(std::equal(old.second.begin() + static_cast<std::ptrdiff_t>(at),
                           old.second.begin() + static_cast<std::ptrdiff_t>(at + width),
                           rows_now.second.begin() + static_cast<std::ptrdiff_t>(at)));
      }
    }
    old = std::move(rows_now);
    old_flushed_[seq] = static_cast<std::size_t>(flushed);
  }

  /// Full rows and the tail are exactly what went in, dropped rows are zero, compressed ones near
  /// their projection.
  void check(SequenceId seq) {
    const Sequence& sequence = sequences_.at(seq);
    const int n = static_cast<int>(sequence.keys.size());
    REQUIRE(cache_->num_tokens(seq) == n);
    const auto [k, v] = stored_rows(seq, n);
    for (int position = 0; position < n; ++position) {
      for (int head = 0; head < shape().num_kv_heads; ++head) {
        const auto& states = sequence.states[static_cast<std::size_t>(head)];
        const RowState state = position < static_cast<int>(states.size())
                                   ? states[static_cast<std::size_t>(position)]
                                   : RowState::full;
        const Eigen::VectorXd key = row(k, position, shape().num_kv_heads, head),
                              value = row(v, position, shape().num_kv_heads, head);
        const Eigen::VectorXd true_key = row(sequence.keys[static_cast<std::size_t>(position)], 0,
                                             1, head),
                              true_value = row(sequence.values[static_cast<std::size_t>(position)],
                                               0, 1, head);
        if (state == RowState::full && setup_.config.full_row_bits == 8 &&
            position < static_cast<int>(states.size())) {
          REQUIRE((key - true_key).cwiseAbs().maxCoeff() <= true_key.cwiseAbs().maxCoeff() / 255.0);
          REQUIRE((value - true_value).cwiseAbs().maxCoeff() <=
                  true_value.cwiseAbs().maxCoeff() / 255.0);
        } else if (state == RowState::full) {
          REQUIRE(key == true_key);
          REQUIRE(value == true_value);
        } else if (state == RowState::dropped) {
          REQUIRE(key.isZero(0.0));
          REQUIRE(value.isZero(0.0));
        } else if (setup_.tolerance < 1e200) {
          check_projection(sequence, position, head, key, true_key, value);
        }
      }
    }
  }
  void check_projection(const Sequence& sequence, int position, int head,
                        const Eigen::VectorXd& key, const Eigen::VectorXd& true_key,
                        const Eigen::VectorXd& value) {
    const int dim = shape().head_dim;
    const auto matrix = [&](const std::vector<float>& values, int rows, int cols) {
      return Eigen::MatrixXd(
          Eigen::Map<const Eigen::Matrix<float, -1, -1, Eigen::RowMajor>>(values.data(), rows, cols)
              .template cast<double>());
    };
    const HeadBasis& maps = setup_.basis.heads[static_cast<std::size_t>(head)];
    const Eigen::MatrixXd down = matrix(maps.key_down, dim, maps.key_rank);
    const Eigen::MatrixXd up =
        maps.query_down.empty() ? down : matrix(maps.query_down, dim, maps.key_rank);
    REQUIRE((key - up * (down.transpose() * true_key)).norm() <=
            setup_.tolerance *
                (up.norm() * down.norm() / std::sqrt(static_cast<double>(maps.key_rank))) *
                true_key.norm());
    int group = 1;
    if constexpr (requires { setup_.policies.basis.heads_per_group; })
      group = setup_.policies.basis.group_of(shape().num_kv_heads);
    const int first = head / group * group;
    Eigen::VectorXd code = Eigen::VectorXd::Zero(maps.value_rank);
    double norm = 0.0;
    for (int member = first; member < first + group; ++member) {
      const Eigen::VectorXd row_of =
          row(sequence.values[static_cast<std::size_t>(position)], 0, 1, member);
      code += matrix(setup_.basis.heads[static_cast<std::size_t>(member)].value_down, dim,
                     maps.value_rank)
                  .transpose() *
              row_of;
      norm += row_of.squaredNorm();
    }
    const Eigen::MatrixXd out =
        maps.output_up.empty()
            ? Eigen::MatrixXd(matrix(maps.value_down, dim, maps.value_rank).transpose())
            : matrix(maps.output_up, maps.value_rank, dim);
    REQUIRE((value - out.transpose() * code).norm() <=
            setup_.tolerance *
                    std::max(1.0, out.norm() / std::sqrt(static_cast<double>(maps.value_rank))) *
                    std::sqrt(norm) +
                1e-6);
  }

  Random& random_;
  Setup<Cache> setup_;
  std::unique_ptr<Cache> cache_;
  std::map<SequenceId, Sequence> sequences_;
  std::map<SequenceId, std::pair<std::vector<float>, std::vector<float>>> stored_;
  std::map<SequenceId, std::size_t> old_flushed_;
  SequenceId next_ = 1;
  std::int64_t dropped_ = 0, full_ = 0, compressed_ = 0;
};

/// Random orthonormal columns.
inline Eigen::MatrixXd orthonormal(Random& random, int rows, int cols) {
  std::normal_distribution<double> normal;
  Eigen::MatrixXd matrix(rows, cols);
  for (Eigen::Index i = 0; i < matrix.size(); ++i) matrix.data()[i] = normal(random);
  return Eigen::HouseholderQR<Eigen::MatrixXd>(matrix).householderQ() *
         Eigen::MatrixXd::Identity(rows, cols);
}
inline std::vector<float> row_major(const Eigen::MatrixXd& matrix) {
  std::vector<float> values(static_cast<std::size_t>(matrix.size()));
  Eigen::Map<Eigen::Matrix<float, -1, -1, Eigen::RowMajor>>(values.data(), matrix.rows(),
                                                            matrix.cols()) = matrix.cast<float>();
  return values;
}

/// A random shape with odd sizes and per-head bases of odd ranks; bits and rms for quantizers that
/// want them.
inline CacheConfig random_config(Random& random) {
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  constexpr int usual_dims[] = {40, 64, 80, 96}, small_dims[] = {8, 16, 24, 40};
  const auto& dims = support::small() ? small_dims : usual_dims;
  constexpr int groups[] = {1, 2, 3, 7, 8};
  const int kv = 1 + draw(0, 3) % (support::small() ? 2 : 3);
  CacheConfig config;
  config.shape = {kv * groups[draw(0, support::small() ? 2 : 4)], kv, dims[draw(0, 3)]};
  config.flush_interval = draw(1, support::length(32));
  config.prefill_chunk = draw(0, 2) == 0 ? draw(support::length(20), support::length(90)) : 0;
  config.num_threads = draw(1, 2);
  config.keep_residuals = draw(0, 1) == 0;
  config.full_row_bits = draw(0, 2) == 0 ? 8 : 0;
  if (draw(0, 2) == 0) {
    config.rope = {Rope::pre,
                   draw(0, 1) == 0 ? RopePairing::half_split : RopePairing::interleaved,
                   std::pow(10.0, draw(2, 6)),
                   {},
                   draw(0, 1) == 0 ? 0 : 2 * draw(1, config.shape.head_dim / 2)};
    if (draw(0, 1) == 0) config.rope.scaling = Llama3RopeScaling{8.0F, 1.0F, 4.0F, 64.0F};
  }
  return config;
}
inline LayerBasis random_basis(Random& random, const CacheShape& shape, bool with_bits) {
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  LayerBasis basis;
  for (int head = 0; head < shape.num_kv_heads; ++head) {
    HeadBasis maps;
    maps.key_rank = draw(1, shape.head_dim);
    maps.value_rank = draw(1, shape.head_dim);
    maps.key_threshold = maps.value_threshold = std::numeric_limits<float>::infinity();
    maps.key_down = row_major(orthonormal(random, shape.head_dim, maps.key_rank));
    maps.value_down = row_major(orthonormal(random, shape.head_dim, maps.value_rank));
    if (with_bits) {
      for (const auto& [bits, rms, rank] :
           {std::tuple{&maps.key_bits, &maps.key_rms, maps.key_rank},
            std::tuple{&maps.value_bits, &maps.value_rms, maps.value_rank}}) {
        for (int channel = 0; channel < rank; ++channel) {
          bits->push_back(static_cast<std::uint8_t>(draw(0, 8)));
          rms->push_back(0.2F + 0.01F * static_cast<float>(draw(0, 50)));
        }
        std::sort(bits->rbegin(), bits->rend());
      }
    }
    basis.heads.push_back(std::move(maps));
  }
  return basis;
}
/// Joint values of all heads (or of groups of them).
inline LayerBasis random_joint_basis(Random& random, const CacheShape& shape, int group) {
  LayerBasis basis = random_basis(random, shape, false);
  for (int first = 0; first < shape.num_kv_heads; first += group) {
    const int rank = std::uniform_int_distribution<int>(1, group * shape.head_dim)(random);
    const Eigen::MatrixXd joint = orthonormal(random, group * shape.head_dim, rank);
    for (int member = 0; member < group; ++member) {
      HeadBasis& maps = basis.heads[static_cast<std::size_t>(first + member)];
      maps.value_rank = rank;
      maps.value_down = row_major(joint.middleRows(member * shape.head_dim, shape.head_dim));
    }
  }
  return basis;
}

/// Default windows in proportion to the sequences: some rows are compressed in small cases too.
template <class Policy>
void shorten(Policy&) {}
inline void shorten(SinkRecent& policy) {
  policy = {support::length(policy.sinks), support::length(policy.recent)};
}
inline void shorten(RecentFull& policy) { policy.recent = support::length(policy.recent); }
inline void shorten(HeavyHitters& policy) { policy.recent = support::length(policy.recent); }
inline void shorten(SnapKV& policy) { policy.window = support::length(policy.window); }
template <class... Members>
void shorten(Compose<Members...>& policy) {
  std::apply([](auto&... members) { (shorten(members), ...); }, policy.members);
}

/// Cases of one cache type; `adjust` sets policies and tolerances. Returns {full, compressed,
/// dropped} rows met at the end.
template <class Cache, class Adjust>
std::array<std::int64_t, 3> run_cases(std::uint64_t seed, int cases, int operations, bool with_bits,
                                      Adjust&& adjust) {
  Random random(support::seed_of(seed));
  std::array<std::int64_t, 3> met{};
  for (int i = 0; i < cases * support::effort(); ++i) {
    CAPTURE(seed);
    CAPTURE(i);
    Setup<Cache> setup;
    setup.config = random_config(random);
    setup.basis = random_basis(random, setup.config.shape, with_bits);
    shorten(setup.policies.token_policy);
    adjust(setup, random);
    Driver<Cache> driver(random, std::move(setup));
    driver.run(operations);
    met[0] += driver.full();
    met[1] += driver.compressed();
    met[2] += driver.dropped();
  }
  return met;
}

}  // namespace observed
