// SPDX-License-Identifier: Apache-2.0
/// @file cpu/quantizer/level_codes.hpp  Encoding and decoding rows of a LevelLayout, shared by the
/// quantizers that have one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/core/scalar.hpp"
#include "lowrankkv/cpu/convert.hpp"
#include "lowrankkv/quantizer/bit_packing.hpp"
#include "lowrankkv/quantizer/level_layout.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// Codes that are unpacked together.
inline constexpr int kLevelRun = 64;

namespace detail {

template <int bits>
void unpack_levels(const std::byte* line, int first, int count, std::uint8_t* codes) {
  const auto code_at = [&](int i) {
    return static_cast<std::uint8_t>(get_code(line, first + i, bits));
  };
  int done = 0;
  for (; done < count && (first + done) % 8 != 0; ++done) codes[done] = code_at(done);
  for (; done + 8 <= count; done += 8) {  // eight codes fill `bits` bytes
    std::uint64_t word = 0;
    std::memcpy(&word, line + static_cast<std::ptrdiff_t>(first + done) / 8 * bits, bits);
    for (int i = 0; i < 8; ++i)
      codes[done + i] = static_cast<std::uint8_t>(word >> (i * bits) & ((1U << bits) - 1U));
  }
  for (; done < count; ++done) codes[done] = code_at(done);
}

/// codes[i] = code first + i of a line, i < count.
inline void unpack_levels(int bits, const std::byte* line, int first, int count,
                          std::uint8_t* codes) {
  switch (bits) {
    case 2:
      return unpack_levels<2>(line, first, count, codes);
    case 3:
      return unpack_levels<3>(line, first, count, codes);
    case 4:
      return unpack_levels<4>(line, first, count, codes);
    case 8:
      if (count > 0) std::memcpy(codes, line + first, static_cast<std::size_t>(count));
      return;
    default:
      for (int i = 0; i < count; ++i)
        codes[i] = static_cast<std::uint8_t>(get_code(line, first + i, bits));
  }
}

/// out[i] = level of codes[i].
inline void levels_of(const LevelLayout& layout, const std::uint8_t* codes, int count, float* out) {
  if (layout.levels.empty()) {
    for (int i = 0; i < count; ++i) out[i] = static_cast<float>(codes[i]) - layout.centre;
  } else {
    const float* levels = layout.levels.data();
    for (int i = 0; i < count; ++i) out[i] = levels[codes[i]];
  }
}

/// numbers[i] = number first + i of a line of f16, which may begin at an odd address.
inline void read_halves(const std::byte* line, int first, int count, float* numbers) {
  std::uint16_t halves[kLevelRun];
  std::memcpy(halves, line + 2 * static_cast<std::ptrdiff_t>(first),
              2 * static_cast<std::size_t>(count));
  to_f32(DType::f16, halves, count, numbers);
}

}  // namespace detail

/// @brief Encodes rows [first, first + count) of a block, row-major [count, stride].
/// @param quantise  quantise(x, n, numbers, codes) codes the n channels of a group: it writes
/// layout.scales f16 numbers and n codes
template <class Quantise>
void encode_levels(const LevelLayout& layout, Part part, int rows_per_page, std::byte* block,
                   int first, int count, const float* rows, int stride, Quantise&& quantise) {
  std::vector<std::uint8_t> codes(static_cast<std::size_t>((std::max)(1, layout.group)));
  for (int row = 0; row < count; ++row) {
    for (int group = 0; group < layout.num_groups(); ++group) {
      const int begin = group * layout.group;
      const int channels = layout.channels_of(group);
      Half numbers[2] = {};
      quantise(rows + static_cast<std::ptrdiff_t>(row) * stride + begin, channels, numbers,
               codes.data());
      for (int which = 0; which < layout.scales; ++which) {
        std::memcpy(block + layout.scale_line(group, which, rows_per_page) +
                        2 * static_cast<std::ptrdiff_t>(first + row),
                    &numbers[which].bits, 2);
      }
      for (int i = 0; i < channels; ++i) {
        const int channel = begin + i;
        const int line = part == Part::key ? channel : first + row;
        put_code(block + layout.code_line(part == Part::key, line, rows_per_page),
                 part == Part::key ? first + row : channel, layout.bits,
                 codes[static_cast<std::size_t>(i)]);
      }
    }
  }
}

