// SPDX-License-Identifier: Apache-2.0
// Packed codes, and the quantizers made of them: Int8, BlockHadamard, TransformCode.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "lowrankkv/cpu/quantizer/block_hadamard.hpp"
#include "lowrankkv/cpu/quantizer/int8.hpp"
#include "lowrankkv/cpu/quantizer/transform_code.hpp"
#include "lowrankkv/quantizer/bit_packing.hpp"
#include "lowrankkv/quantizer/flat_rotation.hpp"

namespace packed_codes_tests {

using namespace lowrankkv;

namespace {

std::vector<float> normal_rows(std::mt19937_64& random, int count, int rank, float spread = 1.0F) {
  std::normal_distribution<float> normal(0.0F, spread);
  std::vector<float> rows(static_cast<std::size_t>(count * rank));
  for (float& value : rows) value = normal(random);
  return rows;
}

std::vector<std::byte> noise(std::mt19937_64& random, std::size_t bytes) {
  std::vector<std::byte> block(bytes);
  for (std::byte& byte : block) byte = static_cast<std::byte>(random());
  return block;
}

/// Decodes rows [first, first + count) row-major, through the part's own order.
std::vector<float> decode(const CodeLayout& layout, Part part, int rows_per_page,
                          const std::vector<std::byte>& block, int first, int count) {
  const int stride = (part == Part::key ? count : layout.rank) + 3;
  std::vector<float> tile(
      static_cast<std::size_t>((part == Part::key ? layout.rank : count) * stride), NAN);
  cpu::decode_codes(layout, part, rows_per_page, block.data(), first, count, tile.data(), stride);
  std::vector<float> rows(static_cast<std::size_t>(count * layout.rank));
  for (int row = 0; row < count; ++row) {
    for (int channel = 0; channel < layout.rank; ++channel) {
      rows[static_cast<std::size_t>(row * layout.rank + channel)] = tile[static_cast<std::size_t>(
          part == Part::key ? channel * stride + row : row * stride + channel)];
    }
  }
  return rows;
}

std::size_t block_bytes(const CodeLayout& layout, int rows) { return layout.block_bytes(rows); }

}  // namespace

TEST_CASE("decoding gives what one code at a time gives, bit for bit, and touches nothing else") {
  std::mt19937_64 random(6);
  std::vector<CodeLayout> layouts;
  const auto add = [&](std::vector<std::uint8_t> bits, std::vector<ScaleGroup> groups) {
    for (const ScaleKind kind : {ScaleKind::largest_f16, ScaleKind::norm_log8})
      layouts.push_back({static_cast<int>(bits.size()), bits, groups, kind, 1.0F});
  };
  for (std::uint8_t bits = 1; bits <= 8; ++bits) {
    for (const int rank : {1, 15, 16, 37})
      add(std::vector<std::uint8_t>(static_cast<std::size_t>(rank), bits), {{0, rank}});
  }
  add({8, 8, 7, 6, 6, 5, 4, 4, 4, 3, 3, 3, 3, 2, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0},
      {{0, 22}});  // as TransformCode orders them
  add({0, 3, 0, 0, 8, 1, 5, 0, 7, 2, 2, 0, 0, 6, 4, 4, 4, 4, 4, 0, 1, 0},
      {{1, 4}, {5, 5}, {13, 8}});  // gaps in groups and between
  add({0, 0, 0}, {});
  add({}, {});
  for (const CodeLayout& layout : layouts) {
    for (const int rows_per_page : {1, 3, 8, 61, 200}) {
      const std::vector<std::byte> block =
          noise(random, layout.block_bytes(rows_per_page));  // exactly: reading on is an error
      for (int trial = 0; trial < 12; ++trial) {
        const int first =
            trial == 0 ? 0 : static_cast<int>(random() % static_cast<unsigned>(rows_per_page));
        const int count =
            trial < 2
                ? rows_per_page - first
                : 1 + static_cast<int>(random() % static_cast<unsigned>(rows_per_page - first));
        for (const Part part : {Part::key, Part::value}) {
          const int lines = part == Part::key ? layout.rank : count,
                    length = part == Part::key ? count : layout.rank;
          const int stride = length + trial * 2;
          std::vector<float> expected(static_cast<std::size_t>(lines * stride), -7.0F);
          const std::byte* line = block.data() + layout.first_code_line(rows_per_page);
          for (int channel = 0; channel < layout.rank; ++channel) {
            const int bits = layout.bits[static_cast<std::size_t>(channel)];
            std::size_t group = 0;
            while (bits > 0 && channel >= layout.groups[group].first + layout.groups[group].count)
              ++group;
            for (int row = 0; row < count; ++row) {
              float value = 0.0F;
              if (bits > 0) {
                const std::byte* scale = block.data() + layout.scale_line(group, rows_per_page);
                Half half{};
                if (layout.scale == ScaleKind::largest_f16)
                  std::memcpy(&half.bits, scale + 2 * (first + row), 2);
                const float step =
                    layout.scale == ScaleKind::largest_f16
                        ? to_float(half)
                        : cpu::decode_gain(std::to_integer<std::uint8_t>(scale[first + row]));
                value = (static_cast<float>(get_code(line, first + row, bits)) + 0.5F -
                         static_cast<float>(1U << (bits - 1))) *
                        step;
              }
              expected[static_cast<std::size_t>(
                  part == Part::key ? channel * stride + row : row * stride + channel)] = value;
            }
            line += packed_bytes(rows_per_page, bits);
          }
          std::vector<float> tile(expected.size(), -7.0F);
          cpu::decode_codes(layout, part, rows_per_page, block.data(), first, count, tile.data(),
                            stride);
          for (std::size_t i = 0; i < tile.size(); ++i) {
            REQUIRE((std::bit_cast<std::uint32_t>(tile[i]) ==
                         std::bit_cast<std::uint32_t>(expected[i]) ||
                     (std::isnan(tile[i]) && std::isnan(expected[i]))));
          }
        }
      }
    }
  }
}

TEST_CASE(
    "Int8 and BlockHadamard stay within half a step of every coefficient; a step is what the "
    "largest one needs") {
  std::mt19937_64 random(2);
  const auto check = [&](const CodeLayout& layout, int rows_per_page) {
    std::vector<std::byte> block = noise(random, block_bytes(layout, rows_per_page));
    for (int trial = 0; trial < 20; ++trial) {
      const int first = static_cast<int>(random() % static_cast<unsigned>(rows_per_page));
      const int count =
          1 + static_cast<int>(random() % static_cast<unsigned>(rows_per_page - first));
      const int stride = layout.rank + 2;
      std::vector<float> rows =
          normal_rows(random, count, stride, std::exp2(static_cast<float>(trial) - 12.0F));
      if (trial == 5) std::fill(rows.begin(), rows.begin() + stride, 0.0F);
      const std::vector<float> before =
          decode(layout, Part::key, rows_per_page, block, 0, rows_per_page);
      cpu::encode_codes(layout, rows_per_page, block.data(), first, count, rows.data(), stride);
      const std::vector<float> all =
          decode(layout, Part::value, rows_per_page, block, 0, rows_per_page);
      for (int row = 0; row < rows_per_page; ++row) {
        for (const ScaleGroup& group : layout.groups) {
          const float bits = layout.bits[static_cast<std::size_t>(group.first)];
          float largest = 0.0F;
          if (row >= first && row < first + count) {
            for (int c = group.first; c < group.first + group.count; ++c)
              largest = std::max(
                  largest, std::abs(rows[static_cast<std::size_t>((row - first) * stride + c)]));
          }
          const float step = largest / std::exp2(bits - 1.0F);
          for (int c = group.first; c < group.first + group.count; ++c) {
            const float got = all[static_cast<std::size_t>(row * layout.rank + c)];
            if (row < first || row >= first + count) {
              // A row that was not written keeps its bits (noise may decode to NaN).
              const float old = before[static_cast<std::size_t>(row * layout.rank + c)];
              REQUIRE((got == old || (std::isnan(got) && std::isnan(old))));
            } else {
              // Half a step, the scale's rounding to f16 (or to its smallest number), f32 rounding.
              const float bound = 0.5F * step * (1.0F + 0x1p-10F) + 0x1p-25F + 1e-6F * largest;
              REQUIRE(std::abs(got - rows[static_cast<std::size_t>((row - first) * stride + c)]) <=
                      bound);
            }
          }
        }
      }
    }
  };
  for (const int rank : {1, 2, 5, 31, 64, 77, 128}) {
    const CodeLayout int8 = Impl<Int8, Cpu>::layout({}, rank, {});
    CHECK(int8.row_bits() == 8 * rank + 16);
    check(int8, 23);
    for (int high = 2; high <= 8; ++high) {
      const BlockHadamard policy{0.2F, high, 2 + (high + 3) % 7, true};
      const CodeLayout layout = Impl<BlockHadamard, Cpu>::layout(policy, rank, {});
      const int outliers = static_cast<int>(std::lround(0.2F * static_cast<float>(rank)));
      CHECK(layout.row_bits() == outliers * high + (rank - outliers) * policy.low_bits +
                                     16 * ((outliers > 0 ? 1 : 0) + (outliers < rank ? 1 : 0)));
      check(layout, 13);
    }
  }
}

TEST_CASE(
    "TransformCode: bits as given, steps in the maps, one gain a row, and the distortion that "
    "theory gives a Gaussian") {
  std::mt19937_64 random(3);
  // Mean squared error of Max's uniform quantisers for a unit Gaussian, bits 1 to 6.
  const double distortion[] = {1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001041};
  for (int bits = 1; bits <= 6; ++bits) {
    const TransformCode policy{1.0F};
    const int rank = 200;
    std::vector<std::uint8_t> widths(rank, static_cast<std::uint8_t>(bits));
    widths.back() = 0;
    const std::vector<float> rms(rank, 3.0F);
    const CodeLayout layout = Impl<TransformCode, Cpu>::layout(policy, rank, widths);
    CHECK(layout.row_bits() == bits * (rank - 1) + 8);
    const ChannelFold fold = Impl<TransformCode, Cpu>::fold(policy, layout, rms);
    const int count = 64;
    std::vector<std::byte> block(block_bytes(layout, count));
    std::vector<float> rows = normal_rows(random, count, rank, 3.0F);
    const std::vector<float> exact = rows;
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] /= fold.scale[i % rank];
    cpu::encode_codes(layout, count, block.data(), 0, count, rows.data(), rank);
    const std::vector<float> got = decode(layout, Part::key, count, block, 0, count);
    double error = 0.0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (i % rank == rank - 1) {
        REQUIRE(got[i] == 0.0F);  // no bits, nothing read
      } else {
        error += std::pow(got[i] * fold.scale[i % rank] - exact[i], 2);
      }
    }
    const double relative = error / (9.0 * count * (rank - 1));
    CHECK(relative == doctest::Approx(distortion[bits]).epsilon(0.06));
    // A row twice as large has a gain twice as large, and the same codes.
    for (float& value : rows) value *= 2.0F;
    cpu::encode_codes(layout, count, block.data(), 0, count, rows.data(), rank);
    const std::vector<float> twice = decode(layout, Part::value, count, block, 0, count);
    for (std::size_t i = 0; i < got.size(); ++i)
      REQUIRE(twice[i] == doctest::Approx(2.0F * got[i]).epsilon(1e-5));
  }
}

