// SPDX-License-Identifier: Apache-2.0
// Laws that hold between two runs of the same cache: splits, forks, rollbacks, epochs, threads,
// batches, storage types.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <tuple>

#include "support/random_layer.hpp"
#include "lowrankkv/core/online_softmax.hpp"
#include "lowrankkv/presets.hpp"

using namespace lowrankkv;
using support::Random;

namespace {

constexpr CacheShape kShape{6, 2, 40};

struct Stream {
  explicit Stream(std::uint64_t seed, std::int64_t tokens) : n(tokens) {
    Random random(seed);
    q = support::random_rows(random, n, kShape.num_qo_heads, kShape.head_dim);
    k = support::random_rows(random, n, kShape.num_kv_heads, kShape.head_dim);
    v = support::random_rows(random, n, kShape.num_kv_heads, kShape.head_dim, 0.5);
  }
  QueryView query(std::int64_t first, std::int64_t count) const {
    return QueryView(q.data(), n, kShape.num_qo_heads, kShape.head_dim).tokens(first, count);
  }
  KeyView key(std::int64_t first, std::int64_t count) const {
    return KeyView(k.data(), n, kShape.num_kv_heads, kShape.head_dim).tokens(first, count);
  }
  ValueView value(std::int64_t first, std::int64_t count) const {
    return ValueView(v.data(), n, kShape.num_kv_heads, kShape.head_dim).tokens(first, count);
  }
  std::int64_t n;
  std::vector<float> q, k, v;
};

LayerBasis basis(int key_rank = 17, int value_rank = 23) {
  Random random(99);
  return support::random_basis(random, kShape, {.centred = false}, key_rank, value_rank);
}

/// The bits of everything a sequence stores: two caches with the same contents give the same.
template <class Cache>
std::vector<float> contents(const Cache& cache, SequenceId seq) {
  const std::int64_t n = cache.num_tokens(seq);
  const std::size_t size = static_cast<std::size_t>(n * kShape.num_kv_heads * kShape.head_dim);
  std::vector<float> rows(2 * size);
  cache.reconstruct(seq, 0, {rows.data(), n, kShape.num_kv_heads, kShape.head_dim},
                    {rows.data() + size, n, kShape.num_kv_heads, kShape.head_dim});
  return rows;
}
template <class Cache>
std::vector<float> attend(Cache& cache, SequenceId seq, const QueryView& query) {
  std::vector<float> out(
      static_cast<std::size_t>(query.num_tokens * kShape.num_qo_heads * kShape.head_dim));
  cache.attend(seq, query, {out.data(), query.num_tokens, kShape.num_qo_heads, kShape.head_dim});
  return out;
}
template <class Cache>
void prefill(Cache& cache, SequenceId seq, const Stream& stream, std::int64_t first,
             std::int64_t count, Prompt prompt = Prompt::complete) {
  std::vector<float> out(static_cast<std::size_t>(count * kShape.num_qo_heads * kShape.head_dim));
  cache.prefill(seq, stream.query(first, count), stream.key(first, count),
                stream.value(first, count),
                {out.data(), count, kShape.num_qo_heads, kShape.head_dim}, {}, prompt);
}

using Caches =
    std::tuple<FullKV<>, StaticPCA<>, StaticPCAHybrid<>, OjaKV<>,
               CompressedKVCache<Cpu, PerHead, Oja, SinkRecent, NoQuantizer, RotateNow>,
               CompressedKVCache<Cpu, PerHead, Oja, CompressAll, NoQuantizer, KeepEpochs<2>>>;

}  // namespace

