// SPDX-License-Identifier: Apache-2.0
/// @file cpu/quantizer/full_rows.hpp  FullRows on the CPU: NoQuantizer or Int8, chosen at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "lowrankkv/concepts/quantizer.hpp"
#include "lowrankkv/cpu/quantizer/int8.hpp"
#include "lowrankkv/cpu/quantizer/no_quantizer.hpp"
#include "lowrankkv/quantizer/full_rows.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<FullRows, Cpu> {
  using Plain = Impl<NoQuantizer, Cpu>;
  using Coded = Impl<Int8, Cpu>;
  struct Layout {
    bool coded = false;
    Plain::Layout plain;
    Coded::Layout codes;
  };

  static Layout layout(const FullRows& policy, int rank, std::span<const std::uint8_t> bits) {
    Layout result{policy.coded(), Plain::layout({policy.type}, rank, bits), {}};
    if (policy.coded()) result.codes = Coded::layout({}, rank, bits);
    return result;
  }
  static std::optional<cpu::simd::Stored> in_place(const Layout& layout) {
    return layout.coded ? std::nullopt : Plain::in_place(layout.plain);
  }
  /// The layout of codes that kernels unpack (cpu/coded_rows.hpp); null: rows are not coded.
  static const CodeLayout* codes(const Layout& layout) {
    return layout.coded ? &layout.codes : nullptr;
  }
  static std::int64_t row_bits(const Layout& layout) {
    return layout.coded ? Coded::row_bits(layout.codes) : Plain::row_bits(layout.plain);
  }
  static std::size_t block_bytes(const Layout& layout, int rows) {
    return layout.coded ? Coded::block_bytes(layout.codes, rows)
                        : Plain::block_bytes(layout.plain, rows);
  }
  static void encode(const Layout& layout, Part part, int rows_per_page, std::byte* block,
                     int first, int count, const float* rows, int stride) {
    if (layout.coded)
      Coded::encode(layout.codes, part, rows_per_page, block, first, count, rows, stride);
    else
      Plain::encode(layout.plain, part, rows_per_page, block, first, count, rows, stride);
  }
  static void decode(const Layout& layout, Part part, int rows_per_page, const std::byte* block,
                     int first, int count, float* tile, int stride) {
    if (layout.coded)
      Coded::decode(layout.codes, part, rows_per_page, block, first, count, tile, stride);
    else
      Plain::decode(layout.plain, part, rows_per_page, block, first, count, tile, stride);
  }
  static void copy_row(const Layout& layout, Part part, const std::byte* from, int from_rows,
                       int from_row, std::byte* to, int to_rows, int to_row) {
    if (layout.coded)
      Coded::copy_row(layout.codes, part, from, from_rows, from_row, to, to_rows, to_row);
    else
      Plain::copy_row(layout.plain, part, from, from_rows, from_row, to, to_rows, to_row);
  }
};

static_assert(QuantizerFor<FullRows, Cpu>);

LOWRANKKV_NAMESPACE_END
