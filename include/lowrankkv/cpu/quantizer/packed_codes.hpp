// SPDX-License-Identifier: Apache-2.0
/// @file cpu/quantizer/packed_codes.hpp  Encoding and decoding rows as packed codes, shared by all
/// quantizers with bits.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>

#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/core/scalar.hpp"
#include "lowrankkv/cpu/convert.hpp"
#include "lowrankkv/cpu/quantizer/unpack_codes.hpp"
#include "lowrankkv/quantizer/bit_packing.hpp"
#include "lowrankkv/quantizer/code_layout.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Encodes an 8-bit logarithmic gain: code 0 is 0, code c is 2^((c - 128) / 16). Rounds to
/// nearest, and saturates.
inline std::uint8_t encode_gain(float gain) {
  if (!(gain > 0.0F)) return 0;
  if (!(gain < 256.0F)) return 255;
  return static_cast<std::uint8_t>(
      std::clamp(std::lround(16.0F * std::log2(gain)) + 128L, 1L, 255L));
}
/// @brief Table of the gains of all codes. A table pays because many more rows are read than there
/// are codes.
inline const std::array<float, 256>& gains() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> values{};
    for (std::size_t code = 1; code < values.size(); ++code)
      values[code] = std::exp2((static_cast<float>(code) - 128.0F) / 16.0F);
    return values;
  }();
  return table;
}
/// @brief The gain of a code.
inline float decode_gain(std::uint8_t code) { return gains()[code]; }

namespace detail {

/// The sum of squared errors, in steps, that coding the channels of a group with this gain leaves.
inline float error_of_gain(const CodeLayout& layout, const ScaleGroup& channels, float gain,
                           const float* values) {
  const float inverse = gain > 0.0F ? 1.0F / gain : 0.0F;
  const int end = channels.first + channels.count;
  float sum = 0.0F;
  for (int first = channels.first; first < end;) {
    const int bits = layout.bits[static_cast<std::size_t>(first)];
    int stop = first + 1;  // channels of one width
    while (stop < end && layout.bits[static_cast<std::size_t>(stop)] == bits) ++stop;
    const float top = std::ldexp(1.0F, bits - 1) - 0.5F;
    for (int channel = first; channel < stop; ++channel) {
      const float level =
          (std::min)((std::max)(std::floor(values[channel] * inverse) + 0.5F, -top), top);
      const float error = values[channel] - level * gain;
      sum += error * error;
    }
    first = stop;
  }
  return sum;
}

/// The code of the gain of a row (ScaleKind::norm_log8): of kTriedGains around its norm,
/// the one that leaves the least error.
inline std::uint8_t choose_gain(const CodeLayout& layout, const ScaleGroup& channels,
                                const float* values) {
  double energy = 0.0;
  for (int channel = 0; channel < channels.count; ++channel) {
    const int own = channels.first + channel;
    const double value =
        values[own] * layout.norm_weights[layout.bits[static_cast<std::size_t>(own)]];
    energy += value * value;
  }
  const std::uint8_t norm =
      encode_gain(static_cast<float>(std::sqrt(energy)) / layout.reference_norm);
  if (norm == 0) return 0;
  std::uint8_t best = norm;
  float least = std::numeric_limits<float>::infinity();
  for (int i = 0; i < kTriedGains; ++i) {
    const auto code = static_cast<std::uint8_t>(std::clamp(norm + gain_offset(i), 1, 255));
    const float error = error_of_gain(layout, channels, decode_gain(code), values);
    if (!(error < least)) continue;
    least = error;
    best = code;
  }
  return best;
}

/// Writes the scale of one group of one row to the block. @return the scale as it will be read
inline float write_scale(const CodeLayout& layout, std::size_t group, int rows_per_page,
                         std::byte* block, int row, const float* values) {
  const ScaleGroup& channels = layout.groups[group];
  std::byte* line = block + layout.scale_line(group, rows_per_page);
  if (layout.scale == ScaleKind::norm_log8) {
    const std::uint8_t code = choose_gain(layout, channels, values);
    line[row] = static_cast<std::byte>(code);
    return decode_gain(code);
  }
  float step = 0.0F;  // the largest over the group of |x| / 2^(b-1)
  for (int channel = channels.first; channel < channels.first + channels.count; ++channel) {
    step = (std::max)(
        step, std::abs(values[channel]) /
                  static_cast<float>(1U << (layout.bits[static_cast<std::size_t>(channel)] - 1)));
  }
  const Half stored = half_not_below(step);
  std::memcpy(line + 2 * row, &stored.bits, 2);
  return to_float(stored);
}

/// Reads the scales of a group for rows [first, first + count); count is at most kUnpackRows.
inline void read_scales(const CodeLayout& layout, std::size_t group, int rows_per_page,
                        const std::byte* block, int first, int count, float* scales) {
  const std::byte* line = block + layout.scale_line(group, rows_per_page);
  if (layout.scale == ScaleKind::norm_log8) {
    const std::array<float, 256>& table = gains();
    for (int row = 0; row < count; ++row)
      scales[row] = table[std::to_integer<std::size_t>(line[first + row])];
    return;
  }
  std::uint16_t halves[kUnpackRows];  // a copy: the line may begin at an odd address
  std::memcpy(halves, line + 2 * first, 2 * static_cast<std::size_t>(count));
  to_f32(DType::f16, halves, count, scales);
}

}  // namespace detail

