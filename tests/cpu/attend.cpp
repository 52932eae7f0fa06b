// SPDX-License-Identifier: Apache-2.0
// Attention over rows that kernels read in place, against float64: every stored type, packed codes
// of every width, odd sizes, pages of any number of rows, values with a mean. ctest runs it for
// each instruction set.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "lowrankkv/cpu/thread_pool.hpp"
#include "lowrankkv/presets.hpp"
#include "support/effort.hpp"

namespace attend_tests {

using namespace lowrankkv;

namespace {

std::vector<float> normal(std::mt19937_64& random, std::int64_t count, float mean = 0.0F) {
  std::normal_distribution<float> distribution(mean, 1.0F);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& x : values) x = distribution(random);
  return values;
}

int drawn(std::mt19937_64& random, int from, int to) {
  return std::uniform_int_distribution<int>(from, to)(random);
}

/// Softmax attention in float64 of one query token over rows [n, heads, dim].
std::vector<double> attention(const CacheShape& shape, const std::vector<float>& query,
                              const std::vector<float>& keys, const std::vector<float>& values) {
  const int dim = shape.head_dim;
  const std::size_t row =
      static_cast<std::size_t>(shape.num_kv_heads) * static_cast<std::size_t>(dim);
  std::vector<double> out(query.size()), weights(keys.size() / row);
  for (int head = 0; head < shape.num_qo_heads; ++head) {
    const std::size_t own =
        static_cast<std::size_t>(head / shape.group_size()) * static_cast<std::size_t>(dim);
    const float* q = query.data() + head * dim;
    double top = -INFINITY, sum = 0.0;
    for (std::size_t token = 0; token < weights.size(); ++token) {
      double logit = 0.0;
      for (int c = 0; c < dim; ++c)
        logit += static_cast<double>(q[c]) * keys[token * row + own + static_cast<std::size_t>(c)];
      weights[token] = logit / std::sqrt(static_cast<double>(dim));
      top = (std::max)(top, weights[token]);
    }
    for (double& weight : weights) sum += weight = std::exp(weight - top);
    for (std::size_t token = 0; token < weights.size(); ++token) {
      for (int c = 0; c < dim; ++c)
        out[static_cast<std::size_t>(head * dim + c)] +=
            weights[token] / sum * values[token * row + own + static_cast<std::size_t>(c)];
    }
  }
  return out;
}

/// |got - expected| / |expected| over all outputs.
double distance(const std::vector<float>& got, const std::vector<double>& expected) {
  double error = 0.0, norm = 0.0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    error += (got[i] - expected[i]) * (got[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(error / norm);
}

/// Rows of each head in the span of the first `rank` channels, so that a basis of these channels
/// loses nothing but the rounding to the stored type.
void keep_channels(std::vector<float>& rows, int dim, int rank) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (static_cast<int>(i % static_cast<std::size_t>(dim)) >= rank) rows[i] = 0.0F;
  }
}
LayerBasis first_channels(const CacheShape& shape, int key_rank, int value_rank) {
  LayerBasis layer;
  for (int head = 0; head < shape.num_kv_heads; ++head) {
    HeadBasis maps;
    maps.key_rank = key_rank;
    maps.value_rank = value_rank;
    maps.key_down.assign(static_cast<std::size_t>(shape.head_dim * key_rank), 0.0F);
    maps.value_down.assign(static_cast<std::size_t>(shape.head_dim * value_rank), 0.0F);
    for (int i = 0; i < key_rank; ++i)
      maps.key_down[static_cast<std::size_t>(i * key_rank + i)] = 1.0F;
    for (int i = 0; i < value_rank; ++i)
      maps.value_down[static_cast<std::size_t>(i * value_rank + i)] = 1.0F;
    layer.heads.push_back(maps);
  }
  return layer;
}

template <class Cache>
std::vector<float> attend(Cache& cache, const CacheShape& shape, std::int64_t n,
                          const std::vector<float>& query, const std::vector<float>& keys,
                          const std::vector<float>& values) {
  const std::int64_t row = std::int64_t{shape.num_kv_heads} * shape.head_dim;
  cache.create(0);
  for (std::int64_t done = 0; done < n - 1;) {
    const std::int64_t count = (std::min)(std::int64_t{1024}, n - 1 - done);
    cache.ingest(0, {keys.data() + done * row, count, shape.num_kv_heads, shape.head_dim},
                 {values.data() + done * row, count, shape.num_kv_heads, shape.head_dim}, {},
                 Prompt::complete);
    done += count;
  }
  cache.append(0, {keys.data() + (n - 1) * row, 1, shape.num_kv_heads, shape.head_dim},
               {values.data() + (n - 1) * row, 1, shape.num_kv_heads, shape.head_dim});
  std::vector<float> out(query.size());
  cache.attend(0, {query.data(), 1, shape.num_qo_heads, shape.head_dim},
               {out.data(), 1, shape.num_qo_heads, shape.head_dim});
  return out;
}

/// |attend - float64| / |float64|, where float64 attends to the rows that the cache stores,
/// decoded.
template <class Cache>
double error_of(Cache& cache, const CacheShape& shape, std::int64_t n,
                const std::vector<float>& query, const std::vector<float>& keys,
                const std::vector<float>& values) {
  const std::vector<float> got = attend(cache, shape, n, query, keys, values);
  std::vector<float> stored_keys(keys.size()), stored_values(values.size());
  cache.reconstruct(0, 0, {stored_keys.data(), n, shape.num_kv_heads, shape.head_dim},
                    {stored_values.data(), n, shape.num_kv_heads, shape.head_dim});
  return distance(got, attention(shape, query, stored_keys, stored_values));
}

/// Random widths of `rank` channels, non-increasing, as TransformCode has them.
std::vector<std::uint8_t> random_bits(std::mt19937_64& random, int rank) {
  std::vector<std::uint8_t> bits(static_cast<std::size_t>(rank));
  const int least = drawn(random, 0, 3);
  for (std::uint8_t& width : bits) width = static_cast<std::uint8_t>(drawn(random, least, 8));
  std::sort(bits.rbegin(), bits.rend());
  bits[0] = (std::max)(bits[0], std::uint8_t{1});
  return bits;
}

}  // namespace

