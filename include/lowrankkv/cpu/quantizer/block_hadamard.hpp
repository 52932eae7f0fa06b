// SPDX-License-Identifier: Apache-2.0
/// @file cpu/quantizer/block_hadamard.hpp  BlockHadamard on the CPU.
#pragma once

#include <cstdint>
#include <span>

#include "lowrankkv/concepts/quantizer.hpp"
#include "lowrankkv/cpu/quantizer/packed_codes.hpp"
#include "lowrankkv/quantizer/block_hadamard.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<BlockHadamard, Cpu> : cpu::PackedCodec {
  static constexpr bool orders_channels = true;

  static void validate(const BlockHadamard& policy) { check_block_hadamard(policy); }
  static Layout layout(const BlockHadamard& policy, int rank, std::span<const std::uint8_t>) {
    return block_hadamard_layout(policy, rank);
  }
  static ChannelFold fold(const BlockHadamard& policy, const Layout& layout,
                          std::span<const float>) {
    return {block_hadamard_rotation(policy, layout), {}};
  }
};

static_assert(QuantizerFor<BlockHadamard, Cpu>);

LOWRANKKV_NAMESPACE_END
