// SPDX-License-Identifier: Apache-2.0
/// @file cpu/quantizer/int8.hpp  Int8 on the CPU.
#pragma once

#include <cstdint>
#include <span>

#include "lowrankkv/concepts/quantizer.hpp"
#include "lowrankkv/cpu/quantizer/packed_codes.hpp"
#include "lowrankkv/quantizer/int8.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<Int8, Cpu> : cpu::PackedCodec {
  static Layout layout(const Int8&, int rank, std::span<const std::uint8_t>) {
    Layout result{rank, std::vector<std::uint8_t>(static_cast<std::size_t>(rank), 8), {}, ScaleKind::largest_f16, 1.0F};
    if (rank > 0) result.groups.push_back({0, rank});
    return result;
  }
};

static_assert(QuantizerFor<Int8, Cpu>);

LOWRANKKV_NAMESPACE_END