TEST_CASE("full rows in place: any type, head_dim, group, length and page") {
  std::mt19937_64 random(21);
  for (int round = 0; round < 40 * support::effort(); ++round) {
    const DType type = static_cast<DType>(round % 3);
    const int group = drawn(random, 1, 9), heads = drawn(random, 1, 2);
    const int dim = round % 4 == 0 ? 128 : drawn(random, 1, 90);
    const CacheShape shape{group * heads, heads, dim};
    const std::int64_t n = drawn(random, 1, 700);
    const auto row_bytes = 2 * static_cast<std::size_t>(dim) * size_of(type);
    CacheConfig config{.shape = shape, .max_tokens = n};
    config.full_type = type;
    config.page_bytes =
        row_bytes * static_cast<std::size_t>(drawn(random, 1, 70)) + (round % 2 == 0 ? 0 : 3);
    CAPTURE(name_of(type));
    CAPTURE(dim);
    CAPTURE(n);
    CAPTURE(group);
    CAPTURE(config.page_bytes);
    std::vector<float> keys = normal(random, n * heads * dim),
                       values = normal(random, n * heads * dim, 1.0F);
    for (float& x : keys) x = round_to(type, x);
    for (float& x : values) x = round_to(type, x);
    const std::vector<float> query = normal(random, std::int64_t{group} * heads * dim);
    FullKV<> cache(config);
    CHECK(distance(attend(cache, shape, n, query, keys, values),
                   attention(shape, query, keys, values)) < 2e-6);
  }
}

TEST_CASE("coefficients in place: any type, rank, group, length and page") {
  std::mt19937_64 random(22);
  for (int round = 0; round < 40 * support::effort(); ++round) {
    const DType type = static_cast<DType>(round % 3);
    const int group = drawn(random, 1, 9), heads = drawn(random, 1, 2), dim = drawn(random, 8, 96);
    const int key_rank = drawn(random, 1, dim), value_rank = drawn(random, 1, dim);
    const CacheShape shape{group * heads, heads, dim};
    const std::int64_t n = drawn(random, 50, 700);
    CacheConfig config{.shape = shape, .max_tokens = n};
    config.full_type = DType::f32;
    config.epoch_type = DType::f32;
    config.page_bytes = static_cast<std::size_t>(drawn(random, 1, 70)) *
                            static_cast<std::size_t>(key_rank + value_rank) * size_of(type) +
                        8 * static_cast<std::size_t>(dim);
    CAPTURE(name_of(type));
    CAPTURE(key_rank);
    CAPTURE(value_rank);
    CAPTURE(n);
    CAPTURE(group);
    CAPTURE(config.page_bytes);
    std::vector<float> keys = normal(random, n * heads * dim),
                       values = normal(random, n * heads * dim, 1.0F);
    for (float& x : keys) x = round_to(type, x);
    for (float& x : values) x = round_to(type, x);
    keep_channels(keys, dim, key_rank);
    keep_channels(values, dim, value_rank);
    const std::vector<float> query = normal(random, std::int64_t{group} * heads * dim);
    typename StaticPCAHybrid<>::PolicySet policies;
    policies.quantizer.type = type;
    StaticPCAHybrid<> cache(config, first_channels(shape, key_rank, value_rank), policies);
    CHECK(distance(attend(cache, shape, n, query, keys, values),
                   attention(shape, query, keys, values)) < 2e-6);
  }
}

