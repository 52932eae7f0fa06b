// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <random>
#include <vector>

#include "../support/blocks.hpp"
#include "lowrankkv/core/online_softmax.hpp"
#include "lowrankkv/core/page_allocator.hpp"
#include "lowrankkv/core/rope.hpp"
#include "lowrankkv/core/scalar.hpp"
#include "lowrankkv/cpu/convert.hpp"
#include "lowrankkv/cpu/matmul.hpp"
#include "lowrankkv/cpu/thread_pool.hpp"

using namespace lowrankkv;

namespace {
double half_value(std::uint16_t bits) {  // straight from IEEE 754
  const int exponent = bits >> 10 & 31;
  const double mantissa = bits & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}
}  // namespace

TEST_CASE("every finite half converts exactly and comes back, by scalar and by array") {
  std::vector<std::uint16_t> all;
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    if ((bits >> 10 & 31) == 31) continue;
    all.push_back(static_cast<std::uint16_t>(bits));
    CHECK(to_float(Half{all.back()}) == static_cast<float>(half_value(all.back())));
    CHECK(to_half(to_float(Half{all.back()})).bits == bits);
  }
  std::vector<float> wide(all.size());
  cpu::to_f32(DType::f16, all.data(), static_cast<std::int64_t>(all.size()), wide.data());
  for (std::size_t i = 0; i < all.size(); ++i) CHECK(wide[i] == to_float(Half{all[i]}));
  CHECK(std::isinf(to_float(Half{0x7c00})));
  CHECK(std::isnan(to_float(Half{0x7e00})));
}

TEST_CASE("f32 rounds to the nearest half, ties to even, and saturates") {
  std::mt19937 random(5);
  std::uniform_int_distribution<std::uint32_t> bits;
  for (int i = 0; i < 200000; ++i) {
    const float x = std::bit_cast<float>(bits(random));
    if (!std::isfinite(x)) continue;
    const double rounded = half_value(to_half(x).bits);
    if (std::abs(x) >= 65504.0F) {
      CHECK(std::abs(rounded) == 65504.0);
      continue;
    }
    const std::uint16_t b = to_half(x).bits;
    for (const int step : {-1, 1}) {
      const std::uint16_t neighbour = static_cast<std::uint16_t>(b + step);
      if ((neighbour >> 10 & 31) == 31 || ((neighbour ^ b) & 0x8000)) continue;
      const double here = std::abs(rounded - x);
      const double there = std::abs(half_value(neighbour) - x);
      CHECK((here < there || (here == there && b % 2 == 0)));
    }
  }
  CHECK(std::isnan(to_float(to_half(std::numeric_limits<float>::quiet_NaN()))));
  CHECK(std::isinf(to_float(to_half(std::numeric_limits<float>::infinity()))));
}

TEST_CASE("bf16 keeps 8 bits of mantissa and saturates") {
  CHECK(to_float(to_bfloat16(1.0F)) == 1.0F);
  CHECK(to_float(to_bfloat16(3.4e38F)) == max_finite(DType::bf16));
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  for (int i = 0; i < 10000; ++i) {
    const float x = normal(random);
    CHECK(std::abs(to_float(to_bfloat16(x)) - x) <= unit_roundoff(DType::bf16) * std::abs(x));
    CHECK(std::abs(round_to(DType::f16, x) - x) <=
          unit_roundoff(DType::f16) * std::abs(x) + 0x1p-25F);
  }
}