TEST_CASE_TEMPLATE_DEFINE("any split of a stream into calls gives the same cache, bit for bit",
                          Cache, splits) {
  for (const DType type : {DType::f16, DType::f32, DType::bf16}) {
    const Stream stream(1, 420);
    Random random(2);
    CacheConfig config{.shape = kShape, .max_sequences = 2, .full_type = type, .prefill_chunk = 90};
    typename Cache::PolicySet policies;
    policies.quantizer.type = type;
    Cache one(config, basis(), policies), many(config, basis(), policies);
    one.create(0);
    many.create(0);
    prefill(one, 0, stream, 0, 200);
    for (std::int64_t done = 0; done < 200;) {
      const std::int64_t count = std::uniform_int_distribution<std::int64_t>(1, 200 - done)(random);
      prefill(many, 0, stream, done, count, Prompt::continues);
      done += count;
    }
    many.finish_prompt(0);
    CHECK(contents(one, 0) == contents(many, 0));
    one.append_maintained(0, stream.key(200, 220), stream.value(200, 220));
    for (std::int64_t done = 200; done < 420;) {
      const std::int64_t count = std::uniform_int_distribution<std::int64_t>(
          1, std::min<std::int64_t>(31, 420 - done))(random);
      many.append(0, stream.key(done, count), stream.value(done, count));
      many.maintain(0);
      done += count;
    }
    CHECK(contents(one, 0) == contents(many, 0));
    CHECK(one.memory(0).total() == many.memory(0).total());
    CHECK(one.tail_length(0) == many.tail_length(0));
  }
}
TEST_CASE_TEMPLATE_APPLY(splits, Caches);

TEST_CASE_TEMPLATE_DEFINE(
    "a prompt that the engine attended to is stored as one that the cache attended to", Cache,
    ingested) {
  const Stream stream(3, 300);
  Cache own({.shape = kShape}, basis()), engine({.shape = kShape}, basis());
  own.create(0);
  engine.create(0);
  prefill(own, 0, stream, 0, 300);
  engine.ingest(0, stream.key(0, 300), stream.value(0, 300), stream.query(268, 32));
  CHECK(contents(own, 0) == contents(engine, 0));
}
TEST_CASE_TEMPLATE_APPLY(ingested, Caches);

TEST_CASE_TEMPLATE_DEFINE(
    "a fork never sees its sibling's writes, and a copy shares until it writes", Cache, forks) {
  const Stream stream(4, 500), other(5, 500);
  Cache cache({.shape = kShape, .max_sequences = 3}, basis());
  cache.create(0);
  prefill(cache, 0, stream, 0, 250);
  const std::int64_t before = cache.pool().allocator().num_free();
  cache.fork(0, 1);
  CHECK(cache.pool().allocator().num_free() == before);
  const auto frozen = contents(cache, 0);
  cache.append_maintained(1, other.key(250, 200), other.value(250, 200));
  CHECK(contents(cache, 0) == frozen);
  cache.append_maintained(0, stream.key(250, 200), stream.value(250, 200));
  Cache alone({.shape = kShape, .max_sequences = 3}, basis());
  alone.create(7);
  prefill(alone, 7, stream, 0, 250);
  alone.append_maintained(7, stream.key(250, 200), stream.value(250, 200));
  CHECK(contents(cache, 0) == contents(alone, 7));
  cache.erase(0);
  const auto sibling = contents(cache, 1);
  cache.create(0);
  prefill(cache, 0, other, 0, 100);
  CHECK(contents(cache, 1) == sibling);
  cache.erase(0);
  cache.erase(1);
  CHECK(cache.pool().allocator().num_free() == cache.pool().allocator().num_pages());
  CHECK(cache.memory().total() == 0);
}
TEST_CASE_TEMPLATE_APPLY(forks, Caches);

