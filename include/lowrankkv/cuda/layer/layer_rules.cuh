// SPDX-License-Identifier: Apache-2.0
/// @file cuda/layer/layer_rules.cuh  The rules of a composition of policies on the Cuda backend:
/// which policies go together, which kernels are compiled, how parameters are checked, and how
/// large a layer is.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "lowrankkv/core/calls.hpp"
#include "lowrankkv/core/kernel_set.hpp"
#include "lowrankkv/cuda/basis/per_head.cuh"
#include "lowrankkv/cuda/layer/layer_state.cuh"
#include "lowrankkv/cuda/quantizer/choose_tiles.cuh"
#include "lowrankkv/cuda/quantizer/no_quantizer.cuh"
#include "lowrankkv/cuda/token_policy/compose.cuh"
#include "lowrankkv/cuda/updater/static.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Compile-time properties and sizes of a Layer that follow from its policies.
template <class Set, class Basis, class Updater, class TokenPolicy, class Quantizer,
          class EpochPolicy>
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
  static_assert(sizeof(Rows) > 0);  // its own asserts name members that do not go together
  using PolicySet = Policies<Basis, Updater, TokenPolicy, Quantizer>;
  using Rule = Impl<Known<Updater, Static>, Cuda>;
  static constexpr int scale_groups = scale_groups_of<Codec>();
  static constexpr bool joins = Rows::compresses && requires(const Basis& joint) {
    Maps::joint_heads(joint, 1);
  };
  /// Scale groups of codes; 0: coefficients are stored in plain tiles.
  static constexpr int coded_groups = Codec::form == CodedForm::codes ? scale_groups : 0;
  static_assert(
      !Rule::adapts || Codec::form == CodedForm::plain ||
          requires(const Quantizer& quantizer) { Codec::moving_tiles(quantizer, 1); } ||
          requires { Codec::orders_channels; },
      "lowrankkv: on the Cuda backend an Updater that moves bases needs a Quantizer that moves "
      "with them (NoQuantizer, Int8, BlockHadamard, TransformCode)");
  /// Rows enter Frequent Directions sketches. The device decides when a chunk ends.
  static constexpr bool sketches = Rows::compresses && requires { Rule::device_epochs; };
  /// Errors choose full rows in every part of a prompt, so heads may keep different numbers of full
  /// rows.
  static constexpr bool exempts_in_parts =
      sketches && (Rows::by_scores || Rows::accumulates_scores) && Rows::by_errors;
  /// Epochs are device-managed.
  static constexpr bool device_epochs =
      sketches || (Rule::adapts && Rows::compresses && Rows::accumulates_scores);
  static_assert(!Rule::adapts || EpochPolicy::max_epochs + 2 <= kMaxSegments,
                "lowrankkv: KeepEpochs<max>: at most 16 on the Cuda backend");
  static_assert(
      !Rule::adapts || requires { Maps::moves; },
      "lowrankkv: on the Cuda backend an Updater that moves bases needs PerHead bases");

  /// Form of the compressed rows; CodedForm::none if nothing is compressed.
  static constexpr CodedForm kForm = Rows::compresses ? Codec::form : CodedForm::none;
  /// Which lists store positions and scores explicitly. Where rows are chosen or dropped by value,
  /// counts do not determine the positions of a list's rows.
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

  /// Returns the configuration with defaults filled in.
  /// @throws ShapeError, ValueError, CapacityError for parameters that this backend cannot use
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
    check_kernels(config, basis, policies);
    if (Rows::compresses) {
      Maps::validate(policies.basis, basis, config.shape);
      ::lowrankkv::detail::check_storable(basis, config.epoch_type);
      if constexpr (requires { Rule::validate_basis(policies.updater, basis); })
        Rule::validate_basis(policies.updater, basis);
    }
    ::lowrankkv::detail::complete_tail(config, recent_rows(policies.token_policy));
    ::lowrankkv::detail::adopt_page_bytes(config, pool);
    return config;
  }

  /// @throws ValueError if the set lacks kernels for a cache of this configuration
  static void check_kernels(const CacheConfig& config, const LayerBasis& basis,
                            [[maybe_unused]] const PolicySet& policies) {
    using ::lowrankkv::detail::fail;
    const auto check_type = [](const char* what, DType type) {
      if (type == DType::f16 ? !Set::f16 : !Set::bf16) {
        fail<ValueError>(what, ": ", name_of(type), ", the kernel set has only ",
                         name_of(Set::f16 ? DType::f16 : DType::bf16));
      }
    };
    check_type("full_type", config.full_type);
    if (Set::head_dim != 0 && config.shape.head_dim != Set::head_dim)
      fail<ValueError>("head_dim: ", config.shape.head_dim, ", kernel set ", Set::head_dim);
    if (!Set::rope_pre && config.rope.keys == Rope::pre)
      fail<ValueError>("rope: pre-RoPE keys, the kernel set has only post-RoPE keys");
    if (!Set::full_rows_8 && config.full_row_bits == 8)
      fail<ValueError>("full_row_bits: ", config.full_row_bits, ", the kernel set has only 16");
    if constexpr (kForm == CodedForm::plain) {
      check_type("coefficients", Codec::type(policies.quantizer));
      for (const HeadBasis& head : basis.heads) {
        const int rank = (std::max)(head.key_rank, joins ? 0 : head.value_rank);
        if (Set::max_rank != 0 && rank > Set::max_rank)
          fail<ValueError>("rank: ", rank, ", kernel set at most ", Set::max_rank);
      }
    }
  }

  /// The most rows that the lists of a sequence may have.
  static MostRows most_rows(const CacheConfig& config, const PolicySet& policies) {
    return most_rows(policies.token_policy, config.max_tokens);
  }
  /// The most rows of a sequence of which `tokens` tokens have left the tail.
  static MostRows most_rows(const TokenPolicy& policy, std::int64_t tokens) {
    const RowCounts prompt = row_counts(policy, 0, tokens, Phase::prefill);
    const RowCounts steps = row_counts(policy, 0, tokens, Phase::decode);
    if (Rows::scores_both) {
      // One list may hold all rows that are kept by score. Errors keep `full` of them at full rank;
      // the full list exceeds that only after compressed rows were removed. That excess is spare.
      const std::int64_t kept = steps.pinned + steps.limit;
      const std::int64_t full = (std::min)(kept, (std::max)(prompt.full, steps.full));
      return {full, kept, kept - full};
    }
    if (Rows::accumulates_scores) {
      return {Rows::compresses ? steps.pinned : steps.limit, Rows::compresses ? steps.limit : 0, 0};
    }
    const std::int64_t full = (std::max)(prompt.full, steps.full);
    // How many rows prompt scores keep, and how many errors leave compressed, depends on how the
    // tokens are divided into calls. Where errors choose, a head may keep its earliest full rows
    // while later tokens are removed, so the full list has room for 64 rows more than twice as
    // many.
    return {full, Rows::compresses ? tokens : 0,
            Rows::by_errors ? (std::min)(full + 64, tokens - full) : 0};
  }

  /// Heads of a group whose values are one latent; 0: no joint values.
  static int joint_heads([[maybe_unused]] const CacheConfig& config,
                         [[maybe_unused]] const PolicySet& policies) {
    if constexpr (joins)
      return Maps::joint_heads(policies.basis, config.shape.num_kv_heads);
    else
      return 0;
  }
  static LayerTiles tiles_of(const CacheConfig& config, const LayerBasis& basis,
                             const PolicySet& policies) {
    LayerTiles tiles =
        choose_tiles(config, basis, policies.quantizer, Rows::compresses, Rule::adapts,
                     joint_heads(config, policies), most_rows(config, policies));
    const int units = (std::max)(tiles.max_units(Part::key), tiles.max_units(Part::value));
    if (kForm == CodedForm::codes && Set::max_code_units != 0 && units > Set::max_code_units)
      ::lowrankkv::detail::fail<ValueError>("units of codes: ", units, ", kernel set at most ",
                                            Set::max_code_units);
    return tiles;
  }
  /// Bytes of the workspace of a layer with this configuration, which has been checked.
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
