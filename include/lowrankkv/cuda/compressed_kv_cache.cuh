// SPDX-License-Identifier: Apache-2.0
/// @file cuda/compressed_kv_cache.cuh  CompressedKVCache on NVIDIA GPUs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lowrankkv/core/calls.hpp"
#include "lowrankkv/core/engine_pages.hpp"
#include "lowrankkv/core/memory_usage.hpp"
#include "lowrankkv/cuda/attention/merge_states.cuh"
#include "lowrankkv/cuda/backend.cuh"
#include "lowrankkv/cuda/cache/cache_base.cuh"
#include "lowrankkv/cuda/cache/checks.cuh"
#include "lowrankkv/cuda/cache/decode_step.cuh"
#include "lowrankkv/cuda/cache/prefill.cuh"
#include "lowrankkv/cuda/cache/reconstruct_waiting.cuh"
#include "lowrankkv/cuda/cache/token_edits.cuh"
#include "lowrankkv/cuda/compress/compress.cuh"
#include "lowrankkv/cuda/decode/certify.cuh"
#include "lowrankkv/cuda/decode/reconstruct.cuh"
#include "lowrankkv/cuda/layer/layer_memory.cuh"
#include "lowrankkv/cuda/layer/row_states.cuh"
#include "lowrankkv/cuda/sequence/fork.cuh"
#include "lowrankkv/cuda/sequence/saved_state.cuh"
#include "lowrankkv/fwd.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief The KV cache of one attention layer in device memory.
///
/// Views point to device memory. Every call enqueues its work on the given stream and returns; a
/// call that waits says so. append(), attend(), attend_partial() and accumulate() allocate nothing,
/// wait for nothing and can be captured in a CUDA graph. Every other call that takes a stream
/// raises StateError during capture.
///
/// A captured append() advances the device's lengths at every replay. The host's lengths advance by
/// advance(), which must be called before each replay. A graph is valid until one of its sequences
/// is erased.
///
/// The policies are those of cuda/backend.cuh. One thread calls a cache at a time. Its calls are on
/// one stream, or on streams that wait for each other.
///
/// A row is stored as zeros and counted in faults() if it is not finite, or, with
/// config.check_finite, if its stored type cannot hold it. append() zeroes the token's rows in all
/// heads; prefill() and ingest() zero the row of that head only.
template <class Set, class Basis, class Updater, class TokenPolicy, class Quantizer,
          class EpochPolicy>
