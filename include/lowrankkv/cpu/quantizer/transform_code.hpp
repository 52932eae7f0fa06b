// SPDX-License-Identifier: Apache-2.0
/// @file cpu/quantizer/transform_code.hpp  TransformCode on the CPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>

#include "lowrankkv/concepts/quantizer.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/cpu/quantizer/packed_codes.hpp"
#include "lowrankkv/quantizer/transform_code.hpp"
#include "lowrankkv/quantizer/transform_layout.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<TransformCode, Cpu> : cpu::PackedCodec {
  static constexpr bool orders_channels = true;

  static void validate(const TransformCode& policy) {
    if (!(policy.step_scale > 0.0F) || !std::isfinite(policy.step_scale)) {
      ::lowrankkv::detail::fail<ValueError>(
          "TransformCode: step_scale is finite and positive, given ", policy.step_scale);
    }
  }
  static Layout layout(const TransformCode& policy, int rank, std::span<const std::uint8_t> bits) {
    return transform_layout(policy, rank, bits);
  }
  static ChannelFold fold(const TransformCode& policy, const Layout& layout,
                          std::span<const float> rms) {
    return {{}, transform_steps(policy, layout.bits, rms)};
  }
};

static_assert(QuantizerFor<TransformCode, Cpu>);

LOWRANKKV_NAMESPACE_END