TEST_CASE_TEMPLATE_DEFINE(
    "truncating inside the tail and appending again equals never having appended; deeper it says "
    "so",
    Cache, rollback) {
  const Stream stream(6, 400), draft(7, 400);
  Cache cache({.shape = kShape, .max_sequences = 2}, basis()),
      straight({.shape = kShape, .max_sequences = 2}, basis());
  for (Cache* c : {&cache, &straight}) {
    c->create(0);
    prefill(*c, 0, stream, 0, 200);
  }
  for (std::int64_t at = 200; at < 392; at += 8) {
    cache.append(0, draft.key(at, 8), draft.value(at, 8));  // a draft that is rejected
    CHECK(cache.rollback_limit(0) <= at);
    CHECK(cache.truncate(0, at) == TruncateResult::exact);
    for (Cache* c : {&cache, &straight}) {
      c->append(0, stream.key(at, 8), stream.value(at, 8));
      c->maintain(0);
    }
    CHECK(attend(cache, 0, stream.query(at + 7, 1)) ==
          attend(straight, 0, stream.query(at + 7, 1)));
  }
  CHECK(contents(cache, 0) == contents(straight, 0));
  const std::int64_t limit = cache.rollback_limit(0);
  CHECK(cache.truncate(0, limit) == TruncateResult::exact);
  if (limit > 0) CHECK(cache.truncate(0, limit - 1) == TruncateResult::inexact);
  CHECK(cache.num_tokens(0) == std::max<std::int64_t>(0, limit - 1));
  const auto kept = contents(cache, 0);
  const auto full = contents(straight, 0);
  const std::size_t half = kept.size() / 2;
  CHECK(std::memcmp(kept.data(), full.data(), half * sizeof(float)) ==
        0);  // the rows that stay are untouched
}
TEST_CASE_TEMPLATE_APPLY(rollback, Caches);

TEST_CASE_TEMPLATE_DEFINE(
    "logit equivalence (OjaKV A.3): coefficient space and reconstruct-then-attend agree, in every "
    "storage type; lse is the log of the sum",
    Cache, regimes) {
  for (const DType type : {DType::f16, DType::bf16, DType::f32}) {
    const Stream stream(8, 350);
    typename Cache::PolicySet policies;
    policies.quantizer.type = type;
    Cache cache({.shape = kShape, .full_type = type}, basis(), policies);
    cache.create(0);
    prefill(cache, 0, stream, 0, 340);
    cache.append(0, stream.key(340, 10), stream.value(340, 10));
    std::vector<float> out(static_cast<std::size_t>(10 * kShape.num_qo_heads * kShape.head_dim)),
        lse(static_cast<std::size_t>(10 * kShape.num_qo_heads));
    cache.attend(0, stream.query(340, 10), {out.data(), 10, kShape.num_qo_heads, kShape.head_dim},
                 {lse.data(), 10, kShape.num_qo_heads});
    const auto rows = contents(cache, 0);
    const std::vector<float> k(rows.begin(),
                               rows.begin() + static_cast<std::ptrdiff_t>(rows.size() / 2)),
        v(rows.begin() + static_cast<std::ptrdiff_t>(rows.size() / 2), rows.end());
    for (std::int64_t token = 0; token < 10; ++token) {
      for (int head = 0; head < kShape.num_qo_heads; ++head) {
        const Eigen::VectorXd query =
            support::row_of(stream.q, 340 + token, kShape.num_qo_heads, head, kShape.head_dim) /
            std::sqrt(40.0);
        const int visible = static_cast<int>(341 + token);
        Eigen::VectorXd logits(visible), expected = Eigen::VectorXd::Zero(40);
        for (int t = 0; t < visible; ++t)
          logits[t] = query.dot(support::row_of(k, t, 2, head / 3, 40));
        const Eigen::VectorXd weights = (logits.array() - logits.maxCoeff()).exp();
        for (int t = 0; t < visible; ++t)
          expected += weights[t] / weights.sum() * support::row_of(v, t, 2, head / 3, 40);
        CHECK((support::row_of(out, token, kShape.num_qo_heads, head, 40) - expected)
                  .cwiseAbs()
                  .maxCoeff() < 5e-5);
        CHECK(lse[static_cast<std::size_t>(token * kShape.num_qo_heads + head)] ==
              doctest::Approx(logits.maxCoeff() + std::log(weights.sum())).epsilon(1e-5));
      }
    }
  }
}
TEST_CASE_TEMPLATE_APPLY(regimes, Caches);

