// SPDX-License-Identifier: Apache-2.0
/// @file cuda/layer/layer_rules.cuh  What a composition of policies is on the Cuda backend: what
/// goes together, what is compiled, what is checked of parameters before a layer is made, and how
/// large it is.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "lowrankkv/core/calls.hpp"
#include "lowrankkv/cuda/basis/per_head.cuh"
#include "lowrankkv/cuda/layer/layer_state.cuh"
#include "lowrankkv/cuda/quantizer/choose_tiles.cuh"
#include "lowrankkv/cuda/quantizer/no_quantizer.cuh"
#include "lowrankkv/cuda/token_policy/compose.cuh"
#include "lowrankkv/cuda/updater/static.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief What a Layer knows of its policies.
template <class Basis, class Updater, class TokenPolicy, class Quantizer, class EpochPolicy>
struct LayerRules {
  static_assert(
      HasImpl<Basis, Cuda>,
      "lowrankkv: this Basis has no Impl<Basis, Cuda>; there are PerHead, JointValues and "
      "Projector (cuda/backend.cuh)");
  static_assert(HasImpl<Updater, Cuda>,
                "lowrankkv: this Updater has no Impl<Updater, Cuda>; there are Static, Oja and "
                "FrequentDirections (cuda/backend.cuh)");
  static_assert(
      HasImpl<Quantizer, Cuda>,
      "lowrankkv: this Quantizer has no Impl<Quantizer, Cuda>; there are NoQuantizer, Int8, "
      "BlockHadamard and TransformCode (cuda/backend.cuh)");
  using Maps = Impl<Known<Basis, PerHead>, Cuda>;
  using Codec = Impl<Known<Quantizer, NoQuantizer>, Cuda>;
  using Rows = TokenRules<TokenPolicy>;
  static_assert(sizeof(Rows) > 0);  // which says what members of a token policy do not go together
  using PolicySet = Policies<Basis, Updater, TokenPolicy, Quantizer>;
  using Rule = Impl<Known<Updater, Static>, Cuda>;
  static constexpr int scale_groups = scale_groups_of<Codec>();
  static constexpr bool joins = Rows::compresses && requires(const Basis& joint) {
    Maps::joint_heads(joint, 1);
  };
  /// Scale groups of codes; 0: coefficients are in plain tiles.
  static constexpr int coded_groups = Codec::form == CodedForm::codes ? scale_groups : 0;
  static_assert(
      !Rule::adapts || Codec::form == CodedForm::plain ||
          requires(const Quantizer& quantizer) { Codec::moving_tiles(quantizer, 1); } ||
          requires { Codec::orders_channels; },
      "lowrankkv: on the Cuda backend an Updater that moves bases needs a Quantizer that moves "
      "with them (NoQuantizer, Int8, BlockHadamard, TransformCode)");
  /// Rows enter sketches, whose chunks end when values say so.
  static constexpr bool sketches = Rows::compresses && requires { Rule::device_epochs; };
  /// How many rows of a prompt stay full, heads differ in.
  static constexpr bool exempts_in_parts =
      sketches && (Rows::by_scores || Rows::accumulates_scores) && Rows::by_errors;
  /// Epochs begin when values say so.
  static constexpr bool device_epochs =
      sketches || (Rule::adapts && Rows::compresses && Rows::accumulates_scores);
  static_assert(!Rule::adapts || EpochPolicy::max_epochs + 2 <= kMaxSegments,
                "lowrankkv: KeepEpochs<max>: at most 16 on the Cuda backend");
  static_assert(
      !Rule::adapts || requires { Maps::moves; },
      "lowrankkv: on the Cuda backend an Updater that moves bases needs PerHead bases");

  /// Form of the compressed rows, if there are any.
  static constexpr CodedForm kForm = Rows::compresses ? Codec::form : CodedForm::none;
  /// Rows stand in their lists by position; which positions, counts do not tell where rows are
  /// chosen or dropped.
  static constexpr ListedRows listed() {
    return {Rows::chooses || Rows::drops, Rows::compresses && Rows::drops, Rows::by_errors,
            Rows::accumulates_scores};
  }
  static EpochLimits limits([[maybe_unused]] const PolicySet& policies) {
    EpochLimits limits{Rule::adapts && Rows::compresses ? EpochPolicy::max_epochs : 0,
                       EpochPolicy::rotates_calibrated_rows, device_epochs};
    if constexpr (sketches) limits.sketch_share = policies.updater.sketch_share;
    return limits;
  }

