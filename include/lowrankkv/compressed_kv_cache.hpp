// SPDX-License-Identifier: Apache-2.0
/// @file compressed_kv_cache.hpp  CompressedKVCache: the KV cache of one attention layer, for many
/// sequences, on any backend.
///
/// The class says what the calls do; Backend::Calls does it (cpu/cache/calls.hpp,
/// cuda/cache/calls.hpp). Include the backend: lowrankkv.hpp or presets.hpp for the CPU;
/// cuda/presets.cuh for CUDA sources; cuda.hpp where kernels are compiled elsewhere.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/calls.hpp"
#include "lowrankkv/core/descriptors.hpp"
#include "lowrankkv/core/engine_pages.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/memory_usage.hpp"
#include "lowrankkv/core/page_allocator.hpp"
#include "lowrankkv/core/partial_attention.hpp"
#include "lowrankkv/core/position_shifts.hpp"
#include "lowrankkv/core/sequence_table.hpp"
#include "lowrankkv/core/statistics.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/fwd.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief The KV cache of one attention layer: sinks and tail at full rank, and compressed rows
/// that attention reads without decoding them.
///
/// A row is (sequence, KV head, token). It enters the tail at full rank. When the tail is flushed,
/// the token policy decides whether the row stays full, is dropped, or is projected to coefficients
/// by the current epoch's maps. attend() is softmax attention over [full rows,
/// decode(coefficients), tail], computed without decoding.
///
/// **On the CPU** views point to host memory, a call returns when its work is done, and the stream
/// argument is empty. The work runs on the cache's threads.
///
/// **On a GPU** views point to device memory, and a call enqueues its work on the given stream and
/// returns; a call that waits says so. append(), attend(), attend_partial() and accumulate()
/// allocate nothing, wait for nothing and can be captured in a CUDA graph. Every other call that
/// takes a stream raises StateError during capture. A captured append() advances the device's
/// lengths at every replay; the host's advance by advance(), before each replay. A graph is valid
/// until one of its sequences is erased. Calls are on one stream, or on streams that wait for each
/// other. docs/embedding.md has a table of all calls.
///
/// A cache belongs to the device that is current when it is made. Its calls make that device
/// current while they run, and then the one before. A stream of another device raises ValueError,
/// where the runtime tells: from CUDA 12.8, not during capture.
///
/// A row is refused if it is not finite, or, with config.check_finite, if its stored type cannot
/// hold it. The CPU raises ValueError before anything changes. A GPU stores zeros and counts it in
/// faults(): append() zeroes the token's rows in all heads, prefill() and ingest() the row of that
/// head only.
///
/// Not thread-safe: one thread calls a cache at a time.
///
/// After any error the cache is as it was, whatever threw: the library, memory, a page source or a
/// policy. On a GPU with one exception: if the host runs out of memory, or the CUDA runtime reports
/// an error, after work has been enqueued, then the sequences of that call are unusable. Every call
/// on them but erase() raises StateError.
///
/// @tparam Backend  Cpu, Cuda or CudaWith<a kernel set>
/// @tparam EpochPolicy  how many epochs a sequence keeps
template <class Backend, class Basis, class Updater, class TokenPolicy, class Quantizer,
          class EpochPolicy>
class CompressedKVCache : Backend::template Diagnosis<Basis, Updater, TokenPolicy, Quantizer> {
  static constexpr bool has_streams = Backend::has_streams;
  static constexpr bool accumulates_scores = Backend::template accumulates_scores<TokenPolicy>;

 public:
  /// @brief The cache's state on the backend.
  using Layer =
      typename Backend::template Layer<Basis, Updater, TokenPolicy, Quantizer, EpochPolicy>;
  using Calls = typename Backend::template Calls<Layer>;               ///< what the calls do
  using PolicySet = Policies<Basis, Updater, TokenPolicy, Quantizer>;  ///< policy parameters
  using Pool = typename Backend::Pool;                                 ///< owner of the pages
  /// @brief A cudaStream_t (the default stream if not given), or on the CPU an empty struct.
  using Stream = typename Backend::Stream;
  /// @brief What the layers of a model share besides pages: threads (CPU), or the workspace of
  /// attend() (GPU).
  using Shared = typename Backend::Shared;

