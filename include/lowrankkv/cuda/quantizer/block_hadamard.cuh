// SPDX-License-Identifier: Apache-2.0
/// @file cuda/quantizer/block_hadamard.cuh  BlockHadamard on the Cuda backend.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/cuda/quantizer/code_planes.cuh"
#include "lowrankkv/quantizer/block_hadamard.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// Tiles have two gains per row, even where the rank is so small that one block has no channels.
template <>
struct Impl<BlockHadamard, Cuda> {
  static constexpr cuda::CodedForm form = cuda::CodedForm::codes;
  static constexpr bool orders_channels = true;
  static constexpr int scale_groups = 2;
  static void validate(const BlockHadamard& policy) { check_block_hadamard(policy); }
  static cuda::PartTiles tiles(const BlockHadamard& policy, int rank,
                               std::span<const std::uint8_t>) {
    return cuda::code_planes(block_hadamard_layout(policy, rank));
  }
  static cuda::PartTiles joint_tiles(const BlockHadamard& policy, int rank,
                                     std::span<const std::uint8_t>) {
    return cuda::joint_code_planes(block_hadamard_layout(policy, rank));
  }
  static std::vector<float> steps(const BlockHadamard&, std::span<const std::uint8_t>,
                                  std::span<const float>) {
    return {};
  }
  static std::vector<float> unit_steps(const BlockHadamard&, std::span<const std::uint8_t>) {
    return {};
  }
  static std::vector<float> rotation(const BlockHadamard& policy, int rank) {
    return block_hadamard_rotation(policy, block_hadamard_layout(policy, rank));
  }
};

LOWRANKKV_NAMESPACE_END