/// @brief Encodes rows [first, first + count) of a block. |x - x^| <= scale / 2 where nothing
/// clips. Cost: O(count rank).
inline void encode_codes(const CodeLayout& layout, int rows_per_page, std::byte* block, int first,
                         int count, const float* rows, int stride) {
  for (int row = 0; row < count; ++row) {
    const float* values = rows + static_cast<std::ptrdiff_t>(row) * stride;
    std::byte* line = block + layout.first_code_line(rows_per_page);
    for (std::size_t group = 0; group < layout.groups.size(); ++group) {
      const float scale =
          detail::write_scale(layout, group, rows_per_page, block, first + row, values);
      const float inverse = scale > 0.0F ? 1.0F / scale : 0.0F;
      const ScaleGroup& channels = layout.groups[group];
      for (int channel = channels.first; channel < channels.first + channels.count; ++channel) {
        const int bits = layout.bits[static_cast<std::size_t>(channel)];
        if (bits == 0) continue;
        const float half_range = static_cast<float>(1U << (bits - 1));
        // This order of min and max maps NaN to the lowest level.
        const float level =
            (std::min)((std::max)(0.0F, std::floor(values[channel] * inverse) + half_range),
                       2.0F * half_range - 1.0F);
        put_code(line, first + row, bits, static_cast<unsigned>(level));
        line += packed_bytes(rows_per_page, bits);
      }
    }
  }
}

/// @brief Decodes rows [first, first + count): keys channel-major [rank, stride], values row-major
/// [count, stride]. Channels without bits are 0. Reads and writes nothing outside the block and the
/// tile. Cost: O(count rank).
inline void decode_codes(const CodeLayout& layout, Part part, int rows_per_page,
                         const std::byte* block, int first, int count, float* tile, int stride) {
  const bool keys = part == Part::key;
  const std::byte* end = block + layout.block_bytes(rows_per_page);
  float scales[kUnpackRows] = {};
  // Values: channel-major, until there are enough channels to transpose.
  float lines[kPadding * kUnpackRows];
  for (int done = 0; done < count; done += kUnpackRows) {
    const int length = (std::min)(kUnpackRows, count - done);
    const std::byte* line = block + layout.first_code_line(rows_per_page);
    std::size_t group = 0;
    int group_end = 0;
    for (int channel = 0; channel < layout.rank;) {
      const int bits = layout.bits[static_cast<std::size_t>(channel)];
      int limit = (std::min)(layout.rank, channel / kPadding * kPadding + kPadding);
      if (bits > 0) {
        for (; channel >= group_end; ++group) {
          group_end = layout.groups[group].first + layout.groups[group].count;
          if (channel < group_end)
            detail::read_scales(layout, group, rows_per_page, block, first + done, length, scales);
        }
        limit = (std::min)(limit, group_end);
      }
      int stop = channel + 1;  // channels of one width under one scale are unpacked together
      while (stop < limit && layout.bits[static_cast<std::size_t>(stop)] == bits) ++stop;
      float* target = keys ? tile + static_cast<std::ptrdiff_t>(channel) * stride + done
                           : lines + channel % kPadding * kUnpackRows;
      const std::ptrdiff_t step = keys ? stride : kUnpackRows;
      if (bits == 0) {
        for (int i = 0; i < stop - channel; ++i)
          std::fill_n(target + i * step, keys ? length : padded(length), 0.0F);
      } else {
        const CodeLines run{line, packed_bytes(rows_per_page, bits), stop - channel, end};
        unpack_lines(bits, run, first + done, length, scales, target, step, !keys);
        line += static_cast<std::size_t>(run.count) * run.bytes;
      }
      channel = stop;
      if (keys || (channel % kPadding != 0 && channel != layout.rank)) continue;
      const int begin = (channel - 1) / kPadding * kPadding;
      transpose_lines(lines, channel - begin, length,
                      tile + static_cast<std::ptrdiff_t>(done) * stride + begin, stride);
    }
  }
}

/// @brief Copies the codes and scales of one row, bit for bit.
inline void copy_codes(const CodeLayout& layout, const std::byte* from, int from_rows, int from_row,
                       std::byte* to, int to_rows, int to_row) {
  const std::size_t width = static_cast<std::size_t>(layout.scale_bits()) / 8;
  for (std::size_t group = 0; group < layout.groups.size(); ++group) {
    std::memmove(
        to + layout.scale_line(group, to_rows) + width * static_cast<std::size_t>(to_row),
        from + layout.scale_line(group, from_rows) + width * static_cast<std::size_t>(from_row),
        width);
  }
  const std::byte* source = from + layout.first_code_line(from_rows);
  std::byte* target = to + layout.first_code_line(to_rows);
  for (const std::uint8_t bits : layout.bits) {
    if (bits == 0) continue;
    put_code(target, to_row, bits, get_code(source, from_row, bits));
    source += packed_bytes(from_rows, bits);
    target += packed_bytes(to_rows, bits);
  }
}

/// @brief Members common to the quantizers with packed codes.
struct PackedCodec {
  using Layout = CodeLayout;
  /// The layout of codes that kernels unpack (cpu/coded_rows.hpp).
  static const CodeLayout* codes(const Layout& layout) { return &layout; }
  static std::int64_t row_bits(const Layout& layout) { return layout.row_bits(); }
  static std::size_t block_bytes(const Layout& layout, int rows) {
    return layout.block_bytes(rows);
  }
  static void encode(const Layout& layout, Part, int rows_per_page, std::byte* block, int first,
                     int count, const float* rows, int stride) {
    encode_codes(layout, rows_per_page, block, first, count, rows, stride);
  }
  static void decode(const Layout& layout, Part part, int rows_per_page, const std::byte* block,
                     int first, int count, float* tile, int stride) {
    decode_codes(layout, part, rows_per_page, block, first, count, tile, stride);
  }
  static void copy_row(const Layout& layout, Part, const std::byte* from, int from_rows,
                       int from_row, std::byte* to, int to_rows, int to_row) {
    copy_codes(layout, from, from_rows, from_row, to, to_rows, to_row);
  }
};

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