  /// @brief Makes an empty cache. On a GPU it allocates.
  /// @param basis    the calibrated maps, one HeadBasis per KV head; empty if the basis
  /// policy makes its own (Identity); may be empty if the token policy compresses nothing
  /// @param pool     pages shared with other layers; null: the cache makes its own pool of
  /// config.num_pages pages of config.page_bytes bytes (0: as many, and as large, as it can need)
  /// @param shared   CPU: threads, shared with other layers and the engine. GPU: device memory of
  /// workspace_bytes() bytes, which outlives the cache; layers whose calls run one after the other
  /// can share it. Null: the cache makes its own
  /// @throws ShapeError, ValueError, CapacityError naming both values; DeviceError
  explicit CompressedKVCache(const CacheConfig& config, LayerBasis basis = {},
                             const PolicySet& policies = {}, std::shared_ptr<Pool> pool = nullptr,
                             Shared shared = {})
      : layer_(
            Calls::make(config, std::move(basis), policies, std::move(pool), std::move(shared))) {}

  /// @brief Raises what the constructor would raise for these arguments.
  static void check(const CacheConfig& config, const LayerBasis& basis,
                    const PolicySet& policies = {}) {
    Calls::check(config, basis, policies);
  }
  /// @brief Number of pages of config.page_bytes bytes (0: the default size) that max_sequences
  /// sequences of max_tokens tokens can ever need.
  static std::int64_t num_pages(const CacheConfig& config, const LayerBasis& basis,
                                const PolicySet& policies) {
    return pool_size({&config, 1}, {&basis, 1}, policies).num_pages;
  }
  /// @brief Page size in bytes: config.page_bytes, or the default if that is 0.
  static std::size_t page_bytes(const CacheConfig& config, const LayerBasis& basis,
                                const PolicySet& policies) {
    return pool_size({&config, 1}, {&basis, 1}, policies).page_bytes;
  }
  /// @brief Size of the pool that layers with these bases can ever need. Pages have page_bytes
  /// bytes, or, if that is 0, a size that suits all layers.
  /// @param configs  one for all layers, or one a layer (LayerStack says in what they may differ)
  /// @throws as the constructor
  static PoolSize pool_size(std::span<const CacheConfig> configs, std::span<const LayerBasis> bases,
                            const PolicySet& policies) {
    return Calls::pool_size(configs, bases, policies);
  }
  /// @brief Makes what layers share: num_threads threads, or a workspace for the layer that needs
  /// most, which allocates on the device.
  /// @param configs  one for all layers, or one a layer
  static Shared make_shared(std::span<const CacheConfig> configs, std::span<const LayerBasis> bases,
                            const PolicySet& policies) {
    return Calls::make_shared(configs, bases, policies);
  }
  /// @brief Bytes of what layers share. Threads count as none.
  static std::size_t bytes_of(const Shared& shared) { return Calls::bytes_of(shared); }
  /// @brief Bytes of the workspace that attend() needs, for a caller that lends it.
  ///
  /// Joint values with pre-RoPE keys need logits in it: 4 bytes per query column and row of the
  /// compressed lists of all sequences, for as many chunks of columns as 64 MiB hold, and for one
  /// chunk at least (cuda/state/workspace.cuh).
  static std::size_t workspace_bytes(const CacheConfig& config, const LayerBasis& basis,
                                     const PolicySet& policies) requires(has_streams) {
    return Calls::workspace_bytes(config, basis, policies);
  }

