// SPDX-License-Identifier: Apache-2.0
// The kernels of every instruction set that this machine has, against float64: conversions, logits
// and weighted sums of rows in place and of packed codes, exponentials.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "lowrankkv/core/scalar.hpp"
#include "lowrankkv/cpu/convert.hpp"
#include "lowrankkv/cpu/simd/kernels.hpp"
#include "lowrankkv/quantizer/bit_packing.hpp"

namespace simd_kernel_tests {

using namespace lowrankkv;
using cpu::simd::Kernels;

namespace {

template <class Check>
void on_every_level(Check&& check) {
  for (const char* name : {"portable", "avx2", "avx512"}) {
    const Kernels* kernels = cpu::simd::kernels_named(name);
    if (kernels == nullptr) continue;
    CAPTURE(name);
    check(*kernels);
  }
}

/// Memory of exactly `bytes`, so that AddressSanitizer sees a read of one byte more.
std::unique_ptr<std::byte[]> exactly(std::size_t bytes) {
  return std::make_unique<std::byte[]>(bytes);
}

/// Random numbers of a type, and what they stand for.
struct Numbers {
  std::unique_ptr<std::byte[]> stored;
  std::vector<float> values;
  Numbers(std::mt19937_64& random, DType type, int count)
      : stored(exactly(static_cast<std::size_t>(count) * size_of(type))),
        values(static_cast<std::size_t>(count)) {
    std::normal_distribution<float> normal;
    for (float& x : values) x = round_to(type, normal(random));
    cpu::from_f32(type, values.data(), count, stored.get());
  }
};

int drawn(std::mt19937_64& random, int from, int to) {
  return std::uniform_int_distribution<int>(from, to)(random);
}

/// Rows of packed codes of random widths in blocks of exactly their bytes, pieces of them from a
/// random row on, random scales, and what they stand for.
struct Coded {
  int channels;
  std::vector<cpu::simd::CodeRun> runs;
  std::vector<std::unique_ptr<std::byte[]>> blocks;
  std::vector<cpu::simd::CodePiece> pieces;
  std::vector<float> scales, scratch;
  std::vector<double> values;  // [rows, channels]
  int rows = 0;

  Coded(std::mt19937_64& random, bool keys) {
    const int per_page = drawn(random, 1, 90);
    std::ptrdiff_t bytes = drawn(random, 0, 5);  // scales, as far as the kernels know
    channels = drawn(random, 0, 2);
    for (int i = drawn(random, 1, 5); i > 0; --i) {
      const int bits = drawn(random, 1, 8), count = drawn(random, 1, 40);
      const auto line = static_cast<std::ptrdiff_t>(packed_bytes(per_page, bits));
      runs.push_back({bits, channels, count, bytes, line});
      bytes += count * line;
      channels += count + drawn(random, 0, 1);
    }
    int row = drawn(random, 0, per_page - 1);
    const int wanted = drawn(random, 1, 230);
    while (rows < wanted) {
      if (blocks.empty() || row == per_page) {
        if (!blocks.empty()) row = 0;
        blocks.push_back(exactly(static_cast<std::size_t>(bytes)));
        for (std::ptrdiff_t i = 0; i < bytes; ++i)
          blocks.back()[static_cast<std::size_t>(i)] = static_cast<std::byte>(random());
      }
      const std::byte* block = blocks.back().get();
      const int begin = (keys ? row : rows) % 16;
      const int count = (std::min)({16 - begin, per_page - row, wanted - rows});
      pieces.push_back({block, block + bytes, block, row - begin, 0, begin, count, rows});
      add(random, block, row, count);
      rows += count;
      row += count;
    }
    scratch.resize(pieces.size() * cpu::simd::kCodeScratch);
  }
  cpu::simd::CodeBlock block() {
    return {pieces.data(), static_cast<int>(pieces.size()), scales.data(),
            runs.data(),   static_cast<int>(runs.size()),   scratch.data()};
  }