TEST_CASE(
    "matmul equals the plain product for all small shapes, and the order of its sums does not "
    "depend on m and n") {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (const int m : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 33}) {
    for (const int n : {1, 7, 16, 17, 40, 64, 80}) {
      for (const int k : {1, 3, 40, 77}) {
        const int ld = cpu::padded(n);
        std::vector<float> a(static_cast<std::size_t>(m * k)), b(static_cast<std::size_t>(k * ld)),
            c(static_cast<std::size_t>(m * ld), 1.0F), row(static_cast<std::size_t>(ld));
        for (float& x : a) x = normal(random);
        for (float& x : b) x = normal(random);
        std::vector<float> sum = c;
        cpu::matmul<false>(m, ld, k, a.data(), k, b.data(), ld, c.data(), ld);
        cpu::matmul<true>(m, ld, k, a.data(), k, b.data(), ld, sum.data(), ld);
        for (int i = 0; i < m; ++i) {
          cpu::matmul<false>(1, ld, k, a.data() + i * k, k, b.data(), ld, row.data(), ld);
          for (int j = 0; j < n; ++j) {
            double expected = 0.0;
            for (int p = 0; p < k; ++p)
              expected += static_cast<double>(a[static_cast<std::size_t>(i * k + p)]) *
                          b[static_cast<std::size_t>(p * ld + j)];
            const float got = c[static_cast<std::size_t>(i * ld + j)];
            REQUIRE(std::abs(got - expected) < 1e-5 * (1.0 + std::sqrt(k)));
            REQUIRE(std::abs(sum[static_cast<std::size_t>(i * ld + j)] - expected - 1.0) <
                    2e-5 * (1.0 + std::sqrt(k)));
            REQUIRE(row[static_cast<std::size_t>(j)] == got);
          }
        }
      }
    }
  }
}

TEST_CASE(
    "merging attention over disjoint sets is associative and commutative, and no tokens are "
    "neutral") {
  std::mt19937 random(8);
  std::normal_distribution<float> normal;
  const float none = -std::numeric_limits<float>::infinity();
  for (int round = 0; round < 200; ++round) {
    constexpr int width = 5;
    float out[3][width], lse[3];
    for (int part = 0; part < 3; ++part) {
      lse[part] = round % 10 == part ? none : 20.0F * normal(random);
      for (float& x : out[part]) x = lse[part] == none ? 0.0F : normal(random);
    }
    const auto merged = [&](std::vector<int> order, bool right) {
      std::vector<float> a(out[order[0]], out[order[0]] + width),
          b(out[order[1]], out[order[1]] + width);
      float la = lse[order[0]], lb = lse[order[1]];
      if (right) {
        merge_attention(b.data(), lb, out[order[2]], lse[order[2]], width);
        merge_attention(a.data(), la, b.data(), lb, width);
      } else {
        merge_attention(a.data(), la, b.data(), lb, width);
        merge_attention(a.data(), la, out[order[2]], lse[order[2]], width);
      }
      a.push_back(la);
      return a;
    };
    const auto left = merged({0, 1, 2}, false);
    for (const auto& other :
         {merged({0, 1, 2}, true), merged({2, 0, 1}, false), merged({1, 2, 0}, true)}) {
      for (std::size_t i = 0; i < left.size(); ++i)
        CHECK(other[i] == doctest::Approx(left[i]).epsilon(1e-5));
    }
  }
  float a[2] = {0, 0}, la = none;
  const float b[2] = {0, 0};
  merge_attention(a, la, b, none, 2);
  CHECK(la == none);
  CHECK(a[0] == 0.0F);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  float c[2] = {nan, nan}, lc = none;  // an empty part, normalised by 0
  const float d[2] = {1.0F, 2.0F};
  merge_attention(c, lc, d, 3.0F, 2);
  CHECK((c[0] == 1.0F && c[1] == 2.0F && lc == 3.0F));
  float e[2] = {nan, nan};
  merge_attention(c, lc, e, none, 2);
  CHECK((c[0] == 1.0F && lc == 3.0F));
}