  /// @brief Starts an empty sequence. @throws SequenceError if it exists, CapacityError beyond
  /// max_sequences
  void create(SequenceId seq, Stream stream = {}) { Calls::create(*layer_, seq, stream); }
  /// @brief Starts `target` as a copy of `source`. Pages and epochs are shared until one of the two
  /// writes to them (copy-on-write). On a GPU the tail, the tables and the sequence's own epochs
  /// are copied.
  /// @throws SequenceError if target exists, CapacityError beyond max_sequences
  void fork(SequenceId source, SequenceId target, Stream stream = {}) {
    Calls::fork(*layer_, source, target, stream);
  }
  /// @brief Ends a sequence, even one with an unfinished prompt, and frees what no other sequence
  /// shares. On a GPU, work that is enqueued later may use its pages.
  void erase(SequenceId seq, Stream stream = {}) { Calls::erase(*layer_, seq, stream); }
  /// @brief Whether the sequence exists: made by create(), fork() or load(), and not erased.
  bool contains(SequenceId seq) const { return Calls::sequences(layer()).contains(seq); }
  /// @brief Number of sequences that create() still has room for.
  int num_free_sequences() const { return Calls::sequences(layer()).num_free(); }
  /// @brief Tokens of a sequence, prompt rows of an unfinished chunk included.
  std::int64_t num_tokens(SequenceId seq) const { return Calls::num_tokens(layer(), seq); }
  /// @brief Tokens in the tail: the last tokens of the sequence, at full rank.
  int tail_length(SequenceId seq) const { return Calls::tail_length(layer(), seq); }
  /// @brief Sets the number of tokens that a sequence, and copies made of it later, may have: at
  /// most config.max_tokens. Host only.
  /// @throws CapacityError if max_tokens exceeds config.max_tokens or is below the sequence's
  /// length
  void limit(SequenceId seq, std::int64_t max_tokens) {
    detail::SequenceTable& table = Calls::sequences(*layer_);
    table.limit(table.find(seq), max_tokens, num_tokens(seq));
  }
  /// @brief Raises what limit() would raise for these arguments.
  void check_limit(SequenceId seq, std::int64_t max_tokens) const {
    Calls::sequences(layer()).check_limit(max_tokens, num_tokens(seq));
  }
  /// @brief Tokens that a sequence may have.
  std::int64_t max_tokens(SequenceId seq) const {
    const detail::SequenceTable& table = Calls::sequences(layer());
    return table.max_tokens(table.find(seq));
  }

  /// @brief Attends to a prompt exactly, then compresses it. out = causal softmax attention of
  /// `query` over the stored rows, the earlier rows of its chunk, and its own row.
  ///
  /// All but the last `recent` rows leave full rank, as the token policy says. With HeavyHitters,
  /// rows accumulate the attention that they receive from these queries. On a GPU, rows of the
  /// prompt are rounded to full_type before they are attended to.
  ///
  /// config.prefill_chunk = C splits the prompt into chunks of C tokens, wherever the calls split
  /// it (0: one chunk). A chunk attends exactly to itself, and to the stored form of earlier
  /// chunks. Memory on the CPU: twice K and V of one chunk in f32. On a GPU, rows of a chunk that
  /// comes in several calls are staged at full_type and packed again in each call.
  ///
  /// GPU: buffers grow to the longest chunk so far, and growing waits for the device. The end of a
  /// chunk reads row counts back and waits for the stream where ResidualOutliers
  /// - has a threshold;
  /// - is combined with HeavyHitters;
  /// - is combined with SnapKV under FrequentDirections.
  /// @param query [n, num_qo_heads, head_dim], post-RoPE
  /// @param key, value [n, num_kv_heads, head_dim]; post-RoPE keys, or with Rope::pre pre-RoPE keys
  /// @param out   [n, num_qo_heads, head_dim]
  /// @param lse   [n, num_qo_heads], natural log, optional
  /// @param prompt  Prompt::continues: more of this prompt comes in a later call. Until the prompt
  /// is complete, append, attend, accumulate, maintain, truncate, remove, fork, save,
  /// shift_positions and divide_positions raise StateError
  /// @throws as ingest()
  void prefill(SequenceId seq, const QueryView& query, const KeyView& key, const ValueView& value,
               const OutputView& out, const LseView& lse, Prompt prompt, Stream stream = {}) {
    Calls::prefill(*layer_, seq, query, key, value, out, lse, prompt, stream);
  }
  void prefill(SequenceId seq, const QueryView& query, const KeyView& key, const ValueView& value,
               const OutputView& out, const LseView& lse = {}, Stream stream = {}) {
    prefill(seq, query, key, value, out, lse, Prompt::complete, stream);
  }

