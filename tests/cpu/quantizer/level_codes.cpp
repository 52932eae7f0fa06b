// SPDX-License-Identifier: Apache-2.0
// Formats of engines, each against its description written plainly in f64: ggml's q8_0 and q4_0,
// FP8 E4M3.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "lowrankkv/presets.hpp"

namespace level_codes_tests {

using namespace lowrankkv;
using Random = std::mt19937_64;

namespace {

/// Rows with heavy tails, channels of different sizes, and a channel that is large and constant.
std::vector<float> heavy_rows(Random& random, int count, int rank) {
  std::normal_distribution<float> normal;
  std::vector<float> rows;
  for (int i = 0; i < count * rank; ++i) {
    const float x = normal(random);
    rows.push_back(round_to(DType::f16, i % rank == 3
                                            ? 40.0F + 0.1F * x
                                            : x * x * x * (0.1F + static_cast<float>(i % 7))));
  }
  return rows;
}

/// Encodes rows into a block that holds exactly `rows_per_page`, from row `first` on, and decodes
/// them again, row-major.
template <class Quantizer>
std::vector<float> round_trip(const Quantizer& quantizer, Part part, int rank, int first,
                              int rows_per_page, const std::vector<float>& rows) {
  using Codec = Impl<Quantizer, Cpu>;
  const auto layout = Codec::layout(quantizer, rank, {});
  const int count = static_cast<int>(rows.size()) / rank;
  std::vector<std::byte> block(Codec::block_bytes(layout, rows_per_page));
  Codec::encode(layout, part, rows_per_page, block.data(), first, count, rows.data(), rank);
  const int stride = (part == Part::key ? count : rank) + 2;
  std::vector<float> tile(static_cast<std::size_t>((part == Part::key ? rank : count) * stride),
                          -7.0F);
  Codec::decode(layout, part, rows_per_page, block.data(), first, count, tile.data(), stride);
  std::vector<float> decoded;
  for (int row = 0; row < count; ++row) {
    for (int channel = 0; channel < rank; ++channel)
      decoded.push_back(tile[static_cast<std::size_t>(part == Part::key ? channel * stride + row
                                                                        : row * stride + channel)]);
  }
  return decoded;
}

/// ggml's q8_0 and q4_0, block by block, as the format is described. `ties`: numbers halfway
/// between two codes, which f32 may round to the other one.
std::vector<double> ggml(int bits, int rank, const std::vector<float>& rows,
                         std::vector<bool>& ties) {
  std::vector<double> result;
  for (std::size_t row = 0; row < rows.size(); row += static_cast<std::size_t>(rank)) {
    for (int begin = 0; begin < rank; begin += 32) {
      const int n = std::min(32, rank - begin);
      const float* x = rows.data() + row + begin;
      double largest = 0.0;
      for (int i = 0; i < n; ++i)
        if (std::abs(static_cast<double>(x[i])) > std::abs(largest))
          largest = static_cast<double>(x[i]);
      const double step = bits == 8 ? std::abs(largest) / 127.0 : largest / -8.0;
      const double stored = static_cast<double>(to_float(to_half(static_cast<float>(step))));
      for (int i = 0; i < n; ++i) {
        const double ratio = step == 0.0 ? 0.0 : static_cast<double>(x[i]) / step;
        ties.push_back(step != 0.0 && std::abs(ratio - std::floor(ratio) - 0.5) < 1e-4);
        result.push_back(stored * (bits == 8 ? std::round(ratio)
                                             : std::min(15.0, std::floor(ratio + 8.5)) - 8.0));
      }
    }
  }
  return result;
}

/// The number of E4M3 nearest to x, ties to the even mantissa, of all that there are.
double nearest_e4m3(double x) {
  double best = 0.0;
  int best_code = 0;
  for (int code = 0; code < 127; ++code) {
    const int exponent = code / 8, mantissa = code % 8;
    const double value = exponent == 0 ? mantissa * std::exp2(-9.0)
                                       : (1.0 + mantissa / 8.0) * std::exp2(exponent - 7.0);
    const double here = std::abs(std::abs(x) - value), there = std::abs(std::abs(x) - best);
    if (here < there || (here == there && code % 2 == 0 && best_code % 2 == 1)) {
      best = value;
      best_code = code;
    }
  }
  return x < 0.0 ? -best : best;
}

template <class Check>
void for_each_case(Check&& check) {
  Random random(1);
  for (const int rank : {1, 31, 32, 40, 64, 80, 128}) {
    for (const auto& [first, rows_per_page, count] :
         {std::array{0, 1, 1}, std::array{0, 13, 13}, std::array{5, 150, 131}}) {
      for (const Part part : {Part::key, Part::value})
        check(part, rank, first, rows_per_page, heavy_rows(random, count, rank));
    }
  }
}

}  // namespace

TEST_CASE_TEMPLATE("q8_0 and q4_0 decode to what ggml's description gives", Blocks, GgmlBlocks<8>,
                   GgmlBlocks<4>) {
  constexpr int bits = std::is_same_v<Blocks, GgmlBlocks<8>> ? 8 : 4;
  for_each_case([](Part part, int rank, int first, int rows_per_page,
                   const std::vector<float>& rows) {
    const std::vector<float> decoded = round_trip(Blocks{}, part, rank, first, rows_per_page, rows);
    std::vector<bool> ties;
    const std::vector<double> expected = ggml(bits, rank, rows, ties);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (!ties[i]) REQUIRE(static_cast<double>(decoded[i]) == expected[i]);
    }
    for (std::size_t row = 0; row < rows.size(); row += static_cast<std::size_t>(rank)) {
      for (std::size_t i = row; i < row + static_cast<std::size_t>(rank); ++i) {
        const std::size_t begin = i - (i - row) % 32;
        const std::size_t end = std::min(begin + 32, row + static_cast<std::size_t>(rank));
        float largest = 0.0F;
        for (std::size_t j = begin; j < end; ++j) largest = std::max(largest, std::abs(rows[j]));
        const float bound = bits == 8 ? largest / 254.0F : largest / 8.0F;
        REQUIRE(std::abs(rows[i] - decoded[i]) <=
                bound * 1.001F + largest / 2048.0F + 4e-6F);  // scales may be subnormal in f16
      }
    }
  });
}