TEST_CASE(
    "rope turns pairs by position times frequency, in both pairings, and scaling follows Llama 3") {
  auto frequencies = rope_frequencies(8, 10000.0);
  CHECK(frequencies[0] == 1.0);
  CHECK(frequencies[3] == doctest::Approx(1e-3));
  std::vector<float> half{1, 2, 3, 4, 5, 6, 7, 8}, inter{1, 5, 2, 6, 3, 7, 4, 8};
  apply_rope(half.data(), frequencies, 17, RopePairing::half_split);
  apply_rope(inter.data(), frequencies, 17, RopePairing::interleaved);
  for (int i = 0; i < 4; ++i) {
    CHECK(half[static_cast<std::size_t>(i)] ==
          doctest::Approx(inter[static_cast<std::size_t>(2 * i)]));
    CHECK(half[static_cast<std::size_t>(i + 4)] ==
          doctest::Approx(inter[static_cast<std::size_t>(2 * i + 1)]));
  }
  CHECK(half[0] == doctest::Approx(std::cos(17.0) - 5 * std::sin(17.0)));
  auto scaled = rope_frequencies(128, 500000.0);
  const auto plain = scaled;
  scale_frequencies(scaled, {});
  CHECK(scaled.front() == plain.front());
  CHECK(scaled.back() == doctest::Approx(plain.back() / 8.0));
  CHECK_THROWS_WITH_AS(rope_frequencies(7, 1e4), "rope: head_dim must be even, given 7",
                       ShapeError);
}

TEST_CASE("the page allocator counts references and names both numbers when it runs out") {
  PageAllocator pages(3);
  const auto a = pages.take();
  pages.share(a);
  CHECK(pages.shared(a));
  pages.release(a);
  CHECK(!pages.shared(a));
  CHECK(pages.num_free() == 2);
  pages.release(a);
  CHECK(pages.num_free() == 3);
  CHECK_THROWS_WITH_AS(pages.require(4), "page pool: 4 pages needed, 3 free", CapacityError);
}

TEST_CASE("pages may come from an engine's own block manager, which is not believed") {
  const auto blocks = std::make_shared<support::Blocks>(std::vector<std::int32_t>{7, 2, 5});
  PageAllocator pages(8, blocks);
  CHECK(pages.num_pages() == 8);
  CHECK(pages.num_free() == 3);
  CHECK_THROWS_WITH_AS(pages.require(4), "page pool: 4 pages needed, 3 free", CapacityError);
  CHECK(pages.take() == 5);
  pages.share(5);
  pages.release(5);
  CHECK(blocks->left.size() == 2);
  pages.release(5);
  CHECK(blocks->left == std::vector<std::int32_t>{7, 2, 5});
  CHECK(pages.take() == 5);
  blocks->left.push_back(5);
  CHECK_THROWS_WITH_AS(pages.take(), "page source: gave page 5, which is taken; of pages 0 to 7",
                       StateError);
  blocks->left.push_back(8);
  CHECK_THROWS_WITH_AS(pages.take(), "page source: gave page 8, pages 0 to 7", StateError);
  blocks->left.clear();
  CHECK_THROWS_WITH_AS(pages.take(), "page pool: 1 pages needed, 0 free", CapacityError);
}

TEST_CASE("the thread pool runs every task once, whatever the number of threads") {
  for (const int threads : {1, 2, 5}) {
    cpu::ThreadPool pool(threads);
    for (const int tasks : {0, 1, 3, 1000}) {
      std::vector<int> count(static_cast<std::size_t>(tasks), 0);
      pool.run(tasks, [&](std::int64_t task, int thread) {
        CHECK(thread < threads);
        ++count[static_cast<std::size_t>(task)];
      });
      for (const int n : count) CHECK(n == 1);
      if (tasks == 1000) {
        std::atomic<int> ran{0};
        CHECK_THROWS_AS(pool.run(tasks,
                                 [&](std::int64_t task, int) {
                                   ++ran;
                                   if (task == 500) throw std::runtime_error("a task");
                                 }),
                        std::runtime_error);
        CHECK((threads == 1 || ran == tasks));
      }
    }
  }
}