  /// @brief Stores a prompt that the engine attended to itself: prefill() without attention.
  /// Chunks, allocations and waits are those of prefill().
  /// @param q_window  queries of the last w tokens, [w, num_qo_heads, head_dim], post-RoPE. Needed
  /// by updaters that select prompt rows by score and by token policies that score rows:
  /// - SnapKV and such updaters: w at least their window, or all tokens of a shorter prompt; all n
  ///   tokens if a chunk ends inside the call
  /// - HeavyHitters: all n tokens; the call then computes their attention
  /// @throws ShapeError; CapacityError beyond max_tokens or if the pool lacks the pages
  void ingest(SequenceId seq, const KeyView& key, const ValueView& value, const QueryView& q_window,
              Prompt prompt, Stream stream = {}) {
    Calls::ingest(*layer_, seq, key, value, q_window, prompt, stream);
  }
  /// @brief Stores a complete prompt.
  void ingest(SequenceId seq, const KeyView& key, const ValueView& value,
              const QueryView& q_window = {}, Stream stream = {}) {
    ingest(seq, key, value, q_window, Prompt::complete, stream);
  }
  /// @brief Stores a complete prompt whose queries no policy needs.
  void ingest(SequenceId seq, const KeyView& key, const ValueView& value,
              Stream stream) requires(has_streams) {
    ingest(seq, key, value, {}, Prompt::complete, stream);
  }
  /// @brief Ends a prompt whose last part came with Prompt::continues, and compresses the rows that
  /// are still pending. On a GPU, waits for row counts where prefill() does.
  /// @throws CapacityError if other sequences have taken the pages since
  void finish_prompt(SequenceId seq, Stream stream = {}) {
    Calls::finish_prompt(*layer_, seq, stream);
  }

  /// @brief Adds m tokens to the tail of each sequence: rows [i m, (i + 1) m) belong to seqs[i].
  /// Allocates nothing. Capturable. No tokens and no sequences are fine.
  /// @param key, value [seqs.size() * m, num_kv_heads, head_dim]
  /// @throws CapacityError if a tail or max_tokens would be exceeded (call maintain() between
  /// steps); SequenceError if a sequence is named twice
  void append(std::span<const SequenceId> seqs, const KeyView& key, const ValueView& value,
              Stream stream = {}) {
    Calls::append(*layer_, seqs, key, value, stream);
  }
  /// @brief append() to one sequence.
  void append(SequenceId seq, const KeyView& key, const ValueView& value, Stream stream = {}) {
    append(std::span(&seq, 1), key, value, stream);
  }
  /// @brief append() to the sequences whose slots are in device memory when the work runs: rows
  /// [i m, (i + 1) m) belong to slot i. Nothing is stored for slot -1.
  ///
  /// Call advance() for the sequences first, at every step, captured or not: this call cannot know
  /// them. Allocates nothing, waits for nothing. Capturable: the graph serves whatever the slots
  /// say, and outlives the sequences.
  /// @param key, value [slots.count * m, num_kv_heads, head_dim]
  /// @throws ShapeError; CapacityError for more slots than max_sequences, or m beyond tail_capacity
  void append(const SlotView& slots, const KeyView& key, const ValueView& value,
              Stream stream = {}) requires(has_streams) {
    Calls::append(*layer_, slots, key, value, stream);
  }
  /// @brief The slot of a sequence, the same until it is erased; below max_sequences. For SlotView.
  /// @throws SequenceError
  int slot(SequenceId seq) const { return Calls::sequences(layer()).find(seq); }
  /// @brief Advances the host's lengths before a replay of a captured append() of m tokens per
  /// sequence, and before every append() of slots.
  /// @throws as append()
  void advance(std::span<const SequenceId> seqs, int m) requires(has_streams) {
    Calls::advance(*layer_, seqs, m);
  }
  /// @brief Raises what advance() would raise for these arguments.
  void check_advance(std::span<const SequenceId> seqs, int m) const requires(has_streams) {
    Calls::check_advance(layer(), seqs, m);
  }

  /// @brief Flushes every tail longer than recent + T rows, T = config.flush_interval rows at a
  /// time: the updater observes the rows, they are compressed, and epochs are published and merged.
  ///
  /// GPU: a few launches for the whole batch, one more per sequence that needs pages. With
  /// config.keep_residuals, some more per sequence, and some per 2048 rows that are or could be
  /// re-projected to another epoch. Waits for nothing, except for row counts where ResidualOutliers
  /// has a threshold or is combined with HeavyHitters. Allocates nothing, except after load() of a
  /// HeavyHitters sequence that was truncated before it was saved.
  /// @throws CapacityError, before anything is flushed, if the pool lacks pages for all sequences
  void maintain(std::span<const SequenceId> seqs, Stream stream = {}) {
    Calls::maintain(*layer_, seqs, stream);
  }
  /// @brief maintain() of one sequence.
  void maintain(SequenceId seq, Stream stream = {}) { maintain(std::span(&seq, 1), stream); }
  /// @brief Upper bound of the pages that maintain(seqs) takes.
  std::int64_t pages_to_maintain(std::span<const SequenceId> seqs) const {
    return Calls::pages_to_maintain(layer(), seqs);
  }

