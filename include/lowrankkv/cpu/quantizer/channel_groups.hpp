// SPDX-License-Identifier: Apache-2.0
/// @file cpu/quantizer/channel_groups.hpp  ChannelGroups on the CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "lowrankkv/concepts/quantizer.hpp"
#include "lowrankkv/cpu/quantizer/level_codes.hpp"
#include "lowrankkv/quantizer/channel_groups.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief The step and the least number of a group of asymmetric codes.
struct CodeRange {
  float step = 0.0F;
  float least = 0.0F;

  float largest(int bits) const { return least + step * static_cast<float>((1 << bits) - 1); }
  float decode(unsigned code) const { return static_cast<float>(code) * step + least; }
  unsigned encode(float x, int bits) const {
    const float code = step > 0.0F ? std::round((x - least) / step) : 0.0F;
    // This order of min and max maps NaN to the lowest level.
    return static_cast<unsigned>(
        (std::min)((std::max)(0.0F, code), static_cast<float>((1 << bits) - 1)));
  }
  friend bool operator==(const CodeRange&, const CodeRange&) = default;
};

/// @brief The largest f16 that is not above `value`; -65504 if there is none.
inline Half half_not_above(float value) {
  Half half = to_half(value);
  if (to_float(half) <= value || half.bits == 0xfbffU) return half;
  if (value > 0.0F)
    --half.bits;
  else
    ++half.bits;
  return half;
}

/// @brief The range of f16 numbers that covers [low, high]: the least is not above low, and the
/// largest not below high, within what f16 holds.
inline CodeRange range_over(float low, float high, int bits) {
  const float least = to_float(half_not_above(low));
  return {to_float(half_not_below((high - least) / static_cast<float>((1 << bits) - 1))), least};
}

namespace detail {

inline CodeRange read_range(const ChannelGroupLayout& layout, const std::byte* block, int group,
                            int channel) {
  Half numbers[2];
  std::memcpy(numbers, block + layout.group_numbers(group) + 4 * static_cast<std::size_t>(channel),
              4);
  return {to_float(numbers[0]), to_float(numbers[1])};
}
inline void write_range(const ChannelGroupLayout& layout, std::byte* block, int group, int channel,
                        const CodeRange& range) {
  const Half numbers[2] = {to_half(range.step), to_half(range.least)};
  std::memcpy(block + layout.group_numbers(group) + 4 * static_cast<std::size_t>(channel), numbers,
              4);
}

/// Makes the range of a channel of a group cover [low, high] too. Rows [begin, end) of the block,
/// which the group has already, are coded again if the range changes; none: the range begins anew.
inline CodeRange cover(const ChannelGroupLayout& layout, int rows_per_page, std::byte* block,
                       int begin, int end, int channel, float low, float high) {
  const int group = begin / layout.tokens;
  if (begin == end) {
    const CodeRange range = range_over(low, high, layout.bits);
    write_range(layout, block, group, channel, range);
    return range;
  }
  const CodeRange old = read_range(layout, block, group, channel);
  if (low >= old.least && high <= old.largest(layout.bits)) return old;
  const CodeRange range = range_over((std::min)(low, old.least),
                                     (std::max)(high, old.largest(layout.bits)), layout.bits);
  if (range == old) return old;
  std::byte* line = block + layout.code_line(channel, rows_per_page);
  for (int row = begin; row < end; ++row)
    put_code(line, row, layout.bits,
             range.encode(old.decode(get_code(line, row, layout.bits)), layout.bits));
  write_range(layout, block, group, channel, range);
  return range;
}

}  // namespace detail

/// @brief Encodes the keys of rows [first, first + count) of a block, a group after the other. A
/// group that has rows already keeps them, see ChannelGroups. Cost: O(count rank), and O(tokens
/// rank) where a range grows.
inline void encode_channel_groups(const ChannelGroupLayout& layout, int rows_per_page,
                                  std::byte* block, int first, int count, const float* rows,
                                  int stride) {
  for (int done = 0; done < count;) {
    const int begin = first + done;
    const int group = begin / layout.tokens * layout.tokens;  // its first row
    const int length = (std::min)(count - done, group + layout.tokens - begin);
    for (int channel = 0; channel < layout.rank; ++channel) {
      const float* x = rows + static_cast<std::ptrdiff_t>(done) * stride + channel;
      float low = x[0], high = x[0];
      for (int row = 1; row < length; ++row) {
        low = (std::min)(low, x[static_cast<std::ptrdiff_t>(row) * stride]);
        high = (std::max)(high, x[static_cast<std::ptrdiff_t>(row) * stride]);
      }
      const CodeRange range =
          detail::cover(layout, rows_per_page, block, group, begin, channel, low, high);
      std::byte* line = block + layout.code_line(channel, rows_per_page);
      for (int row = 0; row < length; ++row)
        put_code(line, begin + row, layout.bits,
                 range.encode(x[static_cast<std::ptrdiff_t>(row) * stride], layout.bits));
    }
    done += length;
  }
}