TEST_CASE("q8_0 and q4_0 take the bytes of ggml's blocks; a short last block takes its own") {
  CHECK(Impl<GgmlBlocks<8>, Cpu>::row_bits(ggml_layout(GgmlBlocks<8>{}, 64)) == 2 * 34 * 8);
  CHECK(Impl<GgmlBlocks<4>, Cpu>::row_bits(ggml_layout(GgmlBlocks<4>{}, 64)) == 2 * 18 * 8);
  CHECK(Impl<GgmlBlocks<4>, Cpu>::row_bits(ggml_layout(GgmlBlocks<4>{}, 40)) == (18 + 4 + 2) * 8);
}

TEST_CASE("every number of E4M3 is its own code, and every other one rounds to the nearest") {
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7f) == 0x7f) continue;
    REQUIRE(to_e4m3(from_e4m3(static_cast<std::uint8_t>(code))) == code);
  }
  Random random(2);
  std::uniform_real_distribution<float> exponent(-12.0F, 8.79F);
  for (int i = 0; i < 20000; ++i) {
    const float x = std::exp2(exponent(random)) * (random() % 2 == 0 ? 1.0F : -1.0F);
    REQUIRE(static_cast<double>(from_e4m3(to_e4m3(x))) == nearest_e4m3(static_cast<double>(x)));
  }
  for (int code = 0; code < 126; ++code) {  // halfway between two neighbours: the even one
    const float low = from_e4m3(static_cast<std::uint8_t>(code)),
                high = from_e4m3(static_cast<std::uint8_t>(code + 1));
    REQUIRE(to_e4m3(0.5F * (low + high)) == code + code % 2);
  }
  for (const float x : {448.0F, 463.0F, 465.0F, 1e30F, std::numeric_limits<float>::infinity()}) {
    CHECK(from_e4m3(to_e4m3(x)) == 448.0F);
    CHECK(from_e4m3(to_e4m3(-x)) == -448.0F);
  }
  CHECK(std::isnan(from_e4m3(to_e4m3(std::numeric_limits<float>::quiet_NaN()))));
}

TEST_CASE("FP8 rows: as they are, and with a scale a row that nothing saturates under") {
  for_each_case([](Part part, int rank, int first, int rows_per_page, std::vector<float> rows) {
    for (std::size_t i = 0; i < rows.size(); i += 17) rows[i] *= 30.0F;
    const std::vector<float> plain = round_trip(Fp8Rows{}, part, rank, first, rows_per_page, rows);
    const std::vector<float> scaled =
        round_trip(Fp8Rows{true}, part, rank, first, rows_per_page, rows);
    for (std::size_t row = 0; row < rows.size(); row += static_cast<std::size_t>(rank)) {
      float largest = 0.0F;
      for (std::size_t i = row; i < row + static_cast<std::size_t>(rank); ++i)
        largest = std::max(largest, std::abs(rows[i]));
      for (std::size_t i = row; i < row + static_cast<std::size_t>(rank); ++i) {
        REQUIRE(static_cast<double>(plain[i]) == nearest_e4m3(static_cast<double>(rows[i])));
        REQUIRE(std::abs(scaled[i] - rows[i]) <=
                std::max(std::abs(rows[i]) / 16.0F, largest / 448.0F / 1024.0F) * 1.002F + 1e-9F);
      }
    }
  });
  CHECK(Impl<Fp8Rows, Cpu>::row_bits(fp8_layout({}, 64)) == 64 * 8);
  CHECK(Impl<Fp8Rows, Cpu>::row_bits(fp8_layout({true}, 64)) == 64 * 8 + 16);
}