  /// @brief append() of any number of tokens, with maintain() whenever a tail is full, and at the
  /// end.
  /// @throws as append(); CapacityError if the pool lacks the pages for all of it
  void append_maintained(std::span<const SequenceId> seqs, const KeyView& key,
                         const ValueView& value, Stream stream = {}) {
    Calls::append_maintained(*layer_, seqs, key, value, stream);
  }
  /// @brief append_maintained() to one sequence.
  void append_maintained(SequenceId seq, const KeyView& key, const ValueView& value,
                         Stream stream = {}) {
    append_maintained(std::span(&seq, 1), key, value, stream);
  }

  /// @brief Attention of the last m appended tokens of each sequence, causal among those m tokens.
  /// Does not change the cache and allocates nothing. Capturable. No tokens and no sequences are
  /// fine: then nothing is written.
  ///
  /// out = softmax(scale q [K; decode(C_k)]^T) [V; decode(C_v)], f32 accumulation. The bits depend
  /// neither on threads nor on the batch.
  /// @param query [seqs.size() * m, num_qo_heads, head_dim], post-RoPE
  /// @param out   the same shape, f32
  /// @param lse   [seqs.size() * m, num_qo_heads], natural log, optional
  /// @throws ShapeError if m exceeds a tail (m <= recent always fits), on a GPU also if m exceeds
  /// config.max_query_tokens
  void attend(std::span<const SequenceId> seqs, const QueryView& query, const OutputView& out,
              const LseView& lse = {}, Stream stream = {}) {
    Calls::attend(*layer_, seqs, query, out, lse, stream);
  }
  /// @brief attend() for one sequence.
  void attend(SequenceId seq, const QueryView& query, const OutputView& out,
              const LseView& lse = {}, Stream stream = {}) {
    attend(std::span(&seq, 1), query, out, lse, stream);
  }
  /// @brief attend() of the sequences whose slots are in device memory when the work runs. At slot
  /// -1 the outputs are 0 and lse is -inf, whatever the queries are. A slot's sequence has m rows
  /// in its tail at least.
  ///
  /// Results are those of attend() bit for bit. Allocates nothing, waits for nothing. Capturable:
  /// the graph serves whatever the slots say, and outlives the sequences.
  /// @param query [slots.count * m, num_qo_heads, head_dim], post-RoPE
  /// @throws ShapeError, also if m exceeds max_query_tokens; CapacityError for more slots than
  /// max_sequences
  void attend(const SlotView& slots, const QueryView& query, const OutputView& out,
              const LseView& lse = {}, Stream stream = {}) requires(has_streams) {
    Calls::attend(*layer_, slots, query, out, lse, stream);
  }
  /// @brief attend() that also writes the attention which every position received from these
  /// queries, summed over the queries and over the query heads of a group. accumulate() takes it
  /// for HeavyHitters.
  ///
  /// Dropped positions get 0. Cost: reads the keys once more; with pre-RoPE keys, as much again as
  /// attention. On the CPU it allocates. Capturable; does not change the cache.
  /// @param accumulated  [seqs.size(), num_kv_heads, positions]. Every element is written. There
  /// are at least as many positions as the longest sequence has tokens, during capture max_tokens.
  /// Empty: not written
  /// @throws as attend(), ShapeError
  void attend(std::span<const SequenceId> seqs, const QueryView& query, const OutputView& out,
              const LseView& lse, const ScoreView& accumulated, Stream stream = {}) {
    Calls::attend_scored(*layer_, seqs, query, out, lse, accumulated, stream);
  }
  void attend(SequenceId seq, const QueryView& query, const OutputView& out, const LseView& lse,
              const ScoreView& accumulated, Stream stream = {}) {
    attend(std::span(&seq, 1), query, out, lse, accumulated, stream);
  }
  /// @brief Adds attention scores from attend() to the accumulated scores of the sequences' rows,
  /// by which HeavyHitters evicts.
  ///
  /// Call it before maintain(), which may drop rows. Capturable. A value for a stored row that is
  /// not in [0, 1e30] raises ValueError on the CPU; on a GPU it adds nothing and is counted in
  /// faults().
  /// @param accumulated  as attend() wrote it; empty: nothing is added
  /// @throws ShapeError; on a GPU SequenceError if a sequence is named twice
  void accumulate(std::span<const SequenceId> seqs, const ScoreView& accumulated,
                  Stream stream = {}) requires(accumulates_scores) {
    Calls::accumulate(*layer_, seqs, accumulated, stream);
  }
  void accumulate(SequenceId seq, const ScoreView& accumulated,
                  Stream stream = {}) requires(accumulates_scores) {
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
                      const StateView& states, QueryTokens tokens,
                      Stream stream = {}) requires(has_streams) {
    Calls::attend_partial(*layer_, seqs, query, states, tokens, stream);
  }