TEST_CASE("TransformCode stays within half a step where it does not clip, for mixed widths") {
  std::mt19937_64 random(4);
  std::vector<std::uint8_t> widths;
  for (const int width : {8, 8, 6, 5, 4, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0})
    widths.push_back(static_cast<std::uint8_t>(width));
  const int rank = static_cast<int>(widths.size());
  const CodeLayout layout = Impl<TransformCode, Cpu>::layout({}, rank, widths);
  CHECK(layout.row_bits() == 8 + 8 + 6 + 5 + 12 + 6 + 4 + 2 + 8);
  std::vector<std::byte> block(block_bytes(layout, 40));
  for (int row = 0; row < 40; ++row) {
    const std::vector<float> values =
        normal_rows(random, 1, rank, std::exp2(static_cast<float>(row % 9) - 4.0F));
    cpu::encode_codes(layout, 40, block.data(), row, 1, values.data(), rank);
    const std::vector<float> got = decode(layout, Part::key, 40, block, row, 1);
    const float gain =
        cpu::decode_gain(std::to_integer<std::uint8_t>(block[static_cast<std::size_t>(row)]));
    for (int channel = 0; channel < rank; ++channel) {
      const auto c = static_cast<std::size_t>(channel);
      if (widths[c] == 0) continue;
      const float range = gain * std::exp2(static_cast<float>(widths[c]) - 1.0F);
      const float clipped = std::clamp(values[c], -range, range);
      REQUIRE(std::abs(got[c] - clipped) <= 0.5F * gain * 1.0001F);
    }
  }
}