TEST_CASE_TEMPLATE_DEFINE("results do not depend on threads or on the batch a sequence is in",
                          Cache, batches) {
  const Stream a(9, 300), b(10, 300);
  std::vector<std::vector<float>> results;
  for (const int threads : {1, 3}) {
    Cache cache({.shape = kShape, .max_sequences = 2, .num_threads = threads}, basis());
    cache.create(0);
    cache.create(1);
    prefill(cache, 0, a, 0, 280);
    prefill(cache, 1, b, 0, 100);
    cache.append(0, a.key(280, 4), a.value(280, 4));
    cache.append(1, b.key(100, 4), b.value(100, 4));
    results.push_back(attend(cache, 0, a.query(280, 4)));
    std::vector<float> q(a.q.begin() + 280 * 240, a.q.begin() + 284 * 240), out(2 * q.size());
    q.insert(q.end(), b.q.begin() + 100 * 240, b.q.begin() + 104 * 240);
    const SequenceId seqs[] = {0, 1};
    cache.attend(seqs, {q.data(), 8, 6, 40}, {out.data(), 8, 6, 40});
    results.emplace_back(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(out.size() / 2));
  }
  for (const auto& result : results) CHECK(result == results[0]);
}
TEST_CASE_TEMPLATE_APPLY(batches, Caches);

TEST_CASE(
    "old rows decode exactly as before while the basis moves, and within the bound after a merge") {
  const Stream stream(11, 900);
  using Two = CompressedKVCache<Cpu, PerHead, Oja, SinkRecent, NoQuantizer, KeepEpochs<2>>;
  const auto run = [&](auto& cache) {
    cache.create(0);
    prefill(cache, 0, stream, 0, 300);
    std::int64_t last_merges = 0;
    for (std::int64_t at = 300; at < 880; at += 20) {
      const auto before = contents(cache, 0);
      const std::int64_t publications = cache.statistics().publications;
      cache.append_maintained(0, stream.key(at, 20), stream.value(at, 20));
      const auto after = contents(cache, 0);
      const std::size_t rows = 200 * 80;  // positions that left full rank long ago
      const std::size_t half_before = before.size() / 2, half_after = after.size() / 2;
      if (cache.statistics().merges == last_merges) {
        CHECK(std::memcmp(before.data() + 40 * 80, after.data() + 40 * 80, rows * sizeof(float)) ==
              0);
        CHECK(std::memcmp(before.data() + half_before + 40 * 80,
                          after.data() + half_after + 40 * 80, rows * sizeof(float)) == 0);
      } else {
        // A merged row is the old one projected, and rounded: it cannot be longer, and moves by
        // less than its own length.
        CHECK(cache.statistics().publications > publications);
        for (std::size_t token = 40; token < 240; ++token) {
          const Eigen::Map<const Eigen::VectorXf> old(before.data() + token * 80, 40),
              now(after.data() + token * 80, 40);
          CHECK(now.norm() <= old.norm() * (1.0F + 4e-3F));
          // For an orthogonal projection ||x - Px||^2 = ||x||^2 - ||Px||^2.
          CHECK((old - now).squaredNorm() ==
                doctest::Approx(std::max(0.0F, old.squaredNorm() - now.squaredNorm()))
                    .epsilon(0.02)
                    .scale(old.squaredNorm()));
        }
      }
      last_merges = cache.statistics().merges;
    }
    return last_merges;
  };
  OjaKV<> keep({.shape = kShape, .publish_interval = 100}, basis());
  CHECK(run(keep) == 0);
  CHECK(keep.statistics().publications > 4);
  // A merge is done in the flush that begins it.
  Two two({.shape = kShape, .publish_interval = 100, .merge_rows = 1000}, basis());
  CHECK(run(two) > 1);
}