  /// @brief Upper bounds on what compression changed for the last m appended tokens of each
  /// sequence: in logits, in softmax weights, and in outputs (diagnostics/certificate.hpp).
  ///
  /// The reference is attention over the same tokens at full rank, rounded to full_type as they
  /// arrived. Dropped tokens are not part of it. Needs config.keep_residuals.
  ///
  /// Computes the logits of compressed rows (and of 8-bit full rows) once more. The CPU allocates.
  /// A GPU reconstructs keys, takes a few launches per sequence and per 2048 rows, and may allocate
  /// scratch memory, which waits; it waits for nothing else. Not capturable.
  /// @param query, lse  as given to attend(), and as attend() filled it in. Where one is not finite
  /// the CPU raises ValueError (config.check_finite), and a GPU writes no bound (infinity)
  /// @param out      [seqs.size() * m, num_qo_heads]
  /// @param allowed  largest acceptable value of each bound
  /// @param exceeding  the number of entries of `out` that exceed `allowed` in some bound is added
  /// to it; device memory on a GPU; null: not counted. The engine may want to compute those
  /// otherwise
  /// @throws StateError without config.keep_residuals, ShapeError as attend()
  void certify(std::span<const SequenceId> seqs, const QueryView& query, const LseView& lse,
               const CertificateView& out, const Certificate& allowed = kUnboundedCertificate,
               std::uint32_t* exceeding = nullptr, Stream stream = {}) {
    Calls::certify(*layer_, seqs, query, lse, out, allowed, exceeding, stream);
  }
  void certify(SequenceId seq, const QueryView& query, const LseView& lse,
               const CertificateView& out, const Certificate& allowed = kUnboundedCertificate,
               std::uint32_t* exceeding = nullptr, Stream stream = {}) {
    certify(std::span(&seq, 1), query, lse, out, allowed, exceeding, stream);
  }

  /// @brief The shortest length that truncate() reaches exactly: the first token of the tail. A
  /// shorter one removes flushed rows.
  std::int64_t rollback_limit(SequenceId seq) const { return Calls::rollback_limit(layer(), seq); }
  /// @brief Removes the tokens from `length` on. Exact within the tail. Deeper, the stored rows are
  /// removed, but epochs and updater state stay as those rows made them.
  ///
  /// GPU: waits for the stream if values chose among the removed rows; else for nothing. The first
  /// removal of rows from a layer's scored lists (HeavyHitters) allocates device memory, which
  /// waits.
  /// @throws ShapeError unless 0 <= length <= num_tokens. On a GPU, if `length` is before the tail
  /// and not 0: CapacityError if a head kept so many early outliers that its full rows could
  /// outgrow their tables, or if rows of a scored list are in pages shared with forks and the pool
  /// lacks pages for the copies
  TruncateResult truncate(SequenceId seq, std::int64_t length, Stream stream = {}) {
    return Calls::truncate(*layer_, seq, length, stream);
  }
  /// @brief Raises what truncate() would raise for these arguments. A GPU waits for the device if
  /// values chose among the rows that would be removed.
  void check_truncate(SequenceId seq, std::int64_t length) const {
    Calls::check_truncate(layer(), seq, length);
  }