TEST_CASE("TransformCode's gain leaves the least error of those that are tried") {
  std::mt19937_64 random(5);
  const std::vector<std::uint8_t> widths{8, 6, 4, 4, 3, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0};
  const int rank = static_cast<int>(widths.size());
  const CodeLayout layout = Impl<TransformCode, Cpu>::layout({}, rank, widths);
  const auto error_of = [&](const std::vector<float>& row, double gain) {
    double sum = 0.0;
    for (std::size_t c = 0; c < widths.size(); ++c) {
      if (widths[c] == 0) continue;
      const double top = std::exp2(widths[c] - 1.0) - 0.5;
      const double level = std::clamp(std::floor(row[c] / gain) + 0.5, -top, top);
      sum += std::pow(row[c] - level * gain, 2);
    }
    return sum;
  };
  std::vector<std::byte> block(block_bytes(layout, 1));
  double chosen = 0.0, of_norms = 0.0;
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<float> row = normal_rows(random, 1, rank, 1.0F);
    for (std::size_t c = 0; c < row.size(); ++c) {
      row[c] /= gaussian_step(widths[c] == 0 ? 1 : widths[c]);
      if (random() % 8 == 0) row[c] *= 3.0F;  // tails
    }
    cpu::encode_codes(layout, 1, block.data(), 0, 1, row.data(), rank);
    double norm = 0.0;
    for (std::size_t c = 0; c + 1 < widths.size(); ++c)
      norm += std::pow(row[c] * gaussian_step(widths[c]), 2);
    const int code = cpu::encode_gain(static_cast<float>(std::sqrt(norm / (rank - 1))));
    const double own = error_of(row, cpu::decode_gain(std::to_integer<std::uint8_t>(block[0])));
    for (int offset = -8; offset <= 8; offset += 2) {
      REQUIRE(own <=
              error_of(row, cpu::decode_gain(static_cast<std::uint8_t>(code + offset))) * 1.0001);
    }
    chosen += own;
    of_norms += error_of(row, cpu::decode_gain(static_cast<std::uint8_t>(code)));
  }
  CHECK(chosen < 0.95 * of_norms);
}