/// @brief Decodes rows [first, first + count): keys channel-major [rank, stride], values row-major
/// [count, stride]. Reads and writes nothing outside the block and the tile. Cost: O(count rank).
inline void decode_levels(const LevelLayout& layout, Part part, int rows_per_page,
                          const std::byte* block, int first, int count, float* tile, int stride) {
  std::uint8_t codes[kLevelRun];
  float scales[kLevelRun], minima[kLevelRun] = {};
  for (int done = 0; done < count; done += kLevelRun) {
    const int length = (std::min)(kLevelRun, count - done);
    const int row = first + done;
    for (int group = 0; group < layout.num_groups(); ++group) {
      std::fill_n(scales, length, 1.0F);
      if (layout.scales > 0)
        detail::read_halves(block + layout.scale_line(group, 0, rows_per_page), row, length,
                            scales);
      if (layout.scales > 1)
        detail::read_halves(block + layout.scale_line(group, 1, rows_per_page), row, length,
                            minima);
      const int begin = group * layout.group;
      const int end = begin + layout.channels_of(group);
      if (part == Part::key) {
        for (int channel = begin; channel < end; ++channel) {
          float* out = tile + static_cast<std::ptrdiff_t>(channel) * stride + done;
          detail::unpack_levels(layout.bits,
                                block + layout.code_line(part == Part::key, channel, rows_per_page),
                                row, length, codes);
          detail::levels_of(layout, codes, length, out);
          for (int i = 0; i < length; ++i) out[i] = out[i] * scales[i] + minima[i];
        }
        continue;
      }
      for (int i = 0; i < length; ++i) {
        const std::byte* line = block + layout.code_line(part == Part::key, row + i, rows_per_page);
        for (int channel = begin; channel < end; channel += kLevelRun) {
          const int run = (std::min)(kLevelRun, end - channel);
          float* out = tile + static_cast<std::ptrdiff_t>(done + i) * stride + channel;
          detail::unpack_levels(layout.bits, line, channel, run, codes);
          detail::levels_of(layout, codes, run, out);
          for (int j = 0; j < run; ++j) out[j] = out[j] * scales[i] + minima[i];
        }
      }
    }
  }
}

/// @brief Copies the codes, scales and minima of one row, bit for bit.
inline void copy_levels(const LevelLayout& layout, Part part, const std::byte* from, int from_rows,
                        int from_row, std::byte* to, int to_rows, int to_row) {
  for (int group = 0; group < layout.num_groups(); ++group) {
    for (int which = 0; which < layout.scales; ++which) {
      std::memmove(
          to + layout.scale_line(group, which, to_rows) + 2 * static_cast<std::ptrdiff_t>(to_row),
          from + layout.scale_line(group, which, from_rows) +
              2 * static_cast<std::ptrdiff_t>(from_row),
          2);
    }
  }
  if (part == Part::value) {
    std::memmove(to + layout.code_line(part == Part::key, to_row, to_rows),
                 from + layout.code_line(part == Part::key, from_row, from_rows),
                 packed_bytes(layout.rank, layout.bits));
    return;
  }
  for (int channel = 0; channel < layout.rank; ++channel) {
    put_code(to + layout.code_line(part == Part::key, channel, to_rows), to_row, layout.bits,
             get_code(from + layout.code_line(part == Part::key, channel, from_rows), from_row,
                      layout.bits));
  }
}

/// @brief Members common to the quantizers with a LevelLayout. `Format` has quantise(layout, x, n,
/// numbers, codes), see encode_levels().
template <class Format>
struct LevelCodec {
  using Layout = LevelLayout;
  static std::int64_t row_bits(const Layout& layout) { return layout.row_bits(); }
  static std::size_t block_bytes(const Layout& layout, int rows) {
    return layout.block_bytes(rows);
  }
  static void encode(const Layout& layout, Part part, int rows_per_page, std::byte* block,
                     int first, int count, const float* rows, int stride) {
    encode_levels(layout, part, rows_per_page, block, first, count, rows, stride,
                  [&](const float* x, int n, Half* numbers, std::uint8_t* codes) {
                    Format::quantise(layout, x, n, numbers, codes);
                  });
  }
  static void decode(const Layout& layout, Part part, int rows_per_page, const std::byte* block,
                     int first, int count, float* tile, int stride) {
    decode_levels(layout, part, rows_per_page, block, first, count, tile, stride);
  }
  static void copy_row(const Layout& layout, Part part, const std::byte* from, int from_rows,
                       int from_row, std::byte* to, int to_rows, int to_row) {
    copy_levels(layout, part, from, from_rows, from_row, to, to_rows, to_row);
  }
};

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
