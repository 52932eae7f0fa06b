// SPDX-License-Identifier: Apache-2.0
/// @file cuda/layer/layer.cuh  One attention layer on the Cuda backend: its stored state and its
/// policies. The steps of the algorithm are free functions over it: cuda/compress/compress.cuh,
/// cuda/cache/prefill.cuh, cuda/cache/decode_step.cuh, cuda/cache/token_edits.cuh.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "lowrankkv/core/sequence_table.hpp"
#include "lowrankkv/core/statistics.hpp"
#include "lowrankkv/cuda/basis/folded_basis.cuh"
#include "lowrankkv/cuda/layer/layer_rules.cuh"
#include "lowrankkv/cuda/layer/layer_state.cuh"
#include "lowrankkv/cuda/layer/open_prompt.cuh"
#include "lowrankkv/cuda/tiles/int8_tiles.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief A layer's stored state, its sequences and its policies. Inherits the policies' rules.
template <class Set, class Basis, class Updater, class TokenPolicy, class Quantizer,
          class EpochPolicy>
struct Layer : LayerRules<Set, Basis, Updater, TokenPolicy, Quantizer, EpochPolicy> {
  using Rules = LayerRules<Set, Basis, Updater, TokenPolicy, Quantizer, EpochPolicy>;
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

  /// Tokens of a sequence, including the staged rows of an unfinished chunk.
  std::int64_t tokens_of(int slot) const {
    return state.sequence(slot).num_tokens + prompts.of(slot).rows();
  }
  /// The most rows of a sequence that can be pinned.
  std::int64_t most_pinned() const {
    return pinned_rows(policies.token_policy, 0, config.max_tokens);
  }
  /// A tail with more rows than this is flushed.
  int kept_rows() const { return recent_rows(policies.token_policy) + config.flush_interval; }
  /// The most tokens of a prompt chunk.
  std::int64_t chunk_limit() const {
    return config.prefill_chunk > 0 ? config.prefill_chunk : std::int64_t{1} << 40;
  }
  /// Number of last prompt queries that score its rows, for the token policy or the updater.
  int scoring_window() const {
    int window = attention_scores(policies.token_policy).window;
    if constexpr (Rule::adapts && Rows::compresses && !Rules::sketches) {
      const PromptSelection selection = Rule::prompt_selection(policies.updater);
      if (selection.share < 1.0F) window = (std::max)(window, selection.scores.window);
    }
    return window;
  }
  /// The largest magnitude that is stored. NaN and Inf are never stored: in a tail they would reach
  /// later rows.
  float value_limit() const {
    if (!config.check_finite) return max_finite(DType::f32);
    // An 8-bit row reaches kScaledHalf steps, and a step is an f16.
    const float coded =
        config.full_row_bits == 8 ? kScaledHalf * max_finite(DType::f16) : max_finite(DType::f32);
    return (std::min)(max_finite(config.full_type), coded);
  }

  PolicySet policies;
  CacheConfig config;  ///< the given one with defaults filled in
  LayerStateWith<Set> state;
  ::lowrankkv::detail::SequenceTable sequences;  ///< maps the engine's ids to slots
  OpenPrompts prompts;
  CacheStatistics statistics;
};

/// @brief A sequence that a call adds. Unless keep() is called, the destructor removes it again.
template <class Layer>
class AddedSlot : public ::lowrankkv::detail::AddedSequence {
 public:
  AddedSlot(Layer& layer, SequenceId seq) : AddedSequence(layer.sequences, seq), layer_(&layer) {}
  /// A copy of the sequence in slot `source`.
  AddedSlot(Layer& layer, int source, SequenceId seq)
      : AddedSequence(layer.sequences, source, seq), layer_(&layer) {}
  ~AddedSlot() {
    if (layer_ != nullptr) layer_->state.drop(slot());
  }
  void keep() {
    AddedSequence::keep();
    layer_ = nullptr;
  }

 private:
  Layer* layer_;
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