TEST_CASE_TEMPLATE("rows are copied bit for bit between blocks, and their neighbours stay",
                   Quantizer, GgmlBlocks<8>, GgmlBlocks<4>, Fp8Rows) {
  using Codec = Impl<Quantizer, Cpu>;
  Random random(3);
  for (const int rank : {40, 64}) {
    const auto layout = Codec::layout(Quantizer{}, rank, {});
    for (const Part part : {Part::key, Part::value}) {
      const std::vector<float> rows = heavy_rows(random, 20, rank);
      std::vector<std::byte> from(Codec::block_bytes(layout, 20)),
          to(Codec::block_bytes(layout, 11), std::byte{0xa5});
      Codec::encode(layout, part, 20, from.data(), 0, 20, rows.data(), rank);
      for (int i = 0; i < 11; ++i)  // in an order of its own
        Codec::copy_row(layout, part, from.data(), 20, 19 - i, to.data(), 11, i * 7 % 11);
      std::vector<float> all(static_cast<std::size_t>(20 * rank)),
          copied(static_cast<std::size_t>(11 * rank));
      const bool keys = part == Part::key;
      Codec::decode(layout, part, 20, from.data(), 0, 20, all.data(), keys ? 20 : rank);
      Codec::decode(layout, part, 11, to.data(), 0, 11, copied.data(), keys ? 11 : rank);
      for (int i = 0; i < 11; ++i) {
        for (int channel = 0; channel < rank; ++channel) {
          REQUIRE(copied[static_cast<std::size_t>(keys ? channel * 11 + i * 7 % 11
                                                       : i * 7 % 11 * rank + channel)] ==
                  all[static_cast<std::size_t>(keys ? channel * 20 + 19 - i
                                                    : (19 - i) * rank + channel)]);
        }
      }
    }
  }
}

TEST_CASE_TEMPLATE("presets without calibration: bytes of every row, and no maps taken", Cache,
                   Q8_0<>, Q4_0<>, Fp8<>) {
  const CacheConfig config{.shape = {4, 2, 64}, .max_tokens = 512};
  Cache cache(config);
  Random random(4);
  const std::vector<float> k = heavy_rows(random, 200, 128), q = heavy_rows(random, 200, 256);
  cache.create(0);
  cache.ingest(0, {k.data(), 200, 2, 64}, {k.data(), 200, 2, 64});
  const std::size_t row = std::is_same_v<Cache, Q8_0<>>   ? 68
                          : std::is_same_v<Cache, Q4_0<>> ? 36
                                                          : 64;
  const MemoryUsage usage = cache.memory(0);
  CHECK(usage.coefficient_bytes == 200 * 2 * 2 * row);
  CHECK(usage.full_row_bytes == 0);
  CHECK(usage.tail_bytes == 0);
  CHECK(cache.memory().shared_bytes == 2 * 2 * 64 * 64 * (2 + 4));  // maps as stored, and in f32
  CHECK_THROWS_WITH_AS(Cache(config, identity_basis(config.shape)),
                       "Identity: makes its own maps, expected 0 heads of a basis, given 2",
                       ShapeError);
}

TEST_CASE("a saved sequence of one format is not another's") {
  const CacheConfig config{.shape = {2, 1, 64}, .max_tokens = 64};
  Q8_0<> q8(config);
  CompressedKVCache<Cpu, Identity, Static, CompressAll, Int8> int8(config);
  Random random(5);
  const std::vector<float> k = heavy_rows(random, 40, 64);
  q8.create(0);
  q8.ingest(0, {k.data(), 40, 1, 64}, {k.data(), 40, 1, 64});
  std::vector<std::byte> saved(q8.save_bytes(0));
  q8.save(0, saved);
  CHECK_THROWS_AS(int8.load(0, saved), Error);
  Q8_0<> again(config);
  again.load(7, saved);
  CHECK(again.num_tokens(7) == 40);
}

}  // namespace level_codes_tests
