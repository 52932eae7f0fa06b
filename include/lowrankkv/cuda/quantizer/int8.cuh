// SPDX-License-Identifier: Apache-2.0
/// @file cuda/quantizer/int8.cuh  Int8 on the Cuda backend.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/cuda/quantizer/code_planes.cuh"
#include "lowrankkv/quantizer/int8.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<Int8, Cuda> {
  static constexpr cuda::CodedForm form = cuda::CodedForm::codes;
  static void validate(const Int8&) {}
  static cuda::PartTiles tiles(const Int8&, int rank, std::span<const std::uint8_t>) {
    return cuda::code_planes(int8_layout(rank));
  }
  static cuda::PartTiles moving_tiles(const Int8&, int rank) {
    return cuda::moving_code_planes(int8_layout(rank));
  }
  static cuda::PartTiles joint_tiles(const Int8&, int rank, std::span<const std::uint8_t>) {
    return cuda::joint_code_planes(int8_layout(rank));
  }
  static std::vector<float> steps(const Int8&, std::span<const std::uint8_t>,
                                  std::span<const float>) {
    return {};
  }
};

LOWRANKKV_NAMESPACE_END
