// SPDX-License-Identifier: Apache-2.0
/// @file cpu/quantizer/block_hadamard.hpp  BlockHadamard on the CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "lowrankkv/quantizer/flat_rotation.hpp"
#include "lowrankkv/concepts/quantizer.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/cpu/quantizer/packed_codes.hpp"
#include "lowrankkv/quantizer/block_hadamard.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<BlockHadamard, Cpu> : cpu::PackedCodec {
  static constexpr bool orders_channels = true;

  static void validate(const BlockHadamard& policy) {
    using ::lowrankkv::detail::fail;
    if (!(policy.outlier_share >= 0.0F && policy.outlier_share <= 1.0F)) fail<ValueError>("BlockHadamard: outlier_share is in [0, 1], given ", policy.outlier_share);
    for (const int bits : {policy.high_bits, policy.low_bits}) {
      if (bits < 2 || bits > 8) fail<ValueError>("BlockHadamard: bits are 2 to 8, given ", bits);
    }
  }
  static Layout layout(const BlockHadamard& policy, int rank, std::span<const std::uint8_t>) {
    const int high = (std::min)(rank, static_cast<int>(std::lround(policy.outlier_share * static_cast<float>(rank))));
    Layout result{rank, {}, {}, ScaleKind::largest_f16, 1.0F};
    for (int channel = 0; channel < rank; ++channel) result.bits.push_back(static_cast<std::uint8_t>(channel < high ? policy.high_bits : policy.low_bits));
    if (high > 0) result.groups.push_back({0, high});
    if (high < rank) result.groups.push_back({high, rank - high});
    return result;
  }
  static ChannelFold fold(const BlockHadamard& policy, const Layout& layout, std::span<const float>) {
    if (!policy.rotate) return {};
    const std::size_t rank = static_cast<std::size_t>(layout.rank);
    ChannelFold result{std::vector<float>(rank * rank, 0.0F), {}};
    for (const ScaleGroup& group : layout.groups) {
      const std::vector<float> block = flat_rotation(group.count);
      for (int row = 0; row < group.count; ++row) {
        std::copy_n(block.begin() + row * group.count, group.count, result.rotation.begin() + (group.first + row) * layout.rank + group.first);
      }
    }
    return result;
  }
};

static_assert(QuantizerFor<BlockHadamard, Cpu>);

LOWRANKKV_NAMESPACE_END