 private:
  void add(std::mt19937_64& random, const std::byte* block, int row, int count) {
    std::normal_distribution<float> normal;
    for (int i = 0; i < count; ++i) {
      scales.push_back(normal(random));
      std::vector<double> levels(static_cast<std::size_t>(channels));
      for (const cpu::simd::CodeRun& run : runs) {
        for (int c = 0; c < run.count; ++c) {
          const unsigned code = get_code(block + run.first + c * run.line_bytes, row + i, run.bits);
          levels[static_cast<std::size_t>(run.channel + c)] =
              (code + 0.5 - std::ldexp(1.0, run.bits - 1)) * scales.back();
        }
      }
      values.insert(values.end(), levels.begin(), levels.end());
    }
  }
};

}  // namespace

TEST_CASE("there are portable kernels, those that are named are used, and unknown ones are not") {
  REQUIRE(cpu::simd::kernels_named("portable") != nullptr);
  CHECK(cpu::simd::kernels_named("avx1024") == nullptr);
  const char* wish = std::getenv("LOWRANKKV_SIMD");
  if (wish != nullptr && cpu::simd::kernels_named(wish) != nullptr)
    CHECK(&cpu::simd::kernels() == cpu::simd::kernels_named(wish));
}

TEST_CASE("every f16 and every bf16 becomes the f32 that it stands for") {
  on_every_level([](const Kernels& kernels) {
    for (const DType type : {DType::f16, DType::bf16}) {
      std::vector<std::uint16_t> all(65536 + 7);  // no multiple of any register
      for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
      std::vector<float> got(all.size());
      kernels.to_f32[static_cast<std::size_t>(cpu::simd::stored_as(type))](
          reinterpret_cast<const std::byte*>(all.data()), static_cast<std::ptrdiff_t>(all.size()),
          got.data());
      bool good = true;
      for (std::size_t i = 0; i < all.size(); ++i) {
        const float expected =
            type == DType::f16 ? to_float(Half{all[i]}) : to_float(BFloat16{all[i]});
        good = good && (std::isnan(expected) ? std::isnan(got[i])
                                             : std::bit_cast<std::uint32_t>(got[i]) ==
                                                   std::bit_cast<std::uint32_t>(expected));
      }
      CHECK(good);
    }
  });
}

TEST_CASE("exponentials have a relative error below 2^-22, are 0 below -88 and behind the count") {
  std::mt19937_64 random(3);
  std::uniform_real_distribution<float> wide(-87.3F, 0.0F), narrow(-1.0F, 0.0F);
  on_every_level([&](const Kernels& kernels) {
    double worst = 0.0;
    for (int round = 0; round < 4000; ++round) {
      const int count = drawn(random, 1, 250), width = (count + 15) / 16 * 16 + 16;
      const float top = round % 2 == 0 ? 0.0F : 1000.0F * wide(random);
      std::vector<float> line(static_cast<std::size_t>(width), NAN), given;
      for (int i = 0; i < count; ++i)
        line[static_cast<std::size_t>(i)] =
            (std::min)(top, top + (i % 2 == 0 ? wide(random) : narrow(random)));
      line[0] = top;
      given = line;
      const float sum = kernels.exponentials(line.data(), count, width, top);
      double expected_sum = 0.0;
      for (int i = 0; i < count; ++i) {
        const float shifted = given[static_cast<std::size_t>(i)] - top;  // one rounding of its own
        const double expected = std::exp(static_cast<double>(shifted));
        expected_sum += expected;
        if (shifted < -87.3F) continue;
        worst =
            (std::max)(worst, std::abs(line[static_cast<std::size_t>(i)] - expected) / expected);
      }
      REQUIRE(line[0] == 1.0F);
      for (int i = count; i < width; ++i) REQUIRE(line[static_cast<std::size_t>(i)] == 0.0F);
      REQUIRE(std::abs(sum - expected_sum) < 2e-6 * expected_sum);
    }
    CHECK(worst < 0x1p-22);
    float low[16] = {-88.0F, -88.5F, -100.0F, -1e30F, -INFINITY, 0.0F};
    CHECK(kernels.exponentials(low, 6, 16, 0.0F) == 1.0F);
    for (int i = 0; i < 5; ++i) CHECK(low[i] == 0.0F);
  });
}

TEST_CASE("the largest logit of a line counts, with its bias, and nothing behind it") {
  std::mt19937_64 random(4);
  std::normal_distribution<float> normal;
  on_every_level([&](const Kernels& kernels) {
    for (int count = 1; count <= 70; ++count) {
      for (const float bias : {0.0F, -3.5F}) {
        std::vector<float> line(80, 1e9F);
        float expected = -INFINITY;
        for (int i = 0; i < count; ++i) {
          line[static_cast<std::size_t>(i)] = normal(random);
          expected = (std::max)(expected, line[static_cast<std::size_t>(i)] + bias);
        }
        REQUIRE(kernels.largest(line.data(), count, bias) == expected);
      }
    }
  });
}

TEST_CASE(
    "logits of keys in place are the products in float64, whatever the shape, and a row's bits do "
    "not depend on those beside it") {
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  on_every_level([&](const Kernels& kernels) {
    for (int round = 0; round < 300; ++round) {
      const DType type = static_cast<DType>(round % 3);
      const auto size = static_cast<std::ptrdiff_t>(size_of(type));
      const int channels = drawn(random, 1, 140), rows = drawn(random, 1, 9);
      const int per_page = drawn(random, 1, 70), stride = cpu::simd::kBlockRows + 16;
      std::vector<float> query(static_cast<std::size_t>(rows * channels));
      for (float& x : query) x = normal(random);
      // Pieces of several pages, from a random row on.
      std::vector<Numbers> pages;
      std::vector<cpu::simd::KeyPiece> pieces;
      std::vector<double> expected;  // [keys, rows]
      int keys = 0;
      for (int row = drawn(random, 0, per_page - 1); keys < drawn(random, 1, 200);) {
        if (pages.empty() || row == per_page) {
          if (!pages.empty()) row = 0;
          pages.emplace_back(random, type, channels * per_page);
        }
        const int count = (std::min)({16, per_page - row, cpu::simd::kBlockRows - keys});
        const int beyond = row + 16 - per_page;
        const std::byte* first = pages.back().stored.get() + row * size;
        pieces.push_back({first, first, count, keys,
                          beyond <= 0 ? channels : channels - (beyond + per_page - 1) / per_page});
        for (int key = 0; key < count; ++key) {
          for (int i = 0; i < rows; ++i) {
            double sum = 0.0;
            for (int c = 0; c < channels; ++c)
              sum += static_cast<double>(query[static_cast<std::size_t>(i * channels + c)]) *
                     pages.back().values[static_cast<std::size_t>(c * per_page + row + key)];
            expected.push_back(sum);
          }
        }
        keys += count;
        row += count;
      }
      const cpu::simd::KeyBlock block{cpu::simd::stored_as(type), channels, size * per_page,
                                      pieces.data(), static_cast<int>(pieces.size())};
      std::vector<float> got(static_cast<std::size_t>(rows * stride)),
          alone(static_cast<std::size_t>(stride));
      const auto logits = kernels.logits[static_cast<std::size_t>(block.type)];
      logits(block, query.data(), channels, rows, got.data(), stride);
      for (int i = 0; i < rows; ++i) {
        logits(block, query.data() + i * channels, channels, 1, alone.data(), stride);
        for (int key = 0; key < keys; ++key) {
          const float logit = got[static_cast<std::size_t>(i * stride + key)];
          REQUIRE(std::abs(logit - expected[static_cast<std::size_t>(key * rows + i)]) <
                  2e-6 * (1.0 + channels));
          REQUIRE(logit == alone[static_cast<std::size_t>(key)]);
        }
      }
    }
  });
}

TEST_CASE(
    "weighted sums of values in place are the sums in float64, whatever the shape, and a row's "
    "bits "
    "do not depend on those beside it, nor on how rows are split") {
  std::mt19937_64 random(6);
  std::uniform_real_distribution<float> uniform(0.0F, 1.0F);
  on_every_level([&](const Kernels& kernels) {
    for (int round = 0; round < 300; ++round) {
      const DType type = static_cast<DType>(round % 3);
      const auto size = static_cast<std::ptrdiff_t>(size_of(type));
      const int width = 16 * drawn(random, 1, 9), rows = drawn(random, 1, 9);
      const int stride = cpu::simd::kBlockRows + 16;
      std::vector<Numbers> pages;
      std::vector<cpu::simd::ValueRun> runs;
      int count = 0;
      for (const int wanted = drawn(random, 1, 200); count < wanted;) {
        const int length = (std::min)(drawn(random, 1, 40), wanted - count);
        pages.emplace_back(random, type, length * width);
        runs.push_back({pages.back().stored.get(), pages.back().stored.get(), length});
        count += length;
      }
      std::vector<float> weights(static_cast<std::size_t>(rows * stride)),
          sums(static_cast<std::size_t>(rows * width), 1.0F);
      for (float& x : weights) x = uniform(random);
      const cpu::simd::ValueBlock block{
          cpu::simd::stored_as(type),    width, size * width, runs.data(),
          static_cast<int>(runs.size()), count};
      const auto weighted_sum = kernels.weighted_sum[static_cast<std::size_t>(block.type)];
      weighted_sum(block, weights.data(), stride, rows, sums.data(), width);
      for (int i = 0; i < rows; ++i) {
        std::vector<float> alone(static_cast<std::size_t>(width), 1.0F);
        std::ptrdiff_t done = 0;
        for (const cpu::simd::ValueRun& run : runs) {
          weighted_sum({block.type, width, size * width, &run, 1, run.count},
                       weights.data() + i * stride + done, stride, 1, alone.data(), width);
          done += run.count;
        }
        for (int c = 0; c < width; ++c) {
          double expected = 1.0;
          int row = 0;
          for (std::size_t page = 0; page < pages.size(); ++page) {
            for (int own = 0; own < runs[page].count; ++own, ++row)
              expected += static_cast<double>(weights[static_cast<std::size_t>(i * stride + row)]) *
                          pages[page].values[static_cast<std::size_t>(own * width + c)];
          }
          const float sum = sums[static_cast<std::size_t>(i * width + c)];
          REQUIRE(std::abs(sum - expected) < 4e-7 * (10.0 + count));
          REQUIRE(sum == alone[static_cast<std::size_t>(c)]);
        }
      }
    }
  });
}

TEST_CASE(
    "logits of packed codes are the products in float64, and a row's bits do not depend on those "
    "beside it") {
  std::mt19937_64 random(7);
  std::normal_distribution<float> normal;
  on_every_level([&](const Kernels& kernels) {
    if (kernels.code_logits == nullptr) return;
    for (int round = 0; round < 400; ++round) {
      Coded keys(random, true);
      const int rows = drawn(random, 1, 9), channels = keys.channels, stride = keys.rows + 1;
      std::vector<float> query(static_cast<std::size_t>(rows * channels));
      for (float& x : query) x = normal(random);
      std::vector<float> got(static_cast<std::size_t>(rows * stride), 1.0F);
      kernels.code_logits(keys.block(), query.data(), channels, rows, got.data(), stride);
      for (int i = 0; i < rows; ++i) {
        std::vector<float> alone(static_cast<std::size_t>(keys.rows), 1.0F);
        kernels.code_logits(keys.block(), query.data() + i * channels, channels, 1, alone.data(),
                            stride);
        for (int key = 0; key < keys.rows; ++key) {
          double expected = 1.0, size = 1.0;
          for (int c = 0; c < channels; ++c) {
            const double product =
                static_cast<double>(query[static_cast<std::size_t>(i * channels + c)]) *
                keys.values[static_cast<std::size_t>(key * channels + c)];
            expected += product;
            size += std::abs(product);
          }
          const float logit = got[static_cast<std::size_t>(i * stride + key)];
          REQUIRE(std::abs(logit - expected) < 1e-6 * size);
          REQUIRE(logit == alone[static_cast<std::size_t>(key)]);
        }
        REQUIRE(got[static_cast<std::size_t>(i * stride + keys.rows)] == 1.0F);  // nothing behind
      }
    }
  });
}

TEST_CASE("tiles of packed codes are levels times scales, rounded once, and nothing else") {
  std::mt19937_64 random(9);
  on_every_level([&](const Kernels& kernels) {
    if (kernels.code_tile == nullptr) return;
    for (int round = 0; round < 400; ++round) {
      Coded keys(random, true);
      const int stride = keys.rows + drawn(random, 0, 2);
      std::vector<float> tile(static_cast<std::size_t>(keys.channels * stride), 7.0F);
      std::vector<bool> coded(static_cast<std::size_t>(keys.channels));
      for (const cpu::simd::CodeRun& run : keys.runs) {
        for (int c = 0; c < run.count; ++c) coded[static_cast<std::size_t>(run.channel + c)] = true;
      }
      kernels.code_tile(keys.block(), tile.data(), stride);
      for (int c = 0; c < keys.channels; ++c) {
        for (int row = 0; row < stride; ++row) {
          const bool own = row < keys.rows && coded[static_cast<std::size_t>(c)];
          const double value =
              own ? keys.values[static_cast<std::size_t>(row * keys.channels + c)] : 7.0;
          REQUIRE(tile[static_cast<std::size_t>(c * stride + row)] == static_cast<float>(value));
        }
      }
    }
  });
}

TEST_CASE(
    "weighted sums of packed codes are the sums in float64, and a row's bits do not depend on "
    "those beside it") {
  std::mt19937_64 random(8);
  std::uniform_real_distribution<float> uniform(0.0F, 1.0F);
  on_every_level([&](const Kernels& kernels) {
    if (kernels.code_sum == nullptr) return;
    for (int round = 0; round < 400; ++round) {
      Coded values(random, false);
      const int rows = drawn(random, 1, 9), channels = values.channels, stride = values.rows;
      std::vector<float> weights(static_cast<std::size_t>(rows * stride)),
          sums(static_cast<std::size_t>(rows * channels), 1.0F);
      for (float& x : weights) x = uniform(random);
      kernels.code_sum(values.block(), weights.data(), stride, rows, sums.data(), channels);
      for (int i = 0; i < rows; ++i) {
        std::vector<float> alone(static_cast<std::size_t>(channels), 1.0F);
        kernels.code_sum(values.block(), weights.data() + i * stride, stride, 1, alone.data(),
                         channels);
        for (int c = 0; c < channels; ++c) {
          double expected = 1.0, size = 1.0;
          for (int row = 0; row < values.rows; ++row) {
            const double product =
                static_cast<double>(weights[static_cast<std::size_t>(i * stride + row)]) *
                values.values[static_cast<std::size_t>(row * channels + c)];
            expected += product;
            size += std::abs(product);
          }
          const float sum = sums[static_cast<std::size_t>(i * channels + c)];
          REQUIRE(std::abs(sum - expected) < 1e-6 * size);
          REQUIRE(sum == alone[static_cast<std::size_t>(c)]);
        }
      }
    }
  });
}

TEST_CASE("pairs are rotated by the sum of two angles, up to their last column and not beyond") {
  std::mt19937_64 random(29);
  std::uniform_real_distribution<double> any(-3.0, 3.0);
  on_every_level([&](const Kernels& kernels) {
    for (int trial = 0; trial < 200; ++trial) {
      const int pairs = drawn(random, 0, 9), count = drawn(random, 0, 64);
      const bool apart = trial % 2 == 0;  // first and second numbers in halves, or in turn
      const int stride = count + drawn(random, 0, 2);
      constexpr int line = 64;
      std::vector<double> own, of_line;
      std::vector<float> cosines, sines, line_cosines, line_sines;
      for (int pair = 0; pair < pairs; ++pair) {
        own.push_back(any(random));
        cosines.push_back(static_cast<float>(std::cos(own.back())));
        sines.push_back(static_cast<float>(std::sin(own.back())));
        for (int i = 0; i < line; ++i) {
          of_line.push_back(any(random));
          line_cosines.push_back(static_cast<float>(std::cos(of_line.back())));
          line_sines.push_back(static_cast<float>(std::sin(of_line.back())));
        }
      }
      std::vector<float> numbers(static_cast<std::size_t>(2 * pairs * stride));
      for (float& x : numbers) x = static_cast<float>(any(random));
      const std::vector<float> before = numbers;
      kernels.rotate({numbers.data(), std::ptrdiff_t{apart ? pairs : 1} * stride,
                      std::ptrdiff_t{apart ? 1 : 2} * stride, pairs, count, cosines.data(),
                      sines.data(), line_cosines.data(), line_sines.data(), line});
      for (int pair = 0; pair < pairs; ++pair) {
        const int first = (apart ? pair : 2 * pair) * stride;
        const int second = first + (apart ? pairs : 1) * stride;
        for (int i = 0; i < stride; ++i) {
          const auto x = static_cast<std::size_t>(first + i),
                     y = static_cast<std::size_t>(second + i);
          if (i >= count) {
            REQUIRE(numbers[x] == before[x]);
            REQUIRE(numbers[y] == before[y]);
            continue;
          }
          const double angle = own[static_cast<std::size_t>(pair)] +
                               of_line[static_cast<std::size_t>(pair * line + i)];
          REQUIRE(std::abs(numbers[x] -
                           (before[x] * std::cos(angle) - before[y] * std::sin(angle))) < 2e-6);
          REQUIRE(std::abs(numbers[y] -
                           (before[y] * std::cos(angle) + before[x] * std::sin(angle))) < 2e-6);
        }
      }
    }
  });
}

}  // namespace simd_kernel_tests