  /// @brief Removes the tokens [first, first + count). Later tokens take the freed indices but keep
  /// their rotary positions, and so do tokens still to come: with pre-RoPE keys, shift_positions()
  /// may close the gap. What the bases learnt from the removed tokens stays.
  ///
  /// Cost on the CPU: a copy of the codes behind the removed tokens. On a GPU: about ten launches,
  /// two more per 32 MiB of rows that move, one per 32 heads if heads have different numbers of
  /// rows, and two per list and 400 pages shared with forks. Replayed steps see the change. Rows
  /// move through scratch memory, which may be allocated; that waits. So does the first removal of
  /// rows from a layer's scored lists (HeavyHitters), which allocates. Waits for the stream if
  /// values chose among rows that are removed or move; else for nothing.
  /// @throws ShapeError beyond the sequence; CapacityError if forks share pages and the pool lacks
  /// pages for copies; ValueError if positions would end too far from their tokens (CPU: 2^31).
  /// On a GPU also CapacityError beyond 32 pieces of positions with pre-RoPE keys and, if `first`
  /// is before the tail: CapacityError as truncate(); StateError if counts determine which rows are
  /// full, and fewer tokens would be left than the policy keeps full, compressed ones among them
  void remove(SequenceId seq, std::int64_t first, std::int64_t count, Stream stream = {}) {
    Calls::remove(*layer_, seq, first, count, stream);
  }
  /// @brief Upper bound of the pages that remove() takes. Raises what remove() would raise, except
  /// for missing pages. A GPU allocates the scratch memory that remove() needs, and waits for the
  /// device if values chose among rows that would be removed or move.
  std::int64_t pages_to_remove(SequenceId seq, std::int64_t first, std::int64_t count) const {
    return Calls::pages_to_remove(layer(), seq, first, count);
  }

  /// @brief Rotary position of a token, or of the next one (token = num_tokens): its index, unless
  /// positions were moved. The queries of a token must arrive rotated to this position.
  std::int64_t position(SequenceId seq, std::int64_t token) const {
    const std::int64_t tokens = num_tokens(seq);
    if (token < 0 || token > tokens)
      detail::fail<ShapeError>("position: token ", token, ", sequence has ", tokens, " tokens");
    return position_shifts(seq).position(token);
  }
  /// @brief Moves the tokens from `first` on, and all tokens still to come, by `delta` positions.
  /// Two calls move a range.
  ///
  /// Touches no stored row: needs pre-RoPE keys (config.rope). Each piece takes 24 bytes, which
  /// memory() counts. On a GPU: one launch; waits for nothing; replayed steps see the change.
  /// @throws StateError if keys are stored post-RoPE, ShapeError beyond the sequence, ValueError if
  /// a total offset exceeds 2^31 (GPU: if positions could leave +-2^30; CapacityError beyond 32
  /// pieces)
  void shift_positions(SequenceId seq, std::int64_t first, std::int64_t delta, Stream stream = {}) {
    Calls::shift_positions(*layer_, seq, first, delta, stream);
  }
  /// @brief Raises what shift_positions() would raise for these arguments.
  void check_shift_positions(SequenceId seq, std::int64_t first, std::int64_t delta) const {
    Calls::check_shift(layer(), seq, first, delta);
  }
  /// @brief Divides the positions of tokens [first, first + count) by `divisor`, rounded down, so
  /// that several tokens share one position (self-extension of the context).
  ///
  /// Otherwise as shift_positions(), but reading these tokens costs one angle per token.
  /// @throws StateError if keys are stored post-RoPE, ShapeError beyond the sequence, ValueError
  /// unless the product of a token's divisors is 1 to 2^20 (GPU: CapacityError beyond 32 pieces)
  void divide_positions(SequenceId seq, std::int64_t first, std::int64_t count,
                        std::int64_t divisor, Stream stream = {}) {
    Calls::divide_positions(*layer_, seq, first, count, divisor, stream);
  }
  /// @brief Raises what divide_positions() would raise for these arguments.
  void check_divide_positions(SequenceId seq, std::int64_t first, std::int64_t count,
                              std::int64_t divisor) const {
    Calls::check_division(layer(), seq, first, count, divisor);
  }
  /// @brief The position shifts of a sequence. The reference is valid until the sequence changes.
  const PositionShifts& position_shifts(SequenceId seq) const {
    return Calls::position_shifts(layer(), seq);
  }