TEST_CASE("gains: sixteen steps an octave, monotone, zero is zero, saturating") {
  CHECK(cpu::encode_gain(0.0F) == 0);
  CHECK(cpu::decode_gain(0) == 0.0F);
  CHECK(cpu::encode_gain(1.0F) == 128);
  CHECK(cpu::encode_gain(1e30F) == 255);
  CHECK(cpu::encode_gain(1e-30F) == 1);
  for (int code = 1; code < 256; ++code) {
    REQUIRE(cpu::encode_gain(cpu::decode_gain(static_cast<std::uint8_t>(code))) == code);
    REQUIRE(cpu::decode_gain(static_cast<std::uint8_t>(code)) ==
            std::exp2((static_cast<float>(code) - 128.0F) / 16.0F));
    if (code > 1)
      REQUIRE(cpu::decode_gain(static_cast<std::uint8_t>(code)) >
              cpu::decode_gain(static_cast<std::uint8_t>(code - 1)));
  }
}

TEST_CASE("a copied row is the same row, bit for bit, also within one block") {
  std::mt19937_64 random(5);
  const std::vector<std::uint8_t> widths{7, 5, 3, 3, 2, 1};
  const CodeLayout layouts[] = {Impl<TransformCode, Cpu>::layout({}, 6, widths),
                                Impl<Int8, Cpu>::layout({}, 6, {}),
                                Impl<BlockHadamard, Cpu>::layout({0.5F, 5, 3, true}, 6, {})};
  for (const CodeLayout& layout : layouts) {
    std::vector<std::byte> block(block_bytes(layout, 24));
    const std::vector<float> rows = normal_rows(random, 24, 6);
    cpu::encode_codes(layout, 24, block.data(), 0, 24, rows.data(), 6);
    std::vector<float> expected = decode(layout, Part::value, 24, block, 0, 24);
    for (const auto& [from, to] : {std::pair{23, 0}, {5, 6}, {6, 5}, {11, 17}}) {
      cpu::copy_codes(layout, block.data(), 24, from, block.data(), 24, to);
      std::copy_n(expected.begin() + from * 6, 6, expected.begin() + to * 6);
      REQUIRE(decode(layout, Part::value, 24, block, 0, 24) == expected);
    }
  }
}

TEST_CASE("quantizers refuse what they cannot use") {
  CHECK_THROWS_WITH_AS((Impl<BlockHadamard, Cpu>::validate({0.2F, 9, 3, true})),
                       "BlockHadamard: bits are 2 to 8, given 9", ValueError);
  CHECK_THROWS_WITH_AS((Impl<BlockHadamard, Cpu>::validate({1.5F, 4, 3, true})),
                       "BlockHadamard: outlier_share is in [0, 1], given 1.5", ValueError);
  CHECK_THROWS_AS((Impl<TransformCode, Cpu>::validate({0.0F})), ValueError);
  CHECK_THROWS_AS((Impl<TransformCode, Cpu>::layout({}, 3, {})), ShapeError);
  CHECK_THROWS_AS(flat_rotation(0), ShapeError);
}

}  // namespace packed_codes_tests
