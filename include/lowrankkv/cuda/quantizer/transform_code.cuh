// SPDX-License-Identifier: Apache-2.0
/// @file cuda/quantizer/transform_code.cuh  TransformCode on the Cuda backend.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/cuda/quantizer/code_planes.cuh"
#include "lowrankkv/quantizer/transform_layout.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<TransformCode, Cuda> {
  static constexpr cuda::CodedForm form = cuda::CodedForm::codes;
  static constexpr bool orders_channels = true;
  static void validate(const TransformCode& policy) {
    if (!(policy.step_scale > 0.0F) || !std::isfinite(policy.step_scale)) {
      ::lowrankkv::detail::fail<ValueError>(
          "TransformCode: step_scale is finite and positive, given ", policy.step_scale);
    }
  }
  static cuda::PartTiles tiles(const TransformCode& policy, int rank,
                               std::span<const std::uint8_t> bits) {
    return cuda::code_planes(transform_layout(policy, rank, bits));
  }
  static cuda::PartTiles joint_tiles(const TransformCode& policy, int rank,
                                     std::span<const std::uint8_t> bits) {
    return cuda::joint_code_planes(transform_layout(policy, rank, bits));
  }
  static std::vector<float> steps(const TransformCode& policy, std::span<const std::uint8_t> bits,
                                  std::span<const float> rms) {
    return transform_steps(policy, bits, rms);
  }
  static std::vector<float> unit_steps(const TransformCode& policy,
                                       std::span<const std::uint8_t> bits) {
    std::vector<float> units;
    for (const std::uint8_t own : bits)
      units.push_back(own == 0 ? 0.0F : policy.step_scale * gaussian_step(own));
    return units;
  }
};

LOWRANKKV_NAMESPACE_END
