// SPDX-License-Identifier: Apache-2.0
/// @file cuda/layer/layer.cuh  One attention layer on the Cuda backend with its policies: what is
/// stored, and by which rules. The steps of the algorithm are free functions over it:
/// cuda/compress/compress.cuh, cuda/cache/prefill.cuh, cuda/cache/decode_step.cuh,
/// cuda/cache/token_edits.cuh.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "lowrankkv/core/statistics.hpp"
#include "lowrankkv/cuda/basis/folded_basis.cuh"
#include "lowrankkv/cuda/layer/layer_rules.cuh"
#include "lowrankkv/cuda/layer/layer_state.cuh"
#include "lowrankkv/cuda/layer/open_prompt.cuh"
#include "lowrankkv/cuda/tiles/int8_tiles.cuh"
#include "lowrankkv/detail/sequence_table.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief A layer's stored state, its sequences, and its policies, whose rules it inherits.
template <class Basis, class Updater, class TokenPolicy, class Quantizer, class EpochPolicy>
struct Layer : LayerRules<Basis, Updater, TokenPolicy, Quantizer, EpochPolicy> {
  using Rules = LayerRules<Basis, Updater, TokenPolicy, Quantizer, EpochPolicy>;
  using typename Rules::PolicySet;
  using typename Rules::Rows;
  using typename Rules::Rule;

  Layer(const CacheConfig& settings, const LayerBasis& basis, const PolicySet& of_policies,
        std::shared_ptr<PagePool> pool, const LentMemory& workspace)
      : policies(of_policies),
        config(Rules::checked(settings, basis, policies, pool.get())),
        state(config, Rules::tiles_of(config, basis, policies),
              folded_basis(basis, policies.quantizer, config.shape.head_dim),
              Rules::most_rows(config, policies), Rules::limits(policies), Rules::listed(),
              std::move(pool), workspace),
        sequences(config),
        prompts(config.max_sequences) {}

  /// Tokens of a sequence, those of an unfinished chunk included.
  std::int64_t tokens_of(int slot) const {
    return state.sequence(slot).num_tokens + prompts.of(slot).rows();
  }
  /// Rows of a sequence that are pinned, at most.
  std::int64_t ever_pinned() const {
    return pinned_rows(policies.token_policy, 0, config.max_tokens);
  }
  /// Rows of a tail beyond which it is flushed.
  int kept_rows() const { return recent_rows(policies.token_policy) + config.flush_interval; }
  /// Tokens of a chunk of a prompt, at most.
  std::int64_t chunk_limit() const {
    return config.prefill_chunk > 0 ? config.prefill_chunk : std::int64_t{1} << 40;
  }
  /// Queries at the end of a prompt by which somebody chooses among its rows.
  int scoring_window() const {
    int window = attention_scores(policies.token_policy).window;
    if constexpr (Rule::adapts && Rows::compresses && !Rules::sketches) {
      const PromptSelection selection = Rule::prompt_selection(policies.updater);
      if (selection.share < 1.0F) window = (std::max)(window, selection.scores.window);
    }
    return window;
  }
  /// Largest magnitude that may be stored. NaN and Inf never are: in a tail they would reach rows
  /// that come after them.
  float value_limit() const {
    if (!config.check_finite) return max_finite(DType::f32);
    // Of 8-bit rows so many steps, each an f16.
    const float coded =
        config.full_row_bits == 8 ? kScaledHalf * max_finite(DType::f16) : max_finite(DType::f32);
    return (std::min)(max_finite(config.full_type), coded);
  }

  PolicySet policies;
  CacheConfig config;  ///< as it was given, defaults filled in
  LayerState state;
  ::lowrankkv::detail::SequenceTable sequences;  ///< from the engine's ids to slots
  OpenPrompts prompts;
  CacheStatistics statistics;
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