/// @brief Decodes the keys of rows [first, first + count), channel-major [rank, stride].
inline void decode_channel_groups(const ChannelGroupLayout& layout, int rows_per_page,
                                  const std::byte* block, int first, int count, float* tile,
                                  int stride) {
  std::uint8_t codes[kLevelRun];
  for (int done = 0; done < count;) {
    const int begin = first + done;
    const int group = begin / layout.tokens;
    const int length =
        (std::min)({count - done, (group + 1) * layout.tokens - begin, int{kLevelRun}});
    for (int channel = 0; channel < layout.rank; ++channel) {
      const CodeRange range = detail::read_range(layout, block, group, channel);
      detail::unpack_levels(layout.bits, block + layout.code_line(channel, rows_per_page), begin,
                            length, codes);
      float* out = tile + static_cast<std::ptrdiff_t>(channel) * stride + done;
      for (int i = 0; i < length; ++i) out[i] = range.decode(codes[i]);
    }
    done += length;
  }
}

/// @brief Copies the key of one row: its codes as they are into a group of equal ranges, or as the
/// first row of a group, which takes over the ranges. Otherwise the ranges of both groups are
/// united. Rows are copied in order, so that the rows before `to_row` are all that the group has.
inline void copy_channel_groups(const ChannelGroupLayout& layout, const std::byte* from,
                                int from_rows, int from_row, std::byte* to, int to_rows,
                                int to_row) {
  const int source = from_row / layout.tokens;
  const int group = to_row / layout.tokens;
  for (int channel = 0; channel < layout.rank; ++channel) {
    const CodeRange given = detail::read_range(layout, from, source, channel);
    unsigned code = get_code(from + layout.code_line(channel, from_rows), from_row, layout.bits);
    CodeRange range = given;
    if (to_row % layout.tokens == 0) {
      detail::write_range(layout, to, group, channel, given);
    } else if (detail::read_range(layout, to, group, channel) != given) {
      range = detail::cover(layout, to_rows, to, group * layout.tokens, to_row, channel,
                            given.least, given.largest(layout.bits));
      if (range != given) code = range.encode(given.decode(code), layout.bits);
    }
    put_code(to + layout.code_line(channel, to_rows), to_row, layout.bits, code);
  }
}

}  // namespace cpu

template <>
struct Impl<ChannelGroups, Cpu> {
  using Layout = ChannelGroupLayout;

  static void validate(const ChannelGroups& policy) { check_channel_groups(policy); }
  static int rows_together(const ChannelGroups& policy) { return policy.tokens; }
  static Layout layout(const ChannelGroups& policy, Part part, int rank,
                       std::span<const std::uint8_t>) {
    return channel_group_layout(policy, part == Part::key, rank);
  }
  static std::int64_t row_bits(const Layout& layout) { return layout.row_bits(); }
  static std::size_t block_bytes(const Layout& layout, int rows) {
    return layout.block_bytes(rows);
  }
  static void encode(const Layout& layout, Part part, int rows_per_page, std::byte* block,
                     int first, int count, const float* rows, int stride) {
    if (part == Part::key)
      return cpu::encode_channel_groups(layout, rows_per_page, block, first, count, rows, stride);
    cpu::encode_levels(layout.values, part, rows_per_page, block, first, count, rows, stride,
                       [&](const float* x, int n, Half* numbers, std::uint8_t* codes) {
                         const auto [low, high] = std::minmax_element(x, x + n);
                         const cpu::CodeRange range = cpu::range_over(*low, *high, layout.bits);
                         numbers[0] = to_half(range.step);
                         numbers[1] = to_half(range.least);
                         for (int i = 0; i < n; ++i)
                           codes[i] = static_cast<std::uint8_t>(range.encode(x[i], layout.bits));
                       });
  }
  static void decode(const Layout& layout, Part part, int rows_per_page, const std::byte* block,
                     int first, int count, float* tile, int stride) {
    if (part == Part::key)
      cpu::decode_channel_groups(layout, rows_per_page, block, first, count, tile, stride);
    else
      cpu::decode_levels(layout.values, part, rows_per_page, block, first, count, tile, stride);
  }
  static void copy_row(const Layout& layout, Part part, const std::byte* from, int from_rows,
                       int from_row, std::byte* to, int to_rows, int to_row) {
    if (part == Part::key)
      cpu::copy_channel_groups(layout, from, from_rows, from_row, to, to_rows, to_row);
    else
      cpu::copy_levels(layout.values, part, from, from_rows, from_row, to, to_rows, to_row);
  }
};

static_assert(QuantizerFor<ChannelGroups, Cpu>);

LOWRANKKV_NAMESPACE_END
