// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache/calls.hpp  The Cuda backend's tag, and the declarations of what the calls of
/// CompressedKVCache do on it. No kernels: host compilers read it too (cuda.hpp).
///
/// The class documents the calls. They are in groups, and each group is defined in a header of its
/// own and instantiated as a whole:
/// - LayerCalls     cuda/cache/layer_calls.cuh: make a cache; create, fork, erase; count bytes
/// - PromptCalls    cuda/cache/prefill.cuh: prefill, ingest, finish_prompt
/// - StepCalls      cuda/cache/decode_step.cuh: append, attend, attend_partial
/// - ScoreCalls     cuda/cache/scored_step.cuh: attend with attention scores, accumulate
/// - FlushCalls     cuda/cache/flush.cuh: maintain, append_maintained
/// - EditCalls      cuda/cache/token_edits.cuh: truncate, remove, shift_positions
/// - StoredCalls    cuda/cache/stored_rows.cuh: reconstruct, row_states
/// - CertifyCalls   cuda/cache/certified_step.cuh: certify
/// - SaveCalls      cuda/cache/saved_rows.cuh: save, load
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include <cuda_runtime_api.h>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/calls.hpp"
#include "lowrankkv/core/descriptors.hpp"
#include "lowrankkv/core/memory_usage.hpp"
#include "lowrankkv/core/page_allocator.hpp"
#include "lowrankkv/core/partial_attention.hpp"
#include "lowrankkv/core/position_shifts.hpp"
#include "lowrankkv/core/sequence_table.hpp"
#include "lowrankkv/core/statistics.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cuda/runtime/lent_memory.hpp"
#include "lowrankkv/cuda/runtime/page_pool.cuh"
#include "lowrankkv/cuda/token_policy/compose.cuh"
#include "lowrankkv/cuda/token_policy/heavy_hitters.cuh"
#include "lowrankkv/cuda/token_policy/keep_full.cuh"
#include "lowrankkv/cuda/token_policy/residual_outliers.cuh"
#include "lowrankkv/cuda/token_policy/sink_recent.cuh"
#include "lowrankkv/cuda/token_policy/sliding_window.cuh"
#include "lowrankkv/cuda/token_policy/snapkv.cuh"
#include "lowrankkv/fwd.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief One attention layer; cuda/layer/layer.cuh defines it.
template <class Set, class Basis, class Updater, class TokenPolicy, class Quantizer,
          class EpochPolicy>
struct Layer;

/// @brief The policy parameters of a layer type, which need not be complete.
template <class Layer>
struct PoliciesOf;
template <class Set, class Basis, class Updater, class TokenPolicy, class Quantizer,
          class EpochPolicy>
struct PoliciesOf<Layer<Set, Basis, Updater, TokenPolicy, Quantizer, EpochPolicy>> {
  using type = Policies<Basis, Updater, TokenPolicy, Quantizer>;
};

/// @brief Making and destroying a cache, its sequences, and what it counts.
template <class Layer>
struct LayerCalls {
  using PolicySet = typename PoliciesOf<Layer>::type;
  using Configs = std::span<const CacheConfig>;  ///< one for all layers, or one a layer
  using Bases = std::span<const LayerBasis>;

  static Layer* make(const CacheConfig& config, LayerBasis&& basis, const PolicySet& policies,
                     std::shared_ptr<PagePool>&& pool, LentMemory&& workspace);
  static void destroy(Layer* layer);
  static void check(const CacheConfig& config, const LayerBasis& basis, const PolicySet& policies);
  static PoolSize pool_size(Configs configs, Bases bases, const PolicySet& policies);
  static LentMemory make_shared(Configs configs, Bases bases, const PolicySet& policies);
  static std::size_t bytes_of(const LentMemory& shared) { return shared.bytes; }
  static std::size_t workspace_bytes(const CacheConfig& config, const LayerBasis& basis,
                                     const PolicySet& policies);
  static std::size_t workspace_bytes(const Layer& layer);
  static ::lowrankkv::detail::SequenceTable& sequences(Layer& layer);
  static const ::lowrankkv::detail::SequenceTable& sequences(const Layer& layer);
  static const CacheConfig& config(const Layer& layer);
  static const PagePool& pool(const Layer& layer);
  static CacheStatistics statistics(const Layer& layer);
  static std::uint32_t faults(const Layer& layer);

