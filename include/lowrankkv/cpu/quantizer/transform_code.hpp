// SPDX-License-Identifier: Apache-2.0
/// @file cpu/quantizer/transform_code.hpp  TransformCode on the CPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "lowrankkv/concepts/quantizer.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/cpu/quantizer/packed_codes.hpp"
#include "lowrankkv/quantizer/transform_code.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<TransformCode, Cpu> : cpu::PackedCodec {
  static constexpr bool orders_channels = true;

  static void validate(const TransformCode& policy) {
    if (!(policy.step_scale > 0.0F) || !std::isfinite(policy.step_scale)) {
      ::lowrankkv::detail::fail<ValueError>("TransformCode: step_scale is finite and positive, given ", policy.step_scale);
    }
  }
  static Layout layout(const TransformCode& policy, int rank, std::span<const std::uint8_t> bits) {
    if (bits.size() != static_cast<std::size_t>(rank)) {
      ::lowrankkv::detail::fail<ShapeError>("TransformCode: the basis has bits for ", bits.size(), " channels, rank ", rank, "; see budgeted.hpp");
    }
    Layout result{rank, {bits.begin(), bits.end()}, {}, ScaleKind::norm_log8, 1.0F};
    int coded = 0;
    double energy = 0.0;  // of coefficients in steps: a channel's rms is 1 / step
    for (const std::uint8_t width : bits) {
      if (width == 0) break;  // sorted: only zeros follow
      ++coded;
      energy += 1.0 / std::pow(static_cast<double>(policy.step_scale * gaussian_step(width)), 2);
    }
    if (coded > 0) result.groups.push_back({0, coded});
    if (coded > 0) result.reference_norm = static_cast<float>(std::sqrt(energy));
    return result;
  }
  static ChannelFold fold(const TransformCode& policy, const Layout& layout, std::span<const float> rms) {
    if (rms.size() != static_cast<std::size_t>(layout.rank)) {
      ::lowrankkv::detail::fail<ShapeError>("TransformCode: the basis has rms for ", rms.size(), " channels, rank ", layout.rank);
    }
    ChannelFold result;
    for (std::size_t channel = 0; channel < rms.size(); ++channel) {
      const int bits = layout.bits[channel];
      result.scale.push_back(bits == 0 ? 1.0F : policy.step_scale * gaussian_step(bits) * rms[channel]);
    }
    return result;
  }
};

static_assert(QuantizerFor<TransformCode, Cpu>);

LOWRANKKV_NAMESPACE_END