TEST_CASE("attention over two caches merges, by lse, to attention over both") {
  const Stream stream(21, 200);
  const auto part = [&](std::int64_t first, std::int64_t count) {
    StaticPCAHybrid<> cache({.shape = kShape}, basis(),
                            {.token_policy = {.sinks = 4, .recent = 8}});
    cache.create(0);
    cache.ingest(0, stream.key(first, count), stream.value(first, count));
    std::vector<float> out(240), lse(6);
    cache.attend(0, stream.query(199, 1), {out.data(), 1, 6, 40}, {lse.data(), 1, 6});
    return std::make_tuple(contents(cache, 0), out, lse);
  };
  auto [left_rows, left, left_lse] = part(0, 90);
  const auto [right_rows, right, right_lse] = part(90, 110);
  for (int head = 0; head < 6; ++head) {
    merge_attention(left.data() + head * 40, left_lse[static_cast<std::size_t>(head)],
                    right.data() + head * 40, right_lse[static_cast<std::size_t>(head)], 40);
    const Eigen::VectorXd query = support::row_of(stream.q, 199, 6, head, 40) / std::sqrt(40.0);
    double sum = 0.0;
    Eigen::VectorXd expected = Eigen::VectorXd::Zero(40);
    for (const std::vector<float>* rows :
         std::initializer_list<const std::vector<float>*>{&left_rows, &right_rows}) {
      const std::int64_t n = static_cast<std::int64_t>(rows->size()) / 160;
      const std::vector<float> values(rows->begin() + static_cast<std::ptrdiff_t>(rows->size() / 2),
                                      rows->end());
      for (std::int64_t t = 0; t < n; ++t) {
        const double weight = std::exp(query.dot(support::row_of(*rows, t, 2, head / 3, 40)));
        sum += weight;
        expected += weight * support::row_of(values, t, 2, head / 3, 40);
      }
    }
    CHECK((support::row_of(left, 0, 6, head, 40) - expected / sum).cwiseAbs().maxCoeff() < 1e-5);
    CHECK(left_lse[static_cast<std::size_t>(head)] == doctest::Approx(std::log(sum)).epsilon(1e-6));
  }
}

TEST_CASE("accumulation is f32: values of mean 1 over 131072 tokens stay accurate") {
  const CacheShape shape{1, 1, 64};
  const std::int64_t n = 131072;
  Random random(12);
  std::vector<float> k = support::random_rows(random, n, 1, 64), v(k.size()),
                     q = support::random_rows(random, 1, 1, 64);
  std::normal_distribution<float> normal(1.0F, 0.1F);
  for (float& x : v) x = round_to(DType::f16, normal(random));
  for (float& x : k) x = round_to(DType::f16, x * 0.2F);
  FullKV<> cache({.shape = shape, .max_tokens = n + 1});
  cache.create(0);
  cache.ingest(0, {k.data(), n - 1, 1, 64}, {v.data(), n - 1, 1, 64});
  cache.append(0, {k.data() + (n - 1) * 64, 1, 1, 64}, {v.data() + (n - 1) * 64, 1, 1, 64});
  std::vector<float> out(64);
  cache.attend(0, {q.data(), 1, 1, 64}, {out.data(), 1, 1, 64});
  const Eigen::VectorXd query = support::row_of(q, 0, 1, 0, 64) / 8.0;
  double sum = 0.0;
  Eigen::VectorXd expected = Eigen::VectorXd::Zero(64);
  for (std::int64_t t = 0; t < n; ++t) {
    const double weight = std::exp(query.dot(support::row_of(k, t, 1, 0, 64)));
    sum += weight;
    expected += weight * support::row_of(v, t, 1, 0, 64);
  }
  CHECK((support::row_of(out, 0, 1, 0, 64) - expected / sum).norm() <
        1e-5 * (expected / sum).norm());
}
