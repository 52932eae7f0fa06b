// SPDX-License-Identifier: Apache-2.0
/// @file cuda/token_policy/heavy_hitters.cuh  HeavyHitters on the Cuda backend.
#pragma once

#include <cstdint>

#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/cuda/token_policy/row_choice.cuh"
#include "lowrankkv/token_policy/heavy_hitters.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<HeavyHitters, Cuda> {
  static constexpr RowFate fate = RowFate::compressed;
  static constexpr cuda::RowChoice choice = cuda::RowChoice::accumulated_scores;
  static void validate(const HeavyHitters& policy) { check_heavy_hitters(policy); }
  static int recent(const HeavyHitters& policy) { return policy.recent; }
  static std::int64_t chosen_rows(const HeavyHitters& policy, std::int64_t first_position,
                                  std::int64_t count, Phase) {
    return heavy_rows(policy, first_position + count);
  }
};

LOWRANKKV_NAMESPACE_END