TEST_CASE("packed codes in place: any widths, scales, rank, group, length and page") {
  std::mt19937_64 random(24);
  for (int round = 0; round < 60 * support::effort(); ++round) {
    const int group = drawn(random, 1, 9), heads = drawn(random, 1, 2), dim = drawn(random, 8, 96);
    const int key_rank = drawn(random, 1, dim), value_rank = drawn(random, 1, dim);
    const CacheShape shape{group * heads, heads, dim};
    const std::int64_t n = drawn(random, 50, 900);
    CacheConfig config{.shape = shape, .max_tokens = n};
    config.full_type = DType::f32;
    config.epoch_type = DType::f32;
    config.page_bytes = static_cast<std::size_t>(drawn(random, 1, 70)) *
                            static_cast<std::size_t>(key_rank + value_rank) +
                        8 * static_cast<std::size_t>(dim) + (round % 2 == 0 ? 0 : 3);
    CAPTURE(round);
    CAPTURE(key_rank);
    CAPTURE(value_rank);
    CAPTURE(n);
    CAPTURE(group);
    CAPTURE(config.page_bytes);
    const std::vector<float> keys = normal(random, n * heads * dim),
                             values = normal(random, n * heads * dim, 1.0F);
    const std::vector<float> query = normal(random, std::int64_t{group} * heads * dim);
    LayerBasis basis = first_channels(shape, key_rank, value_rank);
    if (round % 3 == 0) {
      CompressedKVCache<Cpu, PerHead, Static, SinkRecent, Int8> cache(config, basis);
      CHECK(error_of(cache, shape, n, query, keys, values) < 3e-6);
    } else if (round % 3 == 1) {
      using Cache = CompressedKVCache<Cpu, PerHead, Static, SinkRecent, BlockHadamard>;
      typename Cache::PolicySet policies;
      policies.quantizer.high_bits = drawn(random, 2, 8);
      policies.quantizer.low_bits = drawn(random, 2, 8);
      Cache cache(config, basis, policies);
      CHECK(error_of(cache, shape, n, query, keys, values) < 3e-6);
    } else {
      for (HeadBasis& head : basis.heads) {
        head.key_bits = random_bits(random, key_rank);
        head.value_bits = random_bits(random, value_rank);
        head.key_rms.assign(static_cast<std::size_t>(key_rank), 1.0F);
        head.value_rms.assign(static_cast<std::size_t>(value_rank), 1.0F);
      }
      CompressedKVCache<Cpu, PerHead, Static, SinkRecent, TransformCode> cache(config, basis);
      CHECK(error_of(cache, shape, n, query, keys, values) < 3e-6);
    }
  }
}

TEST_CASE("full rows in 8 bits in place: any head_dim, group, length and page") {
  std::mt19937_64 random(25);
  for (int round = 0; round < 20 * support::effort(); ++round) {
    const int group = drawn(random, 1, 9), heads = drawn(random, 1, 2);
    const int dim = round % 4 == 0 ? 128 : drawn(random, 1, 90);
    const CacheShape shape{group * heads, heads, dim};
    const std::int64_t n = drawn(random, 1, 700);
    CacheConfig config{.shape = shape, .max_tokens = n, .full_row_bits = 8};
    config.full_type = DType::f32;
    config.page_bytes =
        static_cast<std::size_t>((2 * dim + 4) * drawn(random, 1, 70) + drawn(random, 0, 3));
    CAPTURE(dim);
    CAPTURE(n);
    CAPTURE(group);
    CAPTURE(config.page_bytes);
    const std::vector<float> keys = normal(random, n * heads * dim),
                             values = normal(random, n * heads * dim, 1.0F),
                             query = normal(random, std::int64_t{group} * heads * dim);
    FullKV<> cache(config);
    CHECK(error_of(cache, shape, n, query, keys, values) < 3e-6);
  }
}