  /// @brief Bytes that save() writes for a sequence.
  std::size_t save_bytes(SequenceId seq) const { return Calls::save_bytes(layer(), seq); }
  /// @brief Writes a sequence to the caller's host memory: versioned, checksummed, independent of
  /// page size; each backend has its own format. Contains the sequence's own epochs, and a
  /// fingerprint of the calibrated maps. A loaded sequence continues bit for bit like the original.
  ///
  /// On a GPU it waits for the stream, and may allocate scratch memory.
  /// @return bytes written  @throws CapacityError if the buffer is smaller than save_bytes()
  std::size_t save(SequenceId seq, std::span<std::byte> buffer, Stream stream = {}) const {
    return Calls::save(layer(), seq, buffer, stream);
  }
  /// @brief Starts sequence `seq` from what save() wrote, in a cache of the same shape, types, maps
  /// and policies, on a GPU also of the same tail capacity; max_tokens, pages and other sequences
  /// may differ. On a GPU it waits for the stream, and may allocate scratch memory.
  /// @throws FormatError if the bytes are damaged, ShapeError if they belong to another layer,
  /// CapacityError if they do not fit
  void load(SequenceId seq, std::span<const std::byte> saved, Stream stream = {}) {
    Calls::load(*layer_, seq, saved, stream);
  }

  /// @brief Writes the stored K and V of tokens [first, first + key.num_tokens): full rows as
  /// stored, compressed rows decoded, dropped rows as zeros (row_states() tells which). Keys come
  /// back in the form in which they arrived: with Rope::pre, pre-RoPE.
  ///
  /// Staged rows of an unfinished prompt are rounded to full_type on a GPU. Cost there: reads the
  /// stored rows once, writes the rows once; 2 x channels x head_dim products per row.
  /// @param key, value [count, num_kv_heads, head_dim], f32, f16 or bf16; results are rounded to
  /// that type
  /// @throws ShapeError beyond the sequence
  void reconstruct(SequenceId seq, std::int64_t first, const KeyTargetView& key,
                   const ValueTargetView& value, Stream stream = {}) const {
    Calls::reconstruct(layer(), seq, first, key, value, stream);
  }
  /// @brief Writes the states of positions [first, first + states.size()) of one KV head. Rows of
  /// the tail and pending rows of an unfinished prompt are full. A GPU waits for the stream.
  /// @throws ShapeError beyond the heads or the sequence
  void row_states(SequenceId seq, int kv_head, std::int64_t first, std::span<RowState> states,
                  Stream stream = {}) const {
    Calls::row_states(layer(), seq, kv_head, first, states, stream);
  }
  /// @brief Number of rows and values that were refused since the cache was made. Waits for the
  /// device.
  std::uint32_t faults() const requires(has_streams) { return Calls::faults(layer()); }

  /// @brief Bytes of one sequence; pages shared with forks are counted in full. On a GPU,
  /// coefficient bytes include the padding of codes to whole units, and the call waits for the
  /// device if epochs are device-managed.
  MemoryUsage memory(SequenceId seq) const { return Calls::memory(layer(), seq); }
  /// @brief Bytes of all sequences, of what they share, and of what is reserved. Pages and epochs
  /// that forks share count once per sequence.
  MemoryUsage memory() const { return Calls::memory(layer()); }
  /// @brief Bytes of attend()'s workspace, owned or lent. It is sized for max_sequences and
  /// max_query_tokens.
  std::size_t workspace_bytes() const requires(has_streams) {
    return Calls::workspace_bytes(layer());
  }
  /// @brief Counters since the cache was made. On a GPU, rejected updates are not counted, and the
  /// call waits for the device if epochs are device-managed.
  CacheStatistics statistics() const { return Calls::statistics(layer()); }
  /// @brief Tokens that fit in a page of this KV head's compressed list (with joint values: of its
  /// keys), or of its full list if the token policy compresses nothing.
  int tokens_per_page(int kv_head) const { return Calls::tokens_per_page(layer(), kv_head); }
  /// @brief Bytes of the pages that `tokens` tokens take over all KV heads after they left the
  /// tail: compressed, or full if the token policy compresses nothing.
  std::size_t bytes_for(std::int64_t tokens) const { return Calls::bytes_for(layer(), tokens); }
  /// @brief The configuration as given, with defaults filled in.
  const CacheConfig& config() const { return Calls::config(layer()); }
  /// @brief The page pool, which layers may share.
  const Pool& pool() const { return Calls::pool(layer()); }

 private:
  template <class Cache>
  friend class LayerStack;  // whose calls change all layers or none
  struct Destroy {
    void operator()(Layer* layer) const { Calls::destroy(layer); }
  };
  const Layer& layer() const { return *layer_; }

  std::unique_ptr<Layer, Destroy> layer_;
};

LOWRANKKV_NAMESPACE_END
