// SPDX-License-Identifier: Apache-2.0
// KIVI: codes against the paper's formulas in f64, and groups of rows through every call that moves
// rows.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "lowrankkv/presets.hpp"
#include "support/random_layer.hpp"

namespace channel_groups_tests {

using namespace lowrankkv;

namespace {

constexpr int kHeads = 2, kDim = 40;  // not a multiple of 32: the last group of a value is short
const CacheConfig kConfig{.shape = {2, kHeads, kDim}, .max_sequences = 3, .max_tokens = 1024};

struct Rows {
  std::vector<float> k, v;
};

/// Rows as f16 holds them; keys have a channel that is large and constant.
Rows random_rows(support::Random& random, int n) {
  Rows rows{support::random_rows(random, n, kHeads, kDim, 0.5),
            support::random_rows(random, n, kHeads, kDim)};
  for (std::size_t i = 0; i < rows.k.size(); ++i) {
    if (i % kDim == 7) rows.k[i] += 60.0F;
    rows.k[i] = round_to(DType::f16, rows.k[i]);
    rows.v[i] = round_to(DType::f16, rows.v[i]);
  }
  return rows;
}
KeyView keys(const Rows& rows, int first, int n) {
  return {rows.k.data() + first * kHeads * kDim, n, kHeads, kDim};
}
ValueView values(const Rows& rows, int first, int n) {
  return {rows.v.data() + first * kHeads * kDim, n, kHeads, kDim};
}
template <class Cache>
Rows stored(const Cache& cache, SequenceId seq) {
  const std::int64_t n = cache.num_tokens(seq);
  Rows rows;
  rows.k.resize(static_cast<std::size_t>(n * kHeads * kDim));
  rows.v.resize(rows.k.size());
  cache.reconstruct(seq, 0, {rows.k.data(), n, kHeads, kDim}, {rows.v.data(), n, kHeads, kDim});
  return rows;
}

/// KIVI's codes of one group, decoded; x of f16 numbers. The paper's scale is rounded up to f16.
/// `ties` says of each number whether it lies halfway between two codes.
std::vector<double> reference(const std::vector<double>& x, int bits, std::vector<bool>& ties) {
  const auto [least, largest] = std::minmax_element(x.begin(), x.end());
  const double levels = std::exp2(bits) - 1.0;
  const double step = static_cast<double>(
      to_float(half_not_below(static_cast<float>(*largest - *least) / static_cast<float>(levels))));
  std::vector<double> decoded;
  for (const double value : x) {
    const double code = step == 0.0 ? 0.0 : (value - *least) / step;
    ties.push_back(std::abs(code - std::floor(code) - 0.5) < 1e-3);
    decoded.push_back(std::min(levels, std::floor(code + 0.5)) * step + *least);
  }
  return decoded;
}

/// Checks one group given by the indices of its numbers.
void check_group(const std::vector<float>& given, const std::vector<float>& found,
                 const std::vector<std::size_t>& at, int bits) {
  std::vector<double> x;
  for (const std::size_t i : at) x.push_back(static_cast<double>(given[i]));
  std::vector<bool> ties;
  const std::vector<double> expected = reference(x, bits, ties);
  const auto [least, largest] = std::minmax_element(x.begin(), x.end());
  const double step = (*largest - *least) / (std::exp2(bits) - 1.0) * 1.001;
  for (std::size_t i = 0; i < at.size(); ++i) {
    const double value = static_cast<double>(found[at[i]]);
    if (!ties[i]) REQUIRE(value == doctest::Approx(expected[i]).epsilon(1e-6));
    REQUIRE(std::abs(value - x[i]) <= step / 2.0 + 1e-6);
  }
}

/// The largest error of keys in steps of the widest range that a channel has in the sequence.
double worst_key(const Rows& given, const Rows& found, int bits) {
  double worst = 0.0;
  for (std::size_t channel = 0; channel < kHeads * kDim; ++channel) {
    float low = given.k[channel], high = low;
    for (std::size_t i = channel; i < given.k.size(); i += kHeads * kDim) {
      low = std::min(low, given.k[i]);
      high = std::max(high, given.k[i]);
    }
    for (std::size_t i = channel; i < given.k.size(); i += kHeads * kDim)
      worst = std::max(worst, std::abs(static_cast<double>(given.k[i] - found.k[i])) /
                                  static_cast<double>(high - low) * (std::exp2(bits) - 1.0));
  }
  return worst;
}

template <class Values>
Values without(const Values& all, int first, int count) {
  Values left(all.begin(), all.begin() + first * kHeads * kDim);
  left.insert(left.end(), all.begin() + (first + count) * kHeads * kDim, all.end());
  return left;
}

}  // namespace

TEST_CASE("stored rows are KIVI's: keys per channel over 32 tokens, values per token") {
  support::Random random(1);
  for (const int bits : {2, 4}) {
    for (const int n : {100, 159, 160, 400, 431}) {
      const Rows rows = random_rows(random, n);
      Kivi<> cache(kConfig, {}, {.quantizer = {.bits = bits}});
      cache.create(0);
      cache.ingest(0, keys(rows, 0, n), values(rows, 0, n));
      const Rows found = stored(cache, 0);
      const int coded = std::max(0, (n - 128) / 32 * 32);
      CHECK(cache.tail_length(0) == n - coded);
      for (std::size_t i = static_cast<std::size_t>(coded * kHeads * kDim); i < rows.k.size();
           ++i) {
        REQUIRE(found.k[i] == rows.k[i]);  // the residual
        REQUIRE(found.v[i] == rows.v[i]);
      }
      for (int head = 0; head < kHeads; ++head) {
        const auto index = [&](int token, int channel) {
          return static_cast<std::size_t>((token * kHeads + head) * kDim + channel);
        };
        for (int group = 0; group < coded; group += 32) {
          for (int channel = 0; channel < kDim; ++channel) {
            std::vector<std::size_t> at;
            for (int token = group; token < group + 32; ++token)
              at.push_back(index(token, channel));
            check_group(rows.k, found.k, at, bits);
          }
        }
        for (int token = 0; token < coded; ++token) {
          for (int begin = 0; begin < kDim; begin += 32) {
            std::vector<std::size_t> at;
            for (int channel = begin; channel < std::min(kDim, begin + 32); ++channel)
              at.push_back(index(token, channel));
            check_group(rows.v, found.v, at, bits);
          }
        }
      }
      // A key: 2 f16 a channel and 32 rows; a value: 2 f16 for each of two groups.
      const MemoryUsage usage = cache.memory(0);
      CHECK(usage.coefficient_bytes ==
            static_cast<std::size_t>(coded * kHeads * (2 * kDim * bits + kDim + 2 * 32) / 8));
      CHECK(usage.full_row_bytes == 0);
      CHECK(usage.tail_bytes == static_cast<std::size_t>((n - coded) * kHeads * kDim * 2 * 2));
      if (coded > 0 && coded % cache.tokens_per_page(0) == 0) {
        CHECK(usage.slack_bytes <
              static_cast<std::size_t>(64 * coded / 32));  // no page is part full
      }
    }
  }
}

TEST_CASE("a stored row never changes while tokens are appended, however they come") {
  support::Random random(2);
  const Rows rows = random_rows(random, 700);
  Kivi<> singly(kConfig), in_pieces(kConfig);
  for (Kivi<>* cache : {&singly, &in_pieces}) {
    cache->create(0);
    cache->ingest(0, keys(rows, 0, 205), values(rows, 0, 205));
  }
  Rows before = stored(singly, 0);
  for (int token = 205; token < 700; ++token) {
    const auto flushed = static_cast<std::size_t>(singly.rollback_limit(0) * kHeads * kDim);
    singly.append_maintained(0, keys(rows, token, 1), values(rows, token, 1));
    const Rows now = stored(singly, 0);
    REQUIRE(std::equal(before.k.begin(), before.k.begin() + static_cast<std::ptrdiff_t>(flushed),
                       now.k.begin()));
    before = now;
    REQUIRE(singly.rollback_limit(0) % 32 == 0);
    REQUIRE(singly.tail_length(0) >= 128);
  }
  for (int done = 205; done < 700; done += 45)
    in_pieces.append_maintained(0, keys(rows, done, 45), values(rows, done, 45));
  CHECK(stored(in_pieces, 0).k == before.k);
  CHECK(stored(in_pieces, 0).v == before.v);
  CHECK(worst_key(rows, before, 2) <= 0.5 * 1.001);
}

TEST_CASE("forks, save and load keep every bit; a fork that goes on leaves the other alone") {
  support::Random random(3);
  const Rows rows = random_rows(random, 600);
  Kivi<> cache(kConfig), other({.shape = kConfig.shape, .max_tokens = 1024, .page_bytes = 3000});
  cache.create(0);
  cache.ingest(0, keys(rows, 0, 300), values(rows, 0, 300));
  cache.truncate(0, 77);  // inside the third group
  cache.fork(0, 1);
  std::vector<std::byte> saved(cache.save_bytes(0));
  cache.save(0, saved);
  other.load(0, saved);
  const Rows before = stored(cache, 0);
  CHECK(stored(other, 0).k == before.k);
  for (int token = 300; token < 600; ++token) {
    cache.append_maintained(1, keys(rows, token, 1), values(rows, token, 1));
    other.append_maintained(0, keys(rows, token, 1), values(rows, token, 1));
  }
  CHECK(stored(cache, 0).k == before.k);
  CHECK(stored(cache, 0).v == before.v);
  CHECK(stored(cache, 1).k == stored(other, 0).k);
  CHECK(stored(cache, 1).v == stored(other, 0).v);
}

TEST_CASE("behind a truncation only the open group is coded again, and the next ends a group") {
  support::Random random(4);
  for (const int bits : {2, 4}) {
    for (const int length : {65, 77, 95, 96}) {
      const Rows rows = random_rows(random, 600);
      Kivi<> cache(kConfig, {}, {.quantizer = {.bits = bits}});
      cache.create(0);
      cache.ingest(0, keys(rows, 0, 400), values(rows, 0, 400));
      const Rows before = stored(cache, 0);
      cache.truncate(0, length);
      Rows given{{rows.k.begin(), rows.k.begin() + length * kHeads * kDim}, {}};
      for (int token = 400; token < 600; ++token) {
        cache.append_maintained(0, keys(rows, token, 1), values(rows, token, 1));
        given.k.insert(given.k.end(), rows.k.begin() + token * kHeads * kDim,
                       rows.k.begin() + (token + 1) * kHeads * kDim);
      }
      REQUIRE(cache.rollback_limit(0) > length);
      CHECK(cache.rollback_limit(0) % 32 == 0);
      const Rows now = stored(cache, 0);
      const auto whole = static_cast<std::ptrdiff_t>(length / 32 * 32 * kHeads * kDim);
      CHECK(std::equal(now.k.begin(), now.k.begin() + whole, before.k.begin()));
      CHECK(worst_key(given, now, bits) <= 1.0 * 1.01);  // s / 2, and s / 2 more
    }
  }
}

TEST_CASE("removed tokens: rows before them stay, the others lose two half steps more at most") {
  support::Random random(5);
  for (const int bits : {2, 4}) {
    for (const auto& [first, count] :
         {std::pair{40, 1}, {40, 32}, {5, 100}, {64, 64}, {250, 100}, {0, 13}}) {
      Rows given = random_rows(random, 500);
      Kivi<> cache(kConfig, {}, {.quantizer = {.bits = bits}});
      cache.create(0);
      cache.ingest(0, keys(given, 0, 500), values(given, 0, 500));
      const Rows before = stored(cache, 0);
      cache.remove(0, first, count);
      Rows now = stored(cache, 0);
      given = {without(given.k, first, count), without(given.v, first, count)};
      const auto whole = static_cast<std::ptrdiff_t>(first / 32 * 32 * kHeads * kDim);
      CHECK(std::equal(now.k.begin(), now.k.begin() + whole, before.k.begin()));
      CHECK(now.v == without(before.v, first, count));  // values move as they are
      if (count % 32 == 0 && first % 32 == 0) CHECK(now.k == without(before.k, first, count));
      CHECK(worst_key(given, now, bits) <= 1.5 * 1.01);
      const Rows more = random_rows(random, 200);
      for (int token = 0; token < 200; ++token)
        cache.append_maintained(0, keys(more, token, 1), values(more, token, 1));
      given.k.insert(given.k.end(), more.k.begin(), more.k.end());
      now = stored(cache, 0);
      CHECK(cache.rollback_limit(0) % 32 == 0);
      CHECK(worst_key(given, now, bits) <= 2.0 * 1.01);
    }
  }
}

TEST_CASE("what cannot be: groups across flushes, certificates, small pages, parameters") {
  CacheConfig config = kConfig;
  config.flush_interval = 20;
  CHECK_THROWS_WITH_AS(
      Kivi<>{config},
      "flush_interval: 20, this quantizer codes rows in groups of 32 and needs a multiple",
      ValueError);
  config = kConfig;
  config.keep_residuals = true;
  CHECK_THROWS_WITH_AS(Kivi<>{config},
                       "keep_residuals: 1, 0 expected: this quantizer codes rows in groups of 32, "
                       "and may code a stored row again",
                       ValueError);
  config = kConfig;
  config.page_bytes = 1000;
  CHECK_THROWS_WITH_AS(Kivi<>{config}, "page_bytes: a group of 32 rows needs 1056, a page has 1000",
                       CapacityError);
  CHECK_THROWS_WITH_AS(Kivi<>(kConfig, {}, {.quantizer = {.bits = 0}}),
                       "ChannelGroups: bits are 1 to 8, given 0", ValueError);
  CHECK_THROWS_WITH_AS(Kivi<>(kConfig, {}, {.quantizer = {.tokens = 12}}),
                       "ChannelGroups: tokens are a multiple of 8, 8 to 4096, given 12",
                       ValueError);
  CHECK_THROWS_WITH_AS(Kivi<>(kConfig, {}, {.quantizer = {.channels = 0}}),
                       "ChannelGroups: channels are at least 1, given 0", ValueError);
}

}  // namespace channel_groups_tests
