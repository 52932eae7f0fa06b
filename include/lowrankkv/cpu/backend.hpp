// SPDX-License-Identifier: Apache-2.0
/// @file cpu/backend.hpp  The Cpu backend: host memory, Eigen, threads. Includes every policy's CPU
/// implementation.
#pragma once

#include <memory>

#include "lowrankkv/concepts/basis.hpp"
#include "lowrankkv/concepts/quantizer.hpp"
#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/concepts/updater.hpp"
#include "lowrankkv/cpu/basis/identity.hpp"
#include "lowrankkv/cpu/basis/joint_values.hpp"
#include "lowrankkv/cpu/basis/per_head.hpp"
#include "lowrankkv/cpu/basis/projector.hpp"
#include "lowrankkv/cpu/cache/calls.hpp"
#include "lowrankkv/cpu/layer.hpp"
#include "lowrankkv/cpu/page_pool.hpp"
#include "lowrankkv/cpu/quantizer/block_hadamard.hpp"
#include "lowrankkv/cpu/quantizer/channel_groups.hpp"
#include "lowrankkv/cpu/quantizer/fp8_rows.hpp"
#include "lowrankkv/cpu/quantizer/ggml_blocks.hpp"
#include "lowrankkv/cpu/quantizer/int8.hpp"
#include "lowrankkv/cpu/quantizer/no_quantizer.hpp"
#include "lowrankkv/cpu/quantizer/rotated_levels.hpp"
#include "lowrankkv/cpu/quantizer/transform_code.hpp"
#include "lowrankkv/cpu/thread_pool.hpp"
#include "lowrankkv/cpu/token_policy/compose.hpp"
#include "lowrankkv/cpu/token_policy/compress_all.hpp"
#include "lowrankkv/cpu/token_policy/heavy_hitters.hpp"
#include "lowrankkv/cpu/token_policy/keep_full.hpp"
#include "lowrankkv/cpu/token_policy/recent_full.hpp"
#include "lowrankkv/cpu/token_policy/residual_outliers.hpp"
#include "lowrankkv/cpu/token_policy/sink_recent.hpp"
#include "lowrankkv/cpu/token_policy/sliding_window.hpp"
#include "lowrankkv/cpu/token_policy/snapkv.hpp"
#include "lowrankkv/cpu/updater/frequent_directions.hpp"
#include "lowrankkv/cpu/updater/oja.hpp"
#include "lowrankkv/cpu/updater/static.hpp"
#include "lowrankkv/fwd.hpp"

LOWRANKKV_NAMESPACE_BEGIN

namespace cpu {

/// @brief Whether an updater may move the basis.
template <class Basis, class Updater>
concept Movable = !Impl<Updater, Cpu>::adapts || !basis_is_fixed<Basis, Cpu>();
/// @brief Whether an updater's merges may rewrite the rows of a quantizer.
template <class Quantizer, class Updater>
concept Mergeable = !Impl<Updater, Cpu>::adapts || !groups_rows<Quantizer, Cpu>();

/// @brief Reports policies that do not go together, in one line; what lacks members is reported
/// before.
template <class Basis, class Updater, class Quantizer>
struct DiagnoseTogether {
  static constexpr bool complete =
      BasisFor<Basis, Cpu> && UpdaterFor<Updater, Cpu> && QuantizerFor<Quantizer, Cpu>;
  static_assert(!complete || Movable<Basis, Updater>,
                "lowrankkv: this Basis cannot be moved; use it with the Static updater");
  static_assert(!complete || Mergeable<Quantizer, Updater>,
                "lowrankkv: this Quantizer codes rows in groups, which an updater's merges would "
                "rewrite one by one; use it with the Static updater");
};

/// @brief Reports each member that a policy lacks on the Cpu backend, in one line.
template <class Basis, class Updater, class TokenPolicy, class Quantizer>
struct Diagnosis : ::lowrankkv::detail::DiagnoseBasis<Basis, Cpu>,
                   ::lowrankkv::detail::DiagnoseUpdater<Updater, Cpu>,
                   ::lowrankkv::detail::DiagnoseTokenPolicy<TokenPolicy, Cpu>,
                   ::lowrankkv::detail::DiagnoseQuantizer<Quantizer, Cpu>,
                   DiagnoseTogether<Basis, Updater, Quantizer> {
  static constexpr bool usable = BasisFor<Basis, Cpu> && UpdaterFor<Updater, Cpu> &&
                                 TokenPolicyFor<TokenPolicy, Cpu> && QuantizerFor<Quantizer, Cpu> &&
                                 Movable<Basis, Updater> && Mergeable<Quantizer, Updater>;
};

/// @brief A cache with a diagnosed policy has no layer, so that the diagnosis is the only error.
template <bool usable, class... PoliciesAndEpochs>
struct LayerOf {
  using type = Layer<PoliciesAndEpochs...>;
};
/// @brief Not a layer.
template <class... PoliciesAndEpochs>
struct LayerOf<false, PoliciesAndEpochs...> {
  struct type {};
};

}  // namespace cpu

/// @brief Backend tag: everything is in host memory, and calls return when the work is done.
struct Cpu {
  using Pool = cpu::PagePool;
  using Executor = cpu::Executor;
  using Shared = std::shared_ptr<cpu::Executor>;  ///< what the layers of a model share
  using Stream = cpu::NoStream;
  template <class Layer>
  using Calls = cpu::Calls<Layer>;  ///< what the calls of a cache do
  static constexpr bool has_streams = false;
  template <class Basis, class Updater, class TokenPolicy, class Quantizer>
  using Diagnosis = cpu::Diagnosis<Basis, Updater, TokenPolicy, Quantizer>;
  template <class Basis, class Updater, class TokenPolicy, class Quantizer, class EpochPolicy>
  using Layer = typename cpu::LayerOf<Diagnosis<Basis, Updater, TokenPolicy, Quantizer>::usable,
                                      Basis, Updater, TokenPolicy, Quantizer, EpochPolicy>::type;
  /// Whether rows accumulate the attention that they receive, for the token policy.
  template <class TokenPolicy>
  static constexpr bool accumulates_scores = [] {
    if constexpr (TokenPolicyFor<TokenPolicy, Cpu>)
      return wants(Impl<TokenPolicy, Cpu>::evidence, Evidence::accumulated);
    else
      return false;
  }();
};

LOWRANKKV_NAMESPACE_END