  static void create(Layer& layer, SequenceId seq, cudaStream_t stream);
  static void fork(Layer& layer, SequenceId source, SequenceId target, cudaStream_t stream);
  static void erase(Layer& layer, SequenceId seq, cudaStream_t stream);
  static std::int64_t num_tokens(const Layer& layer, SequenceId seq);
  static int tail_length(const Layer& layer, SequenceId seq);
  static MemoryUsage memory(const Layer& layer, SequenceId seq);
  static MemoryUsage memory(const Layer& layer);
  static int tokens_per_page(const Layer& layer, int kv_head);
  static std::size_t bytes_for(const Layer& layer, std::int64_t tokens);
};

/// @brief Prompts.
template <class Layer>
struct PromptCalls {
  static void prefill(Layer& layer, SequenceId seq, const QueryView& query, const KeyView& key,
                      const ValueView& value, const OutputView& out, const LseView& lse,
                      Prompt prompt, cudaStream_t stream);
  static void ingest(Layer& layer, SequenceId seq, const KeyView& key, const ValueView& value,
                     const QueryView& q_window, Prompt prompt, cudaStream_t stream);
  static void finish_prompt(Layer& layer, SequenceId seq, cudaStream_t stream);
};

/// @brief The calls of a decode step that can be captured.
template <class Layer>
struct StepCalls {
  using Sequences = std::span<const SequenceId>;

  static void append(Layer& layer, Sequences seqs, const KeyView& key, const ValueView& value,
                     cudaStream_t stream);
  static void advance(Layer& layer, Sequences seqs, int m);
  static void check_advance(const Layer& layer, Sequences seqs, int m);
  static void attend(Layer& layer, Sequences seqs, const QueryView& query, const OutputView& out,
                     const LseView& lse, cudaStream_t stream);
  static void append(Layer& layer, const SlotView& slots, const KeyView& key,
                     const ValueView& value, cudaStream_t stream);
  static void attend(Layer& layer, const SlotView& slots, const QueryView& query,
                     const OutputView& out, const LseView& lse, cudaStream_t stream);
  static void attend_partial(Layer& layer, Sequences seqs, const QueryView& query,
                             const StateView& states, QueryTokens tokens, cudaStream_t stream);
};

/// @brief The calls of a decode step that measure attention scores.
template <class Layer>
struct ScoreCalls {
  using Sequences = std::span<const SequenceId>;

  static void attend_scored(Layer& layer, Sequences seqs, const QueryView& query,
                            const OutputView& out, const LseView& lse, const ScoreView& accumulated,
                            cudaStream_t stream);
  static void accumulate(Layer& layer, Sequences seqs, const ScoreView& accumulated,
                         cudaStream_t stream);
};

/// @brief Result of a call that a LayerStack makes in all layers or in none. On this backend the
/// call has done its work already: what has been enqueued cannot be taken back. So the stack holds
/// the pages of all layers before the first call.
struct Enqueued {
  void commit() noexcept {}
};

/// @brief Flushes of tails.
template <class Layer>
struct FlushCalls {
  using Sequences = std::span<const SequenceId>;

  static void maintain(Layer& layer, Sequences seqs, cudaStream_t stream);
  static Enqueued try_maintain(Layer& layer, Sequences seqs, cudaStream_t stream = nullptr) {
    maintain(layer, seqs, stream);
    return {};
  }
  static std::int64_t pages_to_maintain(const Layer& layer, Sequences seqs);
  static void append_maintained(Layer& layer, Sequences seqs, const KeyView& key,
                                const ValueView& value, cudaStream_t stream);
};