namespace {

/// An engine's threads: here one that does everything, last task first, under changing numbers, and
/// throws half-way through the run after `good_runs` of them.
class Scattered final : public cpu::Executor {
 public:
  int num_threads() const override { return 3; }
  int good_runs = -1;

 protected:
  void run_tasks(std::int64_t num_tasks, const Tasks& tasks) override {
    const bool fails = good_runs-- == 0;
    for (std::int64_t task = num_tasks; task-- > 0;) {
      if (fails && task == num_tasks / 2) throw std::runtime_error("an executor");
      tasks(task, static_cast<int>(task % 3));
    }
  }
};

/// A cache's answers to the query of its last token.
template <class Cache>
std::vector<float> answer(Cache& cache, const CacheShape& shape, const std::vector<float>& query) {
  std::vector<float> out(query.size());
  cache.attend(0, {query.data(), 1, shape.num_qo_heads, shape.head_dim},
               {out.data(), 1, shape.num_qo_heads, shape.head_dim});
  return out;
}
/// `rows` of a token each, one after the other.
std::vector<float> joined(const std::vector<float>& rows, const std::vector<float>& more) {
  std::vector<float> both(rows);
  both.insert(both.end(), more.begin(), more.end());
  return both;
}

/// A sequence of several splits: `exact`, answers are those of float64 over what is stored; in any
/// case they have the same bits on every executor, in a batch with a fork, and beside another
/// query.
template <class Cache>
void check_splits(std::mt19937_64& random, CacheConfig config, const LayerBasis& basis,
                  const typename Cache::PolicySet& policies, bool exact) {
  const CacheShape shape = config.shape;
  const int heads = shape.num_kv_heads, dim = shape.head_dim;
  const std::int64_t n = config.max_tokens - 8, row = std::int64_t{heads} * dim;
  const std::vector<float> keys = normal(random, n * row), values = normal(random, n * row, 1.0F);
  const std::vector<float> query = normal(random, std::int64_t{shape.num_qo_heads} * dim),
                           other = normal(random, std::int64_t{shape.num_qo_heads} * dim);
  CAPTURE(n);
  CAPTURE(heads);
  CAPTURE(shape.num_qo_heads);
  std::vector<float> first, first_pair;
  const std::vector<std::shared_ptr<cpu::Executor>> executors = {
      std::make_shared<cpu::ThreadPool>(1), std::make_shared<cpu::ThreadPool>(2),
      std::make_shared<cpu::ThreadPool>(5), std::make_shared<Scattered>()};
  for (const std::shared_ptr<cpu::Executor>& executor : executors) {
    Cache cache(config, basis, policies, nullptr, executor);
    cache.create(0);
    for (std::int64_t done = 0; done < n;) {
      const std::int64_t count = (std::min)(std::int64_t{1024}, n - done);
      cache.append_maintained(0, {keys.data() + done * row, count, heads, dim},
                              {values.data() + done * row, count, heads, dim});
      done += count;
    }
    const std::vector<float> got = answer(cache, shape, query);
    if (first.empty()) {
      first = got;
      if (exact) {
        std::vector<float> stored_keys(keys.size()), stored_values(values.size());
        cache.reconstruct(0, 0, {stored_keys.data(), n, heads, dim},
                          {stored_values.data(), n, heads, dim});
        CHECK(distance(got, attention(shape, query, stored_keys, stored_values)) < 3e-6);
      }
    }
    CHECK(got == first);
    // In a batch.
    cache.fork(0, 1);
    const std::vector<SequenceId> seqs{0, 1};
    std::vector<float> two = joined(query, query), outs(two.size());
    cache.attend(seqs, {two.data(), 2, shape.num_qo_heads, dim},
                 {outs.data(), 2, shape.num_qo_heads, dim});
    CHECK(outs == joined(first, first));
    // Beside the query of the token before.
    two = joined(other, query);
    cache.attend(0, {two.data(), 2, shape.num_qo_heads, dim},
                 {outs.data(), 2, shape.num_qo_heads, dim});
    CHECK(std::equal(first.begin(), first.end(), outs.begin() + std::ssize(query)));
    if (first_pair.empty()) first_pair = outs;
    CHECK(outs == first_pair);
  }
}

}  // namespace