  /// Fills in defaults, or raises what is wrong.
  static CacheConfig checked(CacheConfig config, const LayerBasis& basis, const PolicySet& policies,
                             const PagePool* pool) {
    using ::lowrankkv::detail::fail;
    ::lowrankkv::detail::validate(config);
    validate_tokens(policies.token_policy);
    Codec::validate(policies.quantizer);
    if constexpr (Rule::adapts) Rule::validate(policies.updater);
    const int dim = config.shape.head_dim;
    if (dim % kPlainUnit != 0 || dim > kMaxHeadDim) {
      fail<ShapeError>("head_dim: ", dim, ", a multiple of ", kPlainUnit, " up to ", kMaxHeadDim,
                       " expected on this backend");
    }
    if (config.full_type == DType::f32) {
      fail<ValueError>("full_type: ", name_of(config.full_type),
                       ", f16 or bf16 expected on this backend");
    }
    if (config.rope.keys == Rope::pre) RotaryTables::check(config.rope, dim);
    if (Rows::compresses) {
      Maps::validate(policies.basis, basis, config.shape);
      ::lowrankkv::detail::check_storable(basis, config.epoch_type);
    }
    ::lowrankkv::detail::complete_tail(config, recent_rows(policies.token_policy));
    ::lowrankkv::detail::adopt_page_bytes(config, pool);
    return config;
  }

  /// Rows that the lists of a sequence may have.
  static MostRows most_rows(const CacheConfig& config, const PolicySet& policies) {
    return most_rows(policies.token_policy, config.max_tokens);
  }
  /// The same of a sequence of which so many tokens have left the tail.
  static MostRows most_rows(const TokenPolicy& policy, std::int64_t tokens) {
    const RowCounts prompt = row_counts(policy, 0, tokens, Phase::prefill);
    const RowCounts steps = row_counts(policy, 0, tokens, Phase::decode);
    if (Rows::scores_both) {
      // One list may have all rows that masses keep; errors leave so many at full rank, unless rows
      // that are not go.
      const std::int64_t kept = steps.pinned + steps.limit;
      const std::int64_t full = (std::min)(kept, (std::max)(prompt.full, steps.full));
      return {full, kept, kept - full};
    }
    if (Rows::accumulates_scores) {
      return {Rows::compresses ? steps.pinned : steps.limit, Rows::compresses ? steps.limit : 0, 0};
    }
    const std::int64_t full = (std::max)(prompt.full, steps.full);
    // What a prompt's scores keep, and what errors leave, depends on how tokens come. Where errors
    // choose, a head that keeps its earliest rows when later ones go has room for twice as many.
    return {full, Rows::compresses ? tokens : 0,
            Rows::by_errors ? (std::min)(full + 64, tokens - full) : 0};
  }

  /// Heads of a group whose values are one latent; 0: none.
  static int joint_heads([[maybe_unused]] const CacheConfig& config,
                         [[maybe_unused]] const PolicySet& policies) {
    if constexpr (joins)
      return Maps::joint_heads(policies.basis, config.shape.num_kv_heads);
    else
      return 0;
  }
  static LayerTiles tiles_of(const CacheConfig& config, const LayerBasis& basis,
                             const PolicySet& policies) {
    return choose_tiles(config, basis, policies.quantizer, Rows::compresses, Rule::adapts,
                        joint_heads(config, policies), most_rows(config, policies));
  }
  /// Bytes of the workspace of a layer of such a configuration, which is checked.
  static std::size_t decode_bytes(const CacheConfig& config, const LayerBasis& basis,
                                  const PolicySet& policies) {
    const MostRows most = most_rows(config, policies);
    const std::int64_t max_rows[2] = {most.full + most.spare_full, most.compressed};
    return Workspace::decode_bytes(config, tiles_of(config, basis, policies),
                                   limits(policies).segments(), max_rows);
  }
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
