// SPDX-License-Identifier: Apache-2.0
/// @file cuda/updater/oja.cuh  Oja on the Cuda backend: the form and the rate of its steps.
#pragma once

#include <cstdint>

#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/updater/oja.hpp"

LOWRANKKV_NAMESPACE_BEGIN

namespace cuda {

/// @brief The rate of a step: first / (1 + decay x steps so far), at most 1e6.
struct OjaRate {
  float first = 0.0F, decay = 0.0F;
  __host__ __device__ float after(std::int64_t steps) const {
    const double rate = static_cast<double>(first) /
                        (1.0 + static_cast<double>(decay) * static_cast<double>(steps));
    return static_cast<float>(rate < 1e6 ? rate : 1e6);
  }
};

}  // namespace cuda

/// Rates are at most 1e6, which acts as infinity: the old basis counts for nothing.
template <>
struct Impl<Oja, Cuda> {
  static constexpr bool adapts = true;
  static void validate(const Oja& policy) { check_oja(policy); }
  static OjaForm form(const Oja& policy) { return policy.form; }
  static PromptSelection prompt_selection(const Oja& policy) {
    return {policy.prefill_share,
            {policy.importance_window, policy.importance_kernel, policy.importance_pooling},
            policy.importance_scope};
  }
  static cuda::OjaRate rate(const Oja& policy, Phase phase) {
    return phase == Phase::prefill ? cuda::OjaRate{policy.prefill_rate, 0.0F}
                                   : cuda::OjaRate{policy.decode_rate, policy.decode_decay};
  }
};

LOWRANKKV_NAMESPACE_END