class CompressedKVCache<CudaWith<Set>, Basis, Updater, TokenPolicy, Quantizer, EpochPolicy>
    : cuda::CacheBase<Set, Basis, Updater, TokenPolicy, Quantizer, EpochPolicy> {
  using Base = cuda::CacheBase<Set, Basis, Updater, TokenPolicy, Quantizer, EpochPolicy>;
  using Base::layer_;
  using typename Base::Layer;

 public:
  using typename Base::PolicySet;
  using Pool = cuda::PagePool;
  using Shared = cuda::LentMemory;  ///< the workspace that the layers of a model share
  // Documented in cuda/cache/cache_base.cuh.
  using Base::bytes_of;
  using Base::check_divide_positions;
  using Base::check_limit;
  using Base::check_shift_positions;
  using Base::check_truncate;
  using Base::divide_positions;
  using Base::limit;
  using Base::make_shared;
  using Base::max_tokens;
  using Base::num_pages;
  using Base::page_bytes;
  using Base::pages_to_remove;
  using Base::pool_size;
  using Base::position;
  using Base::position_shifts;
  using Base::remove;
  using Base::rollback_limit;
  using Base::shift_positions;
  using Base::truncate;

  /// @brief Makes an empty cache. Allocates on the device.
  /// @param basis  the calibrated maps; may be empty if the token policy compresses nothing
  /// @param pool  pages shared with other layers; null: a pool of its own of config.num_pages pages
  /// of config.page_bytes bytes
  /// @param workspace  device memory of workspace_bytes() bytes for attend(). It must outlive the
  /// cache. Layers whose calls run one after the other can share it. Null: the cache allocates it
  /// @throws ShapeError, ValueError, CapacityError naming both values; DeviceError
  explicit CompressedKVCache(const CacheConfig& config, const LayerBasis& basis = {},
                             const PolicySet& policies = {}, std::shared_ptr<Pool> pool = nullptr,
                             const cuda::LentMemory& workspace = {})
      : Base(config, basis, policies, std::move(pool), workspace) {}

  /// @brief Bytes of the workspace that attend() needs, for a caller that lends it.
  ///
  /// Joint values with pre-RoPE keys need logits in it: 4 bytes per query column and row of the
  /// compressed lists of all sequences, for as many chunks of columns as 64 MiB hold, and for one
  /// chunk at least (cuda/state/workspace.cuh).
  static std::size_t workspace_bytes(const CacheConfig& config, const LayerBasis& basis,
                                     const PolicySet& policies) {
    return Layer::decode_bytes(Layer::checked(config, basis, policies, nullptr), basis, policies);
  }

  /// @brief Starts an empty sequence.
  /// @throws SequenceError if it exists, CapacityError beyond max_sequences
  void create(SequenceId seq, cudaStream_t stream = nullptr) {
    cuda::refuse_capture("create", stream);
    layer_.state.clear(layer_.sequences.add(seq), stream);
  }
  /// @brief Starts `target` as a copy of `source`. The two share pages until one of them writes to
  /// a page (copy on write). The tail, the tables and the sequence's own epochs are copied.
  /// @throws SequenceError if target exists, CapacityError beyond max_sequences
  void fork(SequenceId source, SequenceId target, cudaStream_t stream = nullptr) {
    cuda::refuse_capture("fork", stream);
    const int from = cuda::idle_slot(layer_, source);
    cuda::fork_sequence(layer_.state, from, layer_.sequences.add_copy(from, target), stream);
  }
  /// @brief Whether the sequence exists: made by create(), fork() or load(), and not erased.
  bool contains(SequenceId seq) const { return layer_.sequences.contains(seq); }
  /// @brief Tokens of a sequence, staged rows of an unfinished prompt chunk included.
  std::int64_t num_tokens(SequenceId seq) const {
    return layer_.tokens_of(layer_.sequences.find(seq));
  }
  /// @brief Tokens in the tail of the sequence.
  int tail_length(SequenceId seq) const {
    return layer_.state.sequence(layer_.sequences.find(seq)).tail_length;
  }
  /// @brief Ends a sequence, even one with an unfinished prompt, and frees its pages. Work that is
  /// enqueued later may use them.
  void erase(SequenceId seq, cudaStream_t stream = nullptr) {
    cuda::refuse_capture("erase", stream);
    const int slot = layer_.sequences.find(seq);
    layer_.prompts.end(slot);
    layer_.state.clear(slot, stream);
    layer_.sequences.remove(seq);
  }

  /// @brief Attends to a prompt exactly, then stores it.
  ///
  /// out = causal softmax attention of `query` over the stored rows, the earlier rows of its chunk
  /// and its own row. Rows of the prompt are rounded to full_type. With HeavyHitters, rows
  /// accumulate the attention that they receive from these queries.
  ///
  /// With config.prefill_chunk = C > 0 the prompt is processed in chunks of C tokens, however the
  /// calls divide it. A chunk attends to its own rows exactly and to earlier chunks in their stored
  /// form. With C = 0 the whole prompt is one chunk. The rows of a chunk that comes in several
  /// calls are staged at full_type and packed again in each call.
  ///
  /// Not capturable. Buffers grow to the longest chunk so far, and growing waits for the device.
  /// The end of a chunk reads row counts back and waits for the stream where ResidualOutliers
  /// - has a threshold;
  /// - is combined with HeavyHitters;
  /// - is combined with SnapKV under FrequentDirections.
  /// @param query, out [n, num_qo_heads, head_dim]
  /// @param key, value [n, num_kv_heads, head_dim]
  /// @param lse [n, num_qo_heads], natural log, optional
  /// @param prompt  Prompt::continues: a later call brings more of this prompt. Until it is
  /// complete, append, attend, accumulate, maintain, truncate, remove, fork, save, shift_positions
  /// and divide_positions are refused
  /// @throws as ingest()
  void prefill(SequenceId seq, const QueryView& query, const KeyView& key, const ValueView& value,
               const OutputView& out, const LseView& lse, Prompt prompt,
               cudaStream_t stream = nullptr) {
    cuda::refuse_capture("prefill", stream);
    const int slot = cuda::check_prompt(layer_, seq, key, value);
    cuda::check_queries(layer_, query, out, lse, key.num_tokens);
    const cuda::DeviceOutput target{out.data, out.token_stride, out.head_stride, lse.data,
                                    lse.token_stride};
    cuda::take_prompt(layer_, slot, {key, value, query, target, true}, prompt, stream);
  }
  void prefill(SequenceId seq, const QueryView& query, const KeyView& key, const ValueView& value,
               const OutputView& out, const LseView& lse = {}, cudaStream_t stream = nullptr) {
    prefill(seq, query, key, value, out, lse, Prompt::complete, stream);
  }

  /// @brief Stores a prompt that the engine attended to itself. All but the last `recent` rows
  /// leave full rank, as the token policy says. Chunks, allocations and waits are those of
  /// prefill().
  /// @param key, value [n, num_kv_heads, head_dim]
  /// @param q_window  queries of the last tokens, [w, num_qo_heads, head_dim]. Needed by updaters
  /// and token policies that choose prompt rows by score: SnapKV needs its window, or all n tokens
  /// if a chunk ends inside the call. HeavyHitters needs all n tokens, and they are attended to
  /// @throws CapacityError beyond max_tokens or if the pool lacks the pages, ShapeError
  void ingest(SequenceId seq, const KeyView& key, const ValueView& value, const QueryView& q_window,
              Prompt prompt, cudaStream_t stream = nullptr) {
    cuda::refuse_capture("ingest", stream);
    const int slot = cuda::check_prompt(layer_, seq, key, value);
    cuda::check_query_window(layer_, slot, q_window, key.num_tokens);
    constexpr bool attends = Layer::Rows::accumulates_scores;  // needs normalised weights
    cuda::take_prompt(layer_, slot, {key, value, q_window, {}, attends}, prompt, stream);
  }
  /// @brief Stores a complete prompt.
  void ingest(SequenceId seq, const KeyView& key, const ValueView& value,
              const QueryView& q_window = {}, cudaStream_t stream = nullptr) {
    ingest(seq, key, value, q_window, Prompt::complete, stream);
  }
  /// @brief Stores a complete prompt whose queries no policy needs.
  void ingest(SequenceId seq, const KeyView& key, const ValueView& value, cudaStream_t stream) {
    ingest(seq, key, value, {}, stream);
  }
  /// @brief Completes a prompt whose last part came with Prompt::continues: stores its staged rows
  /// as the last chunk. Waits for row counts where prefill() does.
  /// @throws CapacityError if other sequences have taken the pages since
  void finish_prompt(SequenceId seq, cudaStream_t stream = nullptr) {
    cuda::refuse_capture("finish_prompt", stream);
    const int slot = layer_.sequences.find(seq);
    cuda::check_prompt_pages(layer_, slot, layer_.prompts.of(slot).rows());
    cuda::finish_prompt(layer_, slot, stream);
  }

  /// @brief Adds m tokens to the tail of each sequence. Rows [i m, (i + 1) m) belong to seqs[i].
  /// Capturable.
  /// @throws CapacityError if a tail or max_tokens would be exceeded (call maintain() between
  /// steps)
  void append(std::span<const SequenceId> seqs, const KeyView& key, const ValueView& value,
              cudaStream_t stream = nullptr) {
    const int m = cuda::check_tokens(layer_, seqs, key, value);
    const bool replayed = cuda::capturing(stream);
    if (!replayed) check_advance(seqs, m);
    cuda::for_each_batch(layer_, seqs, [&](const cuda::Batch& batch, std::int64_t first) {
      cuda::enqueue_append(layer_, batch, key, value, first * m, m, stream);
    });
    if (!replayed) cuda::advance_host(layer_, seqs, m);
  }
  /// @brief append() to one sequence.
  void append(SequenceId seq, const KeyView& key, const ValueView& value,
              cudaStream_t stream = nullptr) {
    append(std::span(&seq, 1), key, value, stream);
  }
  /// @brief Advances the host's lengths before a replay of a captured append() of m tokens per
  /// sequence.
  /// @throws as append()
  void advance(std::span<const SequenceId> seqs, int m) {
    check_advance(seqs, m);
    cuda::advance_host(layer_, seqs, m);
  }
  /// @brief Raises what advance() would raise for these arguments.
  void check_advance(std::span<const SequenceId> seqs, int m) const {
    cuda::check_advance(layer_, seqs, m, config().tail_capacity);
  }

  /// @brief Flushes every tail longer than recent + T rows, T = config.flush_interval rows at a
  /// time.
  ///
  /// Cost: a few launches for the whole batch, one more per sequence that needs pages. With
  /// config.keep_residuals, some more per sequence, and some per 2048 rows that are or could be
  /// re-projected to another epoch. Waits for nothing, except for row counts where ResidualOutliers
  /// has a threshold or is combined with HeavyHitters. Allocates nothing, with one exception: the
  /// first flush after load() of a sequence of HeavyHitters that was truncated before it was saved
  /// may allocate, which waits.
  void maintain(std::span<const SequenceId> seqs, cudaStream_t stream = nullptr) {
    cuda::refuse_capture("maintain", stream);
    cuda::flush(layer_, cuda::idle_slots(layer_, seqs), stream);
  }
  /// @brief maintain() of one sequence.
  void maintain(SequenceId seq, cudaStream_t stream = nullptr) {
    maintain(std::span(&seq, 1), stream);
  }
  /// @brief Upper bound of the pages that maintain(seqs) takes.
  std::int64_t pages_to_maintain(std::span<const SequenceId> seqs) const {
    return cuda::pages_to_flush(layer_, cuda::idle_slots(layer_, seqs), 0);
  }

  /// @brief append() of any number of tokens, with maintain() before, whenever a tail is full, and
  /// at the end. Not capturable.
  /// @throws as append(), CapacityError if the pool lacks the pages for all of it
  void append_maintained(std::span<const SequenceId> seqs, const KeyView& key,
                         const ValueView& value, cudaStream_t stream = nullptr) {
    cuda::refuse_capture("append_maintained", stream);
    const int m = cuda::check_tokens(layer_, seqs, key, value);
    cuda::check_advance(layer_, seqs, m, std::int64_t{1} << 40);
    layer_.state.pool().allocator().require(
        cuda::pages_to_flush(layer_, cuda::idle_slots(layer_, seqs), m));
    maintain(seqs, stream);
    if (std::all_of(seqs.begin(), seqs.end(), [&](SequenceId seq) {
          return m <= config().tail_capacity - tail_length(seq);
        })) {
      append(seqs, key, value, stream);
    } else {
      for (std::size_t i = 0; i < seqs.size(); ++i) {
        for (int done = 0; done < m;) {
          const int count = (std::min)(config().tail_capacity - tail_length(seqs[i]), m - done);
          const std::int64_t first = static_cast<std::int64_t>(i) * m + done;
          append(seqs[i], key.tokens(first, count), value.tokens(first, count), stream);
          maintain(seqs[i], stream);
          done += count;
        }
      }
    }
    maintain(seqs, stream);
  }
  /// @brief append_maintained() to one sequence.
  void append_maintained(SequenceId seq, const KeyView& key, const ValueView& value,
                         cudaStream_t stream = nullptr) {
    append_maintained(std::span(&seq, 1), key, value, stream);
  }

  /// @brief Attention of the last m appended tokens of each sequence, causal among those m.
  /// Capturable; changes nothing.
  ///
  /// out = softmax(scale q [K; decode(C_k)]^T) [V; decode(C_v)], summed in f32. Deterministic: the
  /// bits do not depend on the batch.
  /// @param query [seqs.size() * m, num_qo_heads, head_dim]
  /// @param out the same shape, f32
  /// @param lse [seqs.size() * m, num_qo_heads], natural log, optional
  /// @throws ShapeError if m exceeds a tail or config.max_query_tokens
  void attend(std::span<const SequenceId> seqs, const QueryView& query, const OutputView& out,
              const LseView& lse = {}, cudaStream_t stream = nullptr) {
    cuda::check_queries(layer_, query, out, lse, query.num_tokens);
    const cuda::DeviceOutput target{out.data, out.token_stride, out.head_stride, lse.data,
                                    lse.token_stride};
    cuda::attend_sequences<false>(layer_, seqs, query, target, cuda::QueryTokens::own, stream);
  }
  /// @brief attend() for one sequence.
  void attend(SequenceId seq, const QueryView& query, const OutputView& out,
              const LseView& lse = {}, cudaStream_t stream = nullptr) {
    attend(std::span(&seq, 1), query, out, lse, stream);
  }

  /// @brief attend() that also writes the attention which every position received from these
  /// queries, summed over the queries and over the query heads of a group. accumulate() takes it
  /// for HeavyHitters.
  ///
  /// Dropped positions get 0. Cost: reads the keys once more; with pre-RoPE keys, as much again as
  /// attention. Capturable; changes nothing.
  /// @param accumulated  [seqs.size(), num_kv_heads, positions]. Every element is written. There
  /// are at least as many positions as the longest sequence has tokens, during capture max_tokens.
  /// Empty: not written
  /// @throws as attend(), ShapeError
  void attend(std::span<const SequenceId> seqs, const QueryView& query, const OutputView& out,
              const LseView& lse, const ScoreView& accumulated, cudaStream_t stream = nullptr) {
    cuda::check_queries(layer_, query, out, lse, query.num_tokens);
    cuda::DeviceOutput target{out.data, out.token_stride, out.head_stride, lse.data,
                              lse.token_stride};
    if (accumulated.data != nullptr && lse.data == nullptr) {
      target.lse = layer_.state.workspace().step_lse();
      target.lse_stride = config().shape.num_qo_heads;
    }
    cuda::attend_sequences<true>(layer_, seqs, query, target, cuda::QueryTokens::own, stream,
                                 accumulated);
  }
  void attend(SequenceId seq, const QueryView& query, const OutputView& out, const LseView& lse,
              const ScoreView& accumulated, cudaStream_t stream = nullptr) {
    attend(std::span(&seq, 1), query, out, lse, accumulated, stream);
  }

  /// @brief Adds the attention that attend() measured to the accumulated scores of the sequences'
  /// rows, by which HeavyHitters evicts.
  ///
  /// Call it before maintain(), which may drop rows. Capturable. A value for a stored row that is
  /// not in [0, 1e30] adds nothing and is counted in faults().
  /// @param accumulated  as attend() wrote it; empty: nothing is added
  /// @throws ShapeError, SequenceError if a sequence is named twice
  void accumulate(std::span<const SequenceId> seqs, const ScoreView& accumulated,
                  cudaStream_t stream = nullptr) requires(Layer::Rows::accumulates_scores) {
    cuda::accumulate_scores(layer_, seqs, accumulated, stream);
  }
  void accumulate(SequenceId seq, const ScoreView& accumulated,
                  cudaStream_t stream = nullptr) requires(Layer::Rows::accumulates_scores) {
    accumulate(std::span(&seq, 1), accumulated, stream);
  }

  /// @brief attend() over a part of each sequence, for caches that divide a sequence's tokens among
  /// them. Writes unnormalised states, which cuda::merge_states() merges to outputs. Capturable;
  /// changes nothing.
  /// @param query  [seqs.size() * m, num_qo_heads, head_dim]
  /// @param states  the same tokens, num_qo_heads heads
  /// @param tokens  own: the queries are those of the last m tokens of the tail, causal among them.
  /// elsewhere: the queries stand behind all rows that are stored here, and see all of them.
  /// Positions of pre-RoPE keys count from this cache's first token, so queries must be rotated
  /// back by the position of that token
  /// @throws as attend()
  void attend_partial(std::span<const SequenceId> seqs, const QueryView& query,
                      const cuda::StateView& states, cuda::QueryTokens tokens,
                      cudaStream_t stream = nullptr) {
    const OutputView out{states.values, states.num_tokens, states.num_heads, states.head_dim};
    const LseView lse{states.maximum, states.num_tokens, states.num_heads};
    cuda::check_queries(layer_, query, out, lse, query.num_tokens);
    if (states.maximum == nullptr || states.sum == nullptr) {
      detail::fail<ShapeError>("states: maximum or sum is null, memory for ", states.num_tokens,
                               " x ", states.num_heads, " numbers expected");
    }
    const std::int64_t token_stride = std::int64_t{states.num_heads} * states.head_dim;
    const cuda::DeviceOutput target{states.values,  token_stride,     states.head_dim,
                                    states.maximum, states.num_heads, states.sum};
    cuda::attend_sequences<false>(layer_, seqs, query, target, tokens, stream);
  }

  /// @brief Upper bounds on what compression changed for the last m appended tokens of each
  /// sequence: in logits, in softmax weights and in outputs (diagnostics/certificate.hpp).
  ///
  /// The reference is attention over the same tokens at full rank, rounded to full_type as they
  /// arrived. Dropped tokens are not covered. A query or an lse that is not finite has no bound.
  /// Needs config.keep_residuals.
  ///
  /// Cost: a reconstruction of the keys and their logits once more; a few launches per sequence and
  /// per 2048 rows. May allocate scratch memory, which waits; waits for nothing else. Not
  /// capturable.
  /// @param query, lse  as given to attend(), and as attend() wrote it
  /// @param out [seqs.size() * m, num_qo_heads], device memory
  /// @param allowed  the largest allowed value of each bound
  /// @param exceeding  device memory: the number of elements of `out` that exceed `allowed` in some
  /// bound is added to it; null: not counted
  /// @throws StateError without config.keep_residuals, ShapeError as attend()
  void certify(std::span<const SequenceId> seqs, const QueryView& query, const LseView& lse,
               const CertificateView& out, const Certificate& allowed = kUnboundedCertificate,
               std::uint32_t* exceeding = nullptr, cudaStream_t stream = nullptr) {
    cuda::refuse_capture("certify", stream);
    const int m = cuda::check_certify(layer_, seqs, query, lse, out);
    for (std::size_t i = 0; i < seqs.size(); ++i) {
      const std::int64_t first = static_cast<std::int64_t>(i) * m;
      const cuda::WeightQueries queries =
          cuda::weight_queries(layer_.state, query, lse.data, lse.token_stride, m, first);
      const int slot = layer_.sequences.find(seqs[i]);
      cuda::certify_sequence<Layer::coded_groups>(layer_.state, slot, queries, out, allowed,
                                                  exceeding, stream);
    }
  }
  void certify(SequenceId seq, const QueryView& query, const LseView& lse,
               const CertificateView& out, const Certificate& allowed = kUnboundedCertificate,
               std::uint32_t* exceeding = nullptr, cudaStream_t stream = nullptr) {
    certify(std::span(&seq, 1), query, lse, out, allowed, exceeding, stream);
  }
  /// @brief Writes the stored K and V of tokens [first, first + key.num_tokens).
  ///
  /// Full rows are written as stored, compressed rows decoded, dropped rows as zeros. Staged rows
  /// of an unfinished prompt are rounded to full_type. Cost: reads the stored rows once, writes the
  /// rows once; 2 x channels x head_dim products per row.
  /// @param key, value [count, num_kv_heads, head_dim], f32, f16 or bf16; elements are rounded to
  /// that type
  /// @throws ShapeError
  void reconstruct(SequenceId seq, std::int64_t first, const KeyTargetView& key,
                   const ValueTargetView& value, cudaStream_t stream = nullptr) const {
    cuda::refuse_capture("reconstruct", stream);
    const CacheShape& shape = config().shape;
    const int slot = layer_.sequences.find(seq);
    detail::check_rows("key", key, key.num_tokens, shape.num_kv_heads, shape.head_dim);
    detail::check_rows("value", value, key.num_tokens, shape.num_kv_heads, shape.head_dim);
    const std::int64_t tokens = num_tokens(seq), count = key.num_tokens;
    if (first < 0 || first > tokens || count > tokens - first) {
      detail::fail<ShapeError>("reconstruct: ", count, " tokens from position ", first,
                               ", sequence has ", tokens, " tokens");
    }
    const std::int64_t in_lists = layer_.state.sequence(slot).num_tokens;
    const std::int64_t stored = (std::clamp)(in_lists - first, std::int64_t{0}, count);
    const cuda::DeviceTarget keys = cuda::device_target(key), values = cuda::device_target(value);
    if (stored > 0) {
      const cuda::TokenRange range = cuda::token_range(layer_.state, slot, first, stored);
      cuda::reconstruct_rows<Layer::coded_groups, Layer::joins>(
          layer_.state, slot, range, Layer::Rows::drops, keys, values, stream);
    }
    if (count > stored) {
      const cuda::OpenPrompt& waiting = layer_.prompts.of(slot);
      cuda::reconstruct_waiting(config(), waiting, first + stored - in_lists, stored,
                                count - stored, keys, values, stream);
    }
  }

  /// @brief States of positions [first, first + states.size()) of one KV head. Rows of the tail and
  /// staged rows of an unfinished prompt are full. Waits for the stream.
  /// @throws ShapeError beyond the heads or the sequence
  void row_states(SequenceId seq, int kv_head, std::int64_t first, std::span<RowState> states,
                  cudaStream_t stream = nullptr) const {
    cuda::refuse_capture("row_states", stream);
    cuda::read_row_states(layer_.state, layer_.sequences.find(seq), num_tokens(seq), kv_head, first,
                          states, stream);
  }

  /// @brief Number of rows that were refused since the cache was made. Waits for the device.
  std::uint32_t faults() const {
    std::uint32_t count = 0;
    cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    cuda::check(
        cudaMemcpy(&count, layer_.state.tables().faults, sizeof(count), cudaMemcpyDeviceToHost),
        "cudaMemcpy");
    return count;
  }

  /// @brief Bytes that save() writes for a sequence.
  std::size_t save_bytes(SequenceId seq) const {
    return cuda::save_sequence(layer_.state, cuda::idle_slot(layer_, seq), {}, true, nullptr);
  }
  /// @brief Writes a sequence to the caller's host memory. A loaded sequence continues bit for bit
  /// as the original.
  ///
  /// The format is versioned, checksummed and independent of the page size; it is this backend's
  /// own. It contains the sequence's own epochs, and the calibrated maps as a fingerprint. Waits
  /// for the stream. May allocate scratch memory.
  /// @return bytes written
  /// @throws CapacityError if the buffer is smaller than save_bytes()
  std::size_t save(SequenceId seq, std::span<std::byte> buffer,
                   cudaStream_t stream = nullptr) const {
    cuda::refuse_capture("save", stream);
    return cuda::save_sequence(layer_.state, cuda::idle_slot(layer_, seq), buffer, false, stream);
  }
  /// @brief Starts sequence `seq` from what save() wrote. This cache must have the same shape,
  /// types, maps, policies and tail capacity; max_tokens, pages and other sequences may differ.
  /// Waits for the stream. May allocate scratch memory.
  /// @throws FormatError if the bytes are damaged, ShapeError if they belong to another layer,
  /// CapacityError if they do not fit
  void load(SequenceId seq, std::span<const std::byte> saved, cudaStream_t stream = nullptr) {
    cuda::refuse_capture("load", stream);
    const cuda::SavedSequence sequence = cuda::read_sequence(layer_.state, saved);
    cuda::check_saved_rows(layer_, sequence.rows,
                           sequence.counts.num_tokens - sequence.counts.tail_length);
    // What may fail comes before the sequence exists.
    layer_.state.pool().scratch(sequence.block.size());
    cuda::load_sequence(layer_.state, layer_.sequences.add(seq), sequence, stream);
  }

  /// @brief Bytes of one sequence. Pages shared with forks are counted in full. Coefficient bytes
  /// include the padding of codes to whole units. Waits for the device if epochs are
  /// device-managed.
  MemoryUsage memory(SequenceId seq) const {
    const int slot = layer_.sequences.find(seq);
    return cuda::sequence_memory(layer_.state, slot, Layer::listed(),
                                 layer_.prompts.of(slot).bytes());
  }
  /// @brief Bytes of all sequences, of their shared maps, and of reserved memory.
  MemoryUsage memory() const {
    MemoryUsage usage;
    layer_.sequences.for_each([&](SequenceId seq, int) { usage += memory(seq); });
    usage.shared_bytes = layer_.state.shared_map_bytes();
    const std::size_t in_use = usage.pending_bytes + usage.tail_bytes + usage.epoch_bytes +
                               usage.updater_bytes + usage.residual_bytes;
    usage.reserved_bytes =
        layer_.state.reserved_bytes() + layer_.prompts.bytes() - in_use + pool().idle_bytes();
    return usage;
  }
  /// @brief Bytes of attend()'s workspace, owned or lent. It is sized for max_sequences and
  /// max_query_tokens.
  std::size_t workspace_bytes() const { return layer_.state.workspace().decode_bytes(); }
  /// @brief Event counts since the cache was made. Rejected updates are not counted. Waits for the
  /// device if epochs are device-managed.
  CacheStatistics statistics() const {
    CacheStatistics all = layer_.statistics;
    if constexpr (Layer::device_epochs) cuda::count_device_epochs(layer_.state, all);
    return all;
  }
  /// @brief Tokens that fit in a page of this KV head's compressed list (with joint values: of its
  /// keys), or of its full list if the token policy compresses nothing.
  int tokens_per_page(int kv_head) const { return cuda::tokens_per_page(layer_.state, kv_head); }
  /// @brief Bytes of the pages that `tokens` tokens take over all KV heads after they have left the
  /// tail: compressed, or full if the token policy compresses nothing.
  std::size_t bytes_for(std::int64_t tokens) const { return cuda::bytes_for(layer_.state, tokens); }
  /// @brief Sequences that can still be created.
  int num_free_sequences() const { return layer_.sequences.num_free(); }
  /// @brief The given configuration with defaults filled in.
  const CacheConfig& config() const { return layer_.config; }
  /// @brief The page pool, which layers may share.
  const Pool& pool() const { return layer_.state.pool(); }
};

LOWRANKKV_NAMESPACE_END
