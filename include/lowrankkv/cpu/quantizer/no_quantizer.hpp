// SPDX-License-Identifier: Apache-2.0
/// @file cpu/quantizer/no_quantizer.hpp  NoQuantizer on the CPU: keys channel-major in a page, values row-major.
///
/// Logits run over tokens for one channel at a time, outputs over channels for one token at a time: in these layouts both
/// are unit-stride and need no horizontal sum.
#pragma once

#include <cstddef>

#include "lowrankkv/concepts/quantizer.hpp"
#include "lowrankkv/cpu/convert.hpp"
#include "lowrankkv/quantizer/no_quantizer.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<NoQuantizer, Cpu> {
  static std::size_t row_bytes(const NoQuantizer& policy, int rank) {
    return size_of(policy.type) * static_cast<std::size_t>(rank);
  }

  static void encode(const NoQuantizer& policy, Part part, BlockShape shape, std::byte* block, int first, int count,
                     const float* rows, int stride) {
    const std::size_t size = size_of(policy.type);
    for (int row = 0; row < count; ++row) {
      const float* source = rows + static_cast<std::ptrdiff_t>(row) * stride;
      if (part == Part::value) {
        cpu::from_f32(policy.type, source, shape.rank,
                      block + size * static_cast<std::size_t>(first + row) * static_cast<std::size_t>(shape.rank));
        continue;
      }
      for (int channel = 0; channel < shape.rank; ++channel) {
        const std::ptrdiff_t index = static_cast<std::ptrdiff_t>(channel) * shape.rows_per_page + first + row;
        cpu::from_f32(policy.type, source + channel, 1, block + static_cast<std::ptrdiff_t>(size) * index);
      }
    }
  }

  static void decode(const NoQuantizer& policy, Part part, BlockShape shape, const std::byte* block, int first, int count,
                     float* tile, int stride) {
    const std::size_t size = size_of(policy.type);
    const bool keys = part == Part::key;
    const int lines = keys ? shape.rank : count;
    const int length = keys ? count : shape.rank;
    for (int line = 0; line < lines; ++line) {
      const std::ptrdiff_t index = keys ? static_cast<std::ptrdiff_t>(line) * shape.rows_per_page + first
                                        : static_cast<std::ptrdiff_t>(first + line) * shape.rank;
      cpu::to_f32(policy.type, block + static_cast<std::ptrdiff_t>(size) * index, length,
                  tile + static_cast<std::ptrdiff_t>(line) * stride);
    }
  }
};

static_assert(QuantizerFor<NoQuantizer, Cpu>);

LOWRANKKV_NAMESPACE_END
