// SPDX-License-Identifier: Apache-2.0
/// @file cpu/quantizer/no_quantizer.hpp  NoQuantizer on the CPU: keys channel-major in a page,
/// values row-major.
///
/// Logits run over tokens for one channel at a time; outputs run over channels for one token at a
/// time. In these layouts both have unit stride and need no horizontal sum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>

#include "lowrankkv/concepts/quantizer.hpp"
#include "lowrankkv/cpu/convert.hpp"
#include "lowrankkv/cpu/simd/stored_tiles.hpp"
#include "lowrankkv/quantizer/no_quantizer.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<NoQuantizer, Cpu> {
  struct Layout {
    DType type = DType::f16;
    int rank = 0;
  };

  static Layout layout(const NoQuantizer& policy, int rank, std::span<const std::uint8_t>) {
    return {policy.type, rank};
  }
  /// The type of the numbers that kernels read in place: keys channel-major, values row-major.
  static std::optional<cpu::simd::Stored> in_place(const Layout& layout) {
    return cpu::simd::stored_as(layout.type);
  }
  static std::int64_t row_bits(const Layout& layout) {
    return static_cast<std::int64_t>(8 * size_of(layout.type)) * layout.rank;
  }
  static std::size_t block_bytes(const Layout& layout, int rows) {
    return size_of(layout.type) * static_cast<std::size_t>(layout.rank) *
           static_cast<std::size_t>(rows);
  }

  static void encode(const Layout& layout, Part part, int rows_per_page, std::byte* block,
                     int first, int count, const float* rows, int stride) {
    for (int row = 0; row < count; ++row) {
      const float* source = rows + static_cast<std::ptrdiff_t>(row) * stride;
      if (part == Part::value) {
        cpu::from_f32(layout.type, source, layout.rank,
                      block + offset(layout, part, rows_per_page, 0, first + row));
        continue;
      }
      for (int channel = 0; channel < layout.rank; ++channel) {
        cpu::from_f32(layout.type, source + channel, 1,
                      block + offset(layout, part, rows_per_page, channel, first + row));
      }
    }
  }

  static void decode(const Layout& layout, Part part, int rows_per_page, const std::byte* block,
                     int first, int count, float* tile, int stride) {
    const bool keys = part == Part::key;
    const int lines = keys ? layout.rank : count;
    const int length = keys ? count : layout.rank;
    for (int line = 0; line < lines; ++line) {
      const std::ptrdiff_t begin = keys ? offset(layout, part, rows_per_page, line, first)
                                        : offset(layout, part, rows_per_page, 0, first + line);
      cpu::to_f32(layout.type, block + begin, length,
                  tile + static_cast<std::ptrdiff_t>(line) * stride);
    }
  }

  static void copy_row(const Layout& layout, Part part, const std::byte* from, int from_rows,
                       int from_row, std::byte* to, int to_rows, int to_row) {
    const std::size_t size = size_of(layout.type);
    for (int channel = 0; channel < layout.rank; ++channel) {
      std::memmove(to + offset(layout, part, to_rows, channel, to_row),
                   from + offset(layout, part, from_rows, channel, from_row), size);
    }
  }

 private:
  static std::ptrdiff_t offset(const Layout& layout, Part part, int rows_per_page, int channel,
                               int row) {
    const std::ptrdiff_t index = part == Part::key
                                     ? static_cast<std::ptrdiff_t>(channel) * rows_per_page + row
                                     : static_cast<std::ptrdiff_t>(row) * layout.rank + channel;
    return static_cast<std::ptrdiff_t>(size_of(layout.type)) * index;
  }
};

static_assert(QuantizerFor<NoQuantizer, Cpu>);

LOWRANKKV_NAMESPACE_END
