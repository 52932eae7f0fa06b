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
    return int8_layout(rank);
  }
};

static_assert(QuantizerFor<Int8, Cpu>);

LOWRANKKV_NAMESPACE_END
