// SPDX-License-Identifier: Apache-2.0
/// @file compressed_kv_cache.hpp  CompressedKVCache: the KV cache of one attention layer, for many
/// sequences.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/engine_pages.hpp"
#include "lowrankkv/core/memory_usage.hpp"
#include "lowrankkv/core/statistics.hpp"
#include "lowrankkv/cpu/backend.hpp"
#include "lowrankkv/detail/cache_base.hpp"
#include "lowrankkv/fwd.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief The KV cache of one attention layer: sinks and tail at full rank, and compressed rows
/// that attention reads without decoding them.
///
/// A row is (sequence, KV head, token). It enters the tail at full rank. When the tail is flushed,
/// the token policy decides whether the row stays full, or the current epoch's maps project it to
/// coefficients. attend() is softmax attention over [full rows, decode(coefficients), tail],
/// computed without decoding.
///
/// Not thread-safe: one thread calls a cache at a time. The work runs on the cache's thread pool.
/// After any error the cache is unchanged.
template <class Backend, class Basis, class Updater, class TokenPolicy, class Quantizer,
          class EpochPolicy>
class CompressedKVCache
    : detail::CacheBase<Backend, Basis, Updater, TokenPolicy, Quantizer, EpochPolicy> {
  using Base = detail::CacheBase<Backend, Basis, Updater, TokenPolicy, Quantizer, EpochPolicy>;
  using Base::layer_;
  using Base::sequences_;
  using typename Base::Layer;

 public:
  // The steps of the algorithm (compress_rows, fork_slot, ...) belong to the backend. Argument-
  // dependent lookup finds them in the namespace of `layer_`.
  using PolicySet = Policies<Basis, Updater, TokenPolicy, Quantizer>;  ///< policy parameters
  using Pool = typename Backend::Pool;                                 ///< owner of the pages
  using Executor = typename Backend::Executor;                         ///< threads
  /// @brief What the layers of a model share besides pages: threads.
  using Shared = std::shared_ptr<Executor>;

  /// @brief Makes an empty cache.
  /// @param basis    the calibrated maps, one HeadBasis per KV head; may be empty if the token
  /// policy compresses nothing
  /// @param pool     pages shared with other layers; null: the cache makes its own pool
  /// (config.page_bytes, config.num_pages)
  /// @param threads  threads shared with other layers and the engine; null: the cache makes
  /// config.num_threads threads
  /// @throws ShapeError, ValueError, CapacityError naming both values
  explicit CompressedKVCache(const CacheConfig& config, LayerBasis basis = {},
                             PolicySet policies = {}, std::shared_ptr<Pool> pool = nullptr,
                             std::shared_ptr<Executor> threads = nullptr)
      : Base(config, std::move(basis), policies, std::move(pool), std::move(threads)) {}

  /// @brief Raises what the constructor would raise for these arguments.
  static void check(CacheConfig config, const LayerBasis& basis, const PolicySet& policies = {}) {
    Base::checked(config, basis, policies, nullptr);
  }
  /// @brief Number of pages of config.page_bytes bytes (0: the default size) that max_sequences
  /// sequences of max_tokens tokens can ever need.
  static std::int64_t num_pages(const CacheConfig& config, const LayerBasis& basis,
                                const PolicySet& policies) {
    check(config, basis, policies);
    return Layer::sizes(config, basis, policies.basis, policies.token_policy, policies.quantizer)
        .num_pages;
  }
  /// @brief Page size in bytes: config.page_bytes, or the default if that is 0.
  static std::size_t page_bytes(const CacheConfig& config, const LayerBasis& basis,
                                const PolicySet& policies) {
    check(config, basis, policies);
    return Layer::sizes(config, basis, policies.basis, policies.token_policy, policies.quantizer)
        .page_bytes;
  }

  /// @brief Size of the pool that layers with these bases can ever need. @throws as the constructor
  static PoolSize pool_size(const CacheConfig& config, std::span<const LayerBasis> bases,
                            const PolicySet& policies) {
    PoolSize size{page_bytes(config, bases.front(), policies), 0};
    for (const LayerBasis& basis : bases) size.num_pages += num_pages(config, basis, policies);
    return size;
  }
  /// @brief Makes the resources that layers share: config.num_threads threads.
  static Shared make_shared(const CacheConfig& config, std::span<const LayerBasis>,
                            const PolicySet&) {
    return std::make_shared<Executor>(config.num_threads);
  }
  /// @brief Bytes of the resources that layers share: threads count as none.
  static std::size_t bytes_of(const Shared&) { return 0; }

  /// @brief Starts an empty sequence. @throws SequenceError if it exists, CapacityError beyond
  /// max_sequences
  void create(SequenceId seq) { open_slot(layer_, sequences_.add(seq)); }
  /// @brief Whether the sequence exists (by create(), fork() or load()).
  bool contains(SequenceId seq) const { return sequences_.contains(seq); }
  /// @brief Sets the number of tokens that a sequence, and copies made of it later, may have: at
  /// most config.max_tokens. @throws CapacityError if max_tokens exceeds config.max_tokens or is
  /// below the sequence's length
  void limit(SequenceId seq, std::int64_t max_tokens) {
    sequences_.limit(sequences_.find(seq), max_tokens, num_tokens(seq));
  }
  /// @brief Raises what limit() would raise for these arguments.
  void check_limit(SequenceId seq, std::int64_t max_tokens) const {
    sequences_.check_limit(max_tokens, num_tokens(seq));
  }
  /// @brief Tokens that a sequence may have.
  std::int64_t max_tokens(SequenceId seq) const {
    return sequences_.max_tokens(sequences_.find(seq));
  }
  /// @brief Tokens of a sequence, prompt rows of an unfinished chunk included.
  std::int64_t num_tokens(SequenceId seq) const { return lengths(seq).num_tokens; }
  /// @brief Tokens in the tail: the last tokens of the sequence, at full rank.
  int tail_length(SequenceId seq) const { return lengths(seq).tail_length; }

  /// @brief Attends to a prompt exactly, then compresses it. out = causal softmax attention of
  /// `query` over the stored rows, the earlier rows of its chunk, and its own row.
  ///
  /// config.prefill_chunk = C splits the prompt into chunks of C tokens, wherever the calls split
  /// it. A chunk attends exactly to itself, and to the stored form of earlier chunks. Memory: twice
  /// K and V of one chunk in f32.
  /// @param query [n, num_qo_heads, head_dim], post-RoPE
  /// @param key, value [n, num_kv_heads, head_dim]; post-RoPE keys, or with Rope::pre pre-RoPE keys
  /// @param out   [n, num_qo_heads, head_dim]
  /// @param lse   [n, num_qo_heads], natural log, optional
  /// @param prompt  Prompt::continues: more of this prompt comes in a later call. Until the prompt
  /// is complete, append, attend, maintain, truncate, remove and fork raise StateError
  void prefill(SequenceId seq, const QueryView& query, const KeyView& key, const ValueView& value,
               const OutputView& out, const LseView& lse = {}, Prompt prompt = Prompt::complete) {
    const int slot = sequences_.find(seq);
    this->check_prompt(slot, key, value);
    this->check_query(query, key.num_tokens);
    detail::check_rows("out", out, key.num_tokens, layer_.config.shape.num_qo_heads,
                       layer_.head_dim());
    this->check_lse(lse, key.num_tokens);
    this->for_each_piece(slot, key, value, prompt,
                         [&](std::int64_t first, std::int64_t count, std::int64_t own_row) {
                           layer_.sequence(slot).chunk.add_queries(query.tokens(first, count));
                           this->attend_piece(slot, query.tokens(first, count),
                                              out.tokens(first, count), lse.tokens(first, count),
                                              own_row);
                         });
  }

  /// @brief Stores a prompt that the engine attended to itself: prefill() without attention.
  /// @param q_window  queries of the last w tokens, [w, num_qo_heads, head_dim], post-RoPE. Needed
  /// by updaters that select prompt rows by score and by token policies that score rows:
  /// - SnapKV and such updaters: w at least their window, or all tokens of a shorter prompt; all n
  ///   tokens if a chunk ends inside the call
  /// - HeavyHitters: all n tokens; the call then computes their attention
  void ingest(SequenceId seq, const KeyView& key, const ValueView& value,
              const QueryView& q_window = {}, Prompt prompt = Prompt::complete) {
    const int slot = sequences_.find(seq);
    this->check_prompt(slot, key, value);
    this->check_query_window(slot, q_window, key.num_tokens);
    const std::int64_t offset = key.num_tokens - q_window.num_tokens;
    this->for_each_piece(slot, key, value, prompt,
                         [&](std::int64_t first, std::int64_t count, std::int64_t own_row) {
                           const std::int64_t begin = (std::max)(first, offset);
                           if (first + count > begin)
                             layer_.sequence(slot).chunk.add_queries(
                                 q_window.tokens(begin - offset, first + count - begin));
                           // Accumulated scores need normalised attention: attend, and discard the
                           // outputs.
                           if constexpr (Base::accumulates_scores) {
                             std::vector<float> out(
                                 static_cast<std::size_t>(count) *
                                 static_cast<std::size_t>(q_window.num_heads * q_window.head_dim));
                             this->attend_piece(
                                 slot, q_window.tokens(first, count),
                                 {out.data(), count, q_window.num_heads, q_window.head_dim}, {},
                                 own_row);
                           }
                         });
  }

  /// @brief Ends a prompt whose last part came with Prompt::continues, and compresses the rows that
  /// are still pending. @throws CapacityError if the pool lacks the pages
  void finish_prompt(SequenceId seq) {
    const int slot = sequences_.find(seq);
    PageDemand demand;
    this->demand_rows(slot, 0, Phase::prefill, demand);
    // Other sequences may have taken pages since the last call.
    layer_.pool->allocator().require(demand.total());
    if (!layer_.sequence(slot).chunk.empty()) this->commit_chunk(slot);
    layer_.sequence(slot).prompt_open = false;
  }

  /// @brief Adds m tokens to the tail of each sequence: rows [i m, (i + 1) m) belong to seqs[i].
  /// Allocates nothing.
  /// @param key, value [seqs.size() * m, num_kv_heads, head_dim]
  /// @throws CapacityError if a tail or max_tokens would be exceeded (call maintain() between
  /// steps)
  void append(std::span<const SequenceId> seqs, const KeyView& key, const ValueView& value) {
    const int m = this->check_append(seqs, key, value, layer_.config.tail_capacity);
    for (std::size_t i = 0; i < seqs.size(); ++i)
      layer_.append_tail(sequences_.find(seqs[i]), key, value, static_cast<std::int64_t>(i) * m, m);
  }
  /// @brief append() to one sequence.
  void append(SequenceId seq, const KeyView& key, const ValueView& value) {
    append(std::span(&seq, 1), key, value);
  }

  /// @brief Flushes every tail longer than recent + T, T rows at a time: the updater observes the
  /// rows, they are compressed, and epochs are published and merged.
  /// @throws CapacityError, before anything is flushed, if the pool lacks pages for all sequences
  void maintain(std::span<const SequenceId> seqs) {
    layer_.pool->allocator().require(pages_to_maintain(seqs));
    for (const SequenceId seq : seqs) this->flush(sequences_.find(seq));
  }
  void maintain(SequenceId seq) { maintain(std::span(&seq, 1)); }  ///< of one sequence
  /// @brief Upper bound of the pages that maintain(seqs) takes.
  std::int64_t pages_to_maintain(std::span<const SequenceId> seqs) const {
    PageDemand demand;
    for (const SequenceId seq : seqs) {
      const int slot = this->idle_slot(seq);
      if (this->flush_due(slot)) this->demand_rows(slot, 0, Phase::decode, demand);
    }
    return demand.total();
  }

  /// @brief append() of any number of tokens: runs maintain() whenever a tail is full, and at the
  /// end.
  void append_maintained(std::span<const SequenceId> seqs, const KeyView& key,
                         const ValueView& value) {
    const int m = this->check_append(seqs, key, value, std::int64_t{1} << 40);
    PageDemand demand;
    for (const SequenceId seq : seqs)
      this->demand_rows(sequences_.find(seq), m, Phase::decode, demand);
    layer_.pool->allocator().require(demand.total());
    for (std::size_t i = 0; i < seqs.size(); ++i) {
      const int slot = sequences_.find(seqs[i]);
      for (int done = 0; done < m;) {
        this->flush(slot);
        const int room = layer_.config.tail_capacity - layer_.table.lengths(slot).tail_length;
        const int count = (std::min)(room, m - done);
        layer_.append_tail(slot, key, value, static_cast<std::int64_t>(i) * m + done, count);
        done += count;
      }
      this->flush(slot);
    }
  }
  /// @brief append_maintained() to one sequence.
  void append_maintained(SequenceId seq, const KeyView& key, const ValueView& value) {
    append_maintained(std::span(&seq, 1), key, value);
  }

  /// @brief Attention of the last m appended tokens of each sequence, causal among those m tokens.
  /// Does not change the cache and allocates nothing.
  ///
  /// out = softmax(scale q [K; decode(C_k)]^T) [V; decode(C_v)], f32 accumulation.
  /// @param query, out [seqs.size() * m, num_qo_heads, head_dim]
  /// @param lse [seqs.size() * m, num_qo_heads], natural log, optional
  /// @param accumulated  optional: receives the attention that each position got from these
  /// queries, for accumulate(). Computes the logits once more, and allocates
  /// @throws ShapeError if m exceeds a tail (m <= recent always fits)
  void attend(std::span<const SequenceId> seqs, const QueryView& query, const OutputView& out,
              const LseView& lse = {}, const ScoreView& accumulated = {}) {
    const std::int64_t m = this->check_attend(seqs, query, out, lse);
    this->check_score_view(seqs, accumulated);
    std::vector<float> scratch;
    const LseView sums = accumulated.data != nullptr && lse.data == nullptr
                             ? this->scratch_lse(scratch, query.num_tokens)
                             : lse;
    const auto slot_of = [&](std::int64_t i) {
      return sequences_.find(seqs[static_cast<std::size_t>(i)]);
    };
    const auto block_of = [&](std::int64_t i) {
      return typename Layer::Block{
          query.tokens(i * m, m), out.tokens(i * m, m),
          sums.tokens(i * m, m),  layer_.config.shape.group_size(),
          layer_.config.scale(),  layer_.table.lengths(slot_of(i)).tail_length - m};
    };
    layer_.attend(static_cast<std::int64_t>(seqs.size()), slot_of, block_of, false);
    for (std::int64_t i = 0; accumulated.data != nullptr && i < accumulated.num_sequences; ++i)
      this->write_scores(slot_of(i), block_of(i), accumulated, i);
  }
  void attend(SequenceId seq, const QueryView& query, const OutputView& out,
              const LseView& lse = {}, const ScoreView& accumulated = {}) {
    attend(std::span(&seq, 1), query, out, lse, accumulated);
  }

  /// @brief Upper bounds on what compression changed for the last m appended tokens of each
  /// sequence: in logits, in softmax weights, and in outputs (diagnostics/certificate.hpp).
  ///
  /// The reference is attention over the same tokens at full rank, rounded to full_type as they
  /// arrived. Dropped tokens are not part of it. Needs config.keep_residuals. Computes the logits
  /// of compressed rows (and of 8-bit full rows) once more, and allocates.
  /// @param query  as given to attend()
  /// @param lse    as attend() filled it in
  /// @param out    [seqs.size() * m, num_qo_heads]
  /// @param limit  largest acceptable value of each bound
  /// @return number of entries of `out` that exceed the limit in some bound; the engine may want to
  /// compute those otherwise
  /// @throws StateError without config.keep_residuals, ShapeError as attend(), ValueError if a
  /// query or an lse is not finite
  std::int64_t certify(std::span<const SequenceId> seqs, const QueryView& query, const LseView& lse,
                       const CertificateView& out,
                       const Certificate& limit = kUnboundedCertificate) {
    const std::int64_t m = this->check_certify(seqs, query, lse, out);
    for (std::size_t i = 0; i < seqs.size(); ++i) {
      const std::int64_t first = static_cast<std::int64_t>(i) * m;
      const typename Layer::Block block{query.tokens(first, m), {},
                                        lse.tokens(first, m),   layer_.config.shape.group_size(),
                                        layer_.config.scale(),  0};
      layer_.certify(sequences_.find(seqs[i]), block,
                     {out.data + first * out.num_heads, m, out.num_heads});
    }
    return std::count_if(out.data, out.data + out.num_tokens * out.num_heads,
                         [&](const Certificate& found) {
                           return !(found.logit <= limit.logit && found.softmax <= limit.softmax &&
                                    found.output <= limit.output);
                         });
  }
  std::int64_t certify(SequenceId seq, const QueryView& query, const LseView& lse,
                       const CertificateView& out,
                       const Certificate& limit = kUnboundedCertificate) {
    return certify(std::span(&seq, 1), query, lse, out, limit);
  }

  /// @brief Adds attention scores from attend() to the accumulated scores of the sequences' rows,
  /// by which HeavyHitters evicts. Call it before maintain(), which may drop rows.
  /// @param accumulated  as given to attend()
  void accumulate(std::span<const SequenceId> seqs,
                  const ScoreView& accumulated) requires(Base::accumulates_scores) {
    this->check_score_view(seqs, accumulated);
    if (accumulated.data != nullptr) this->check_accumulated_values(accumulated);
    for (std::int64_t i = 0; accumulated.data != nullptr && i < accumulated.num_sequences; ++i)
      this->add_score(this->idle_slot(seqs[static_cast<std::size_t>(i)]), accumulated, i);
  }
  void accumulate(SequenceId seq, const ScoreView& accumulated) requires(Base::accumulates_scores) {
    accumulate(std::span(&seq, 1), accumulated);
  }

  /// @brief The shortest length that truncate() reaches exactly. A shorter one removes flushed
  /// rows.
  std::int64_t rollback_limit(SequenceId seq) const {
    return layer_.first_tail_position(this->idle_slot(seq));
  }
  /// @brief Removes the tokens from `length` on. Exact within the tail. Deeper, the stored rows are
  /// removed, but epochs and updater state stay as those rows made them.
  /// @throws ShapeError unless 0 <= length <= num_tokens
  TruncateResult truncate(SequenceId seq, std::int64_t length) {
    check_truncate(seq, length);
    const int slot = sequences_.find(seq);
    SequenceLengths& now = layer_.table.lengths(slot);
    const std::int64_t first_tail = layer_.first_tail_position(slot);
    if (length < now.num_tokens) layer_.sequence(slot).shifts.truncate(length);
    if (length < first_tail) {
      truncate_stored(layer_, slot, length);
      return TruncateResult::inexact;
    }
    now.tail_length = static_cast<std::int32_t>(length - first_tail);
    now.num_tokens = length;
    for (auto& accumulated : layer_.sequence(slot).accumulated)
      accumulated.recent.resize(static_cast<std::size_t>(now.tail_length));
    return TruncateResult::exact;
  }

  /// @brief Raises what truncate() would raise for these arguments.
  void check_truncate(SequenceId seq, std::int64_t length) const {
    const std::int64_t tokens = layer_.table.lengths(this->idle_slot(seq)).num_tokens;
    if (length < 0 || length > tokens)
      detail::fail<ShapeError>("truncate: length ", length, ", sequence has ", tokens, " tokens");
  }

  /// @brief Removes the tokens [first, first + count). Later tokens take the freed indices but keep
  /// their rotary positions, and so do tokens still to come: with pre-RoPE keys, shift_positions()
  /// may close the gap. What the bases learnt from the removed tokens stays.
  /// @throws ShapeError beyond the sequence; CapacityError if forks share pages and the pool lacks
  /// pages for copies; ValueError if positions would exceed indices by more than 2^31 (with
  /// pre-RoPE keys the Cuda backend's limits are lower, see shift_positions())
  ///
  /// Cost: a copy of the codes behind the removed tokens.
  void remove(SequenceId seq, std::int64_t first, std::int64_t count) {
    layer_.pool->allocator().require(pages_to_remove(seq, first, count));
    remove_tokens(layer_, sequences_.find(seq), first, count);
  }
  /// @brief Upper bound of the pages that remove() takes. @throws as remove(), except CapacityError
  std::int64_t pages_to_remove(SequenceId seq, std::int64_t first, std::int64_t count) const {
    const int slot = this->idle_slot(seq);
    detail::check_removal(position_shifts(seq), layer_.table.lengths(slot).num_tokens, first, count,
                          PositionShifts::kLimit);
    PageDemand demand;
    demand_removal(layer_, slot, first, count, demand);
    return demand.total();
  }

  /// @brief Rotary position of a token, or of the next one (token = num_tokens): its index, unless
  /// positions were moved. The queries of a token must arrive rotated to this position.
  std::int64_t position(SequenceId seq, std::int64_t token) const {
    return this->position_of(sequences_.find(seq), token);
  }
  /// @brief Moves the tokens from `first` on, and all tokens still to come, by `delta` positions.
  /// Two calls move a range.
  ///
  /// Touches no stored row: needs pre-RoPE keys (config.rope). Each piece takes 24 bytes, which
  /// memory() counts.
  /// @throws StateError if keys are stored post-RoPE, ShapeError beyond the sequence, ValueError if
  /// a total offset exceeds 2^31 (the Cuda backend's limits differ: positions within +-2^30, and at
  /// most 32 pieces)
  void shift_positions(SequenceId seq, std::int64_t first, std::int64_t delta) {
    check_shift_positions(seq, first, delta);
    layer_.sequence(sequences_.find(seq)).shifts.add(first, delta);
  }
  /// @brief Raises what shift_positions() would raise for these arguments.
  void check_shift_positions(SequenceId seq, std::int64_t first, std::int64_t delta) const {
    this->check_shift(this->idle_slot(seq), first, delta);
  }
  /// @brief Divides the positions of tokens [first, first + count) by `divisor`, rounded down, so
  /// that several tokens share one position (self-extension of the context).
  ///
  /// Otherwise as shift_positions(), but reading these tokens costs one angle per token.
  /// @throws StateError if keys are stored post-RoPE, ShapeError beyond the sequence, ValueError
  /// unless the product of a token's divisors is 1 to 2^20 (the Cuda backend also allows at most 32
  /// pieces)
  void divide_positions(SequenceId seq, std::int64_t first, std::int64_t count,
                        std::int64_t divisor) {
    check_divide_positions(seq, first, count, divisor);
    layer_.sequence(sequences_.find(seq)).shifts.divide(first, count, divisor);
  }
  /// @brief Raises what divide_positions() would raise for these arguments.
  void check_divide_positions(SequenceId seq, std::int64_t first, std::int64_t count,
                              std::int64_t divisor) const {
    this->check_division(this->idle_slot(seq), first, count, divisor);
  }
  /// @brief The position shifts of a sequence. The reference is valid until the sequence changes.
  const PositionShifts& position_shifts(SequenceId seq) const {
    return layer_.sequence(sequences_.find(seq)).shifts;
  }

  /// @brief Starts `target` as a copy of `source`. Pages and epochs are shared until one of the two
  /// writes (copy-on-write).
  void fork(SequenceId source, SequenceId target) {
    const int from = this->idle_slot(source);
    fork_slot(layer_, from, sequences_.add_copy(from, target));
  }
  /// @brief Ends a sequence, even if its prompt is unfinished, and frees what no other sequence
  /// shares.
  void erase(SequenceId seq) {
    clear_slot(layer_, sequences_.find(seq));
    sequences_.remove(seq);
  }

  /// @brief Bytes that save() writes for a sequence.
  std::size_t save_bytes(SequenceId seq) const {
    return save_sequence(layer_, this->idle_slot(seq), {}, true);
  }
  /// @brief Writes a sequence to the caller's buffer: versioned, checksummed, independent of page
  /// size. Contains the sequence's own epochs, and a fingerprint of the calibrated maps. A loaded
  /// sequence continues bit for bit like the original.
  /// @return bytes written  @throws CapacityError if the buffer is smaller than save_bytes()
  std::size_t save(SequenceId seq, std::span<std::byte> buffer) const {
    return save_sequence(layer_, this->idle_slot(seq), buffer, false);
  }
  /// @brief Starts sequence `seq` from what save() wrote, in a cache of the same shape, types, maps
  /// and policies; max_tokens, pages and other sequences may differ.
  /// @throws FormatError if the bytes are damaged, ShapeError if they belong to another layer,
  /// CapacityError if they do not fit
  void load(SequenceId seq, std::span<const std::byte> saved) {
    ByteReader in = open_saved(layer_, saved);
    auto sequence = read_sequence(layer_, in);
    layer_.pool->allocator().require(pages_of(layer_, sequence));
    const int slot = sequences_.add(seq);
    open_slot(layer_, slot);
    store_sequence(layer_, slot, std::move(sequence));
  }

  /// @brief Writes the stored K and V of tokens [first, first + key.num_tokens): full rows as
  /// stored, compressed rows decoded, dropped rows as zeros (row_states() tells which). Keys come
  /// back in the form in which they arrived: with Rope::pre, pre-RoPE.
  /// @param key, value [count, num_kv_heads, head_dim], f32, f16 or bf16; results are rounded to
  /// that type
  /// @throws ShapeError beyond the sequence
  void reconstruct(SequenceId seq, std::int64_t first, const KeyTargetView& key,
                   const ValueTargetView& value) const {
    const int slot = sequences_.find(seq);
    detail::check_rows("key", key, key.num_tokens, layer_.num_kv_heads(), layer_.head_dim());
    detail::check_rows("value", value, key.num_tokens, layer_.num_kv_heads(), layer_.head_dim());
    cpu::check_tables("key", key.pages, key.num_tokens);
    cpu::check_tables("value", value.pages, key.num_tokens);
    const std::int64_t tokens = layer_.table.lengths(slot).num_tokens;
    if (first < 0 || first > tokens || key.num_tokens > tokens - first) {
      detail::fail<ShapeError>("reconstruct: ", key.num_tokens, " tokens from position ", first,
                               ", sequence has ", tokens, " tokens");
    }
    for (int head = 0; head < layer_.num_kv_heads(); ++head)
      reconstruct_head(layer_, slot, head, first, key.num_tokens, key, value);
  }
  /// @brief Writes the states of positions [first, first + states.size()) of one KV head. Rows of
  /// the tail are full.
  void row_states(SequenceId seq, int kv_head, std::int64_t first,
                  std::span<RowState> states) const {
    const int slot = sequences_.find(seq);
    const std::int64_t count = static_cast<std::int64_t>(states.size());
    if (kv_head < 0 || kv_head >= layer_.num_kv_heads())
      detail::fail<ShapeError>("row_states: kv_head ", kv_head, ", num_kv_heads ",
                               layer_.num_kv_heads());
    const std::int64_t tokens = layer_.table.lengths(slot).num_tokens;
    if (first < 0 || first > tokens || count > tokens - first)
      detail::fail<ShapeError>("row_states: ", count, " positions from ", first,
                               " on, sequence has ", tokens, " tokens");
    const RowRuns& runs = layer_.runs(slot, kv_head);
    for (std::int64_t i = 0; i < count; ++i)
      states[static_cast<std::size_t>(i)] =
          first + i < runs.num_positions() ? runs.find(first + i).state : RowState::full;
  }

  /// @brief Bytes of one sequence; pages shared with forks are counted in full.
  MemoryUsage memory(SequenceId seq) const { return slot_memory(layer_, sequences_.find(seq)); }
  /// @brief Bytes of all sequences, of what they share, and of what is reserved. Pages and epochs
  /// that forks share count once per sequence.
  MemoryUsage memory() const {
    MemoryUsage usage;
    sequences_.for_each([&](SequenceId, int slot) { usage += slot_memory(layer_, slot); });
    usage.shared_bytes = layer_.shared_bytes();
    usage.reserved_bytes = layer_.reserved_bytes() + layer_.pool->idle_bytes();
    return usage;
  }
  /// @brief Compressed tokens that fit in a page of this KV head (with joint values: its keys).
  int tokens_per_page(int kv_head) const {
    return Base::compresses ? layer_.compressed.layout(kv_head).rows_per_page
                            : layer_.full.layout(kv_head).rows_per_page;
  }
  /// @brief Bytes of the pages that `tokens` tokens take over all KV heads after they left the tail
  /// (compressed, unless the token policy keeps all of them at full rank).
  std::size_t bytes_for(std::int64_t tokens) const {
    std::size_t pages = 0;
    for (int list = 0; list < (Base::compresses ? layer_.num_lists() : layer_.num_kv_heads());
         ++list) {
      const std::int64_t per_page = tokens_per_page(list);
      pages += static_cast<std::size_t>((tokens + per_page - 1) / per_page);
    }
    return pages * layer_.pool->page_bytes();
  }
  /// @brief The configuration as given, with defaults filled in.
  const CacheConfig& config() const { return layer_.config; }
  /// @brief Counters since construction.
  const CacheStatistics& statistics() const { return layer_.statistics; }
  const Pool& pool() const { return *layer_.pool; }  ///< pages, which layers may share
  /// @brief Number of sequences that create() still has room for.
  int num_free_sequences() const { return sequences_.num_free(); }

 private:
  const SequenceLengths& lengths(SequenceId seq) const {
    return layer_.table.lengths(sequences_.find(seq));
  }
};

LOWRANKKV_NAMESPACE_END
