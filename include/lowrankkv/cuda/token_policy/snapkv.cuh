// SPDX-License-Identifier: Apache-2.0
/// @file cuda/token_policy/snapkv.cuh  SnapKV on the Cuda backend.
#pragma once

#include <cstdint>

#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/cuda/token_policy/row_choice.cuh"
#include "lowrankkv/token_policy/snapkv.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<SnapKV, Cuda> {
  static constexpr RowFate fate = RowFate::compressed;
  static constexpr cuda::RowChoice choice = cuda::RowChoice::scores;
  static void validate(const SnapKV& policy) { check_snapkv(policy); }
  static int recent(const SnapKV& policy) { return policy.window; }
  static AttentionScores attention_scores(const SnapKV& policy) {
    return {policy.window, policy.kernel, policy.pooling};
  }
  static std::int64_t chosen_rows(const SnapKV& policy, std::int64_t, std::int64_t count,
                                  Phase phase) {
    return phase == Phase::decode ? count : kept_rows(policy, count);
  }
};

LOWRANKKV_NAMESPACE_END