/// @brief Changes of a sequence's tokens and positions.
template <class Layer>
struct EditCalls {
  static std::int64_t rollback_limit(const Layer& layer, SequenceId seq);
  static TruncateResult truncate(Layer& layer, SequenceId seq, std::int64_t length,
                                 cudaStream_t stream);
  static void check_truncate(const Layer& layer, SequenceId seq, std::int64_t length);
  static void remove(Layer& layer, SequenceId seq, std::int64_t first, std::int64_t count,
                     cudaStream_t stream);
  static Enqueued try_remove(Layer& layer, SequenceId seq, std::int64_t first, std::int64_t count,
                             cudaStream_t stream = nullptr) {
    remove(layer, seq, first, count, stream);
    return {};
  }
  static std::int64_t pages_to_remove(const Layer& layer, SequenceId seq, std::int64_t first,
                                      std::int64_t count);
  static void shift_positions(Layer& layer, SequenceId seq, std::int64_t first, std::int64_t delta,
                              cudaStream_t stream);
  static Enqueued try_shift(Layer& layer, SequenceId seq, std::int64_t first, std::int64_t delta,
                            cudaStream_t stream = nullptr) {
    shift_positions(layer, seq, first, delta, stream);
    return {};
  }
  static void check_shift(const Layer& layer, SequenceId seq, std::int64_t first,
                          std::int64_t delta);
  static void divide_positions(Layer& layer, SequenceId seq, std::int64_t first, std::int64_t count,
                               std::int64_t divisor, cudaStream_t stream);
  static Enqueued try_divide(Layer& layer, SequenceId seq, std::int64_t first, std::int64_t count,
                             std::int64_t divisor, cudaStream_t stream = nullptr) {
    divide_positions(layer, seq, first, count, divisor, stream);
    return {};
  }
  static void check_division(const Layer& layer, SequenceId seq, std::int64_t first,
                             std::int64_t count, std::int64_t divisor);
  static const PositionShifts& position_shifts(const Layer& layer, SequenceId seq);
};

/// @brief Stored rows, read back.
template <class Layer>
struct StoredCalls {
  static void reconstruct(const Layer& layer, SequenceId seq, std::int64_t first,
                          const KeyTargetView& key, const ValueTargetView& value,
                          cudaStream_t stream);
  static void row_states(const Layer& layer, SequenceId seq, int kv_head, std::int64_t first,
                         std::span<RowState> states, cudaStream_t stream);
};

/// @brief Bounds on what compression changed.
template <class Layer>
struct CertifyCalls {
  static void certify(Layer& layer, std::span<const SequenceId> seqs, const QueryView& query,
                      const LseView& lse, const CertificateView& out, const Certificate& allowed,
                      std::uint32_t* exceeding, cudaStream_t stream);
};

/// @brief Sequences as bytes.
template <class Layer>
struct SaveCalls {
  static std::size_t save_bytes(const Layer& layer, SequenceId seq);
  static std::size_t save(const Layer& layer, SequenceId seq, std::span<std::byte> buffer,
                          cudaStream_t stream);
  static void load(Layer& layer, SequenceId seq, std::span<const std::byte> saved,
                   cudaStream_t stream);
};

/// @brief The calls of a cache, over its layer. A call's checks come before it changes anything.
template <class Layer>
struct Calls : LayerCalls<Layer>,
               PromptCalls<Layer>,
               StepCalls<Layer>,
               ScoreCalls<Layer>,
               FlushCalls<Layer>,
               EditCalls<Layer>,
               StoredCalls<Layer>,
               CertifyCalls<Layer>,
               SaveCalls<Layer> {};

/// @brief LayerRules (cuda/layer/layer_rules.cuh) names what is wrong with a policy.
struct NoDiagnosis {};

}  // namespace cuda

/// @brief Backend tag: everything is in device memory. Calls enqueue work on the caller's stream
/// and return.
/// @tparam Set  the kernels that are compiled. Cuda has all of them; policies are Impl<Policy,
/// Cuda> whatever the set
template <class Set>
struct CudaWith {
  using Pool = cuda::PagePool;
  using Shared = cuda::LentMemory;  ///< the workspace that the layers of a model share
  using Stream = cudaStream_t;
  static constexpr bool has_streams = true;
  template <class Basis, class Updater, class TokenPolicy, class Quantizer>
  using Diagnosis = cuda::NoDiagnosis;
  template <class Basis, class Updater, class TokenPolicy, class Quantizer, class EpochPolicy>
  using Layer = cuda::Layer<Set, Basis, Updater, TokenPolicy, Quantizer, EpochPolicy>;
  template <class Layer>
  using Calls = cuda::Calls<Layer>;
  /// Whether rows accumulate the attention that they receive, for the token policy.
  template <class TokenPolicy>
  static constexpr bool accumulates_scores = cuda::TokenRules<TokenPolicy>::accumulates_scores;
};

LOWRANKKV_NAMESPACE_END