TEST_CASE("splits of long sequences: float64, and the same bits however they are computed") {
  std::mt19937_64 random(27);
  for (int round = 0; round < 8 * support::effort(); ++round) {
    const int group = round % 4 == 3 ? 1 : drawn(random, 1, 4), heads = drawn(random, 1, 3);
    const int dim = 2 * drawn(random, 4, 20);
    const CacheShape shape{group * heads, heads, dim};
    CacheConfig config{.shape = shape, .max_sequences = 2, .max_tokens = drawn(random, 4700, 9000)};
    config.full_type = config.epoch_type = DType::f32;
    const bool pre_rope = round % 4 >= 2;
    if (pre_rope) config.rope.keys = Rope::pre;
    const int rank = drawn(random, 4, dim);
    LayerBasis basis = first_channels(shape, rank, rank);
    CAPTURE(round);
    if (round % 2 == 0) {
      typename OjaKVv2<>::PolicySet policies;
      policies.quantizer.type = DType::f32;
      check_splits<OjaKVv2<>>(random, config, basis, policies, !pre_rope);
    } else {
      using Coded = CompressedKVCache<Cpu, PerHead, Static, SinkRecent, TransformCode>;
      for (HeadBasis& head : basis.heads) {
        head.key_bits = head.value_bits = random_bits(random, rank);
        head.key_rms.assign(static_cast<std::size_t>(rank), 1.0F);
        head.value_rms = head.key_rms;
        head.value_mean.assign(static_cast<std::size_t>(dim), 1.0F);
      }
      typename Coded::PolicySet policies;
      policies.token_policy = {drawn(random, 0, 600), drawn(random, 1, 40)};
      policies.basis.centred = true;
      check_splits<Coded>(random, config, basis, policies, !pre_rope);
    }
  }
}

TEST_CASE("splits of long sequences: an executor's failure changes nothing") {
  std::mt19937_64 random(28);
  const CacheShape shape{4, 2, 32};
  const auto executor = std::make_shared<Scattered>();
  FullKV<> cache({.shape = shape, .max_tokens = 9000}, {}, {}, nullptr, executor);
  const std::vector<float> rows = normal(random, 8500 * 64), query = normal(random, 4 * 32);
  cache.create(0);
  cache.append_maintained(0, {rows.data(), 8500, 2, 32}, {rows.data(), 8500, 2, 32});
  const std::vector<float> first = answer(cache, shape, query);
  const std::size_t bytes = cache.memory(0).total();
  for (const int good_runs : {0, 1}) {
    executor->good_runs = good_runs;
    CHECK_THROWS_AS(answer(cache, shape, query), std::runtime_error);
    CHECK(answer(cache, shape, query) == first);
    CHECK(cache.memory(0).total() == bytes);
  }
}

TEST_CASE("131072 keys in codes of 2 and 4 bits: the sums keep a relative error below 1e-5") {
  std::mt19937_64 random(26);
  const CacheShape shape{4, 1, 64};
  const std::int64_t n = 131072;
  CacheConfig config{.shape = shape, .max_tokens = n};
  config.epoch_type = DType::f32;
  LayerBasis basis = first_channels(shape, 64, 64);
  basis.heads[0].key_bits.assign(64, 2);
  std::fill_n(basis.heads[0].key_bits.begin(), 16, std::uint8_t{4});
  basis.heads[0].value_bits = basis.heads[0].key_bits;
  basis.heads[0].key_rms.assign(64, 1.0F);
  basis.heads[0].value_rms.assign(64, 1.0F);
  CompressedKVCache<Cpu, PerHead, Static, SinkRecent, TransformCode> cache(config, basis);
  CHECK(error_of(cache, shape, n, normal(random, 4 * 64), normal(random, n * 64),
                 normal(random, n * 64, 1.0F)) < 1e-5);
}

TEST_CASE("131072 keys, values of mean 1: the sums keep a relative error below 1e-5") {
  std::mt19937_64 random(23);
  const CacheShape shape{4, 1, 64};
  const std::int64_t n = 131072;
  CacheConfig config{.shape = shape, .max_tokens = n};
  std::vector<float> keys = normal(random, n * 64), values = normal(random, n * 64, 1.0F);
  for (float& x : keys) x = round_to(DType::f16, x);
  for (float& x : values) x = round_to(DType::f16, x);
  const std::vector<float> query = normal(random, 4 * 64);
  FullKV<> cache(config);
  CHECK(distance(attend(cache, shape, n, query, keys, values),
                 attention(shape, query, keys, values)) < 1e-5);
}

}  // namespace attend_tests
