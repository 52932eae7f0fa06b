// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache/cache_base.cuh  Under CompressedKVCache<Cuda, ...>: its layer and sequences, what is checked before a call changes anything.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lowrankkv/core/calls.hpp"
#include "lowrankkv/core/statistics.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cuda/basis/folded_basis.cuh"
#include "lowrankkv/cuda/cache/cache_rules.cuh"
#include "lowrankkv/cuda/cache/open_prompt.cuh"
#include "lowrankkv/cuda/layer/layer_state.cuh"
#include "lowrankkv/cuda/scores/attention_scores.cuh"
#include "lowrankkv/cuda/state/append_rows.cuh"
#include "lowrankkv/cuda/update/compress_scratch.cuh"
#include "lowrankkv/detail/sequence_table.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief The state of a cache and its checks; CompressedKVCache<Cuda, ...> is the public face.
template <class Basis, class Updater, class TokenPolicy, class Quantizer, class EpochPolicy>
class CacheBase : public CacheRules<Basis, Updater, TokenPolicy, Quantizer, EpochPolicy> {
 public:  // CompressedKVCache inherits it privately
  using Known = CacheRules<Basis, Updater, TokenPolicy, Quantizer, EpochPolicy>;
  using typename Known::Codec;
  using typename Known::PolicySet;
  using typename Known::Rows;
  using typename Known::Rule;
  using Known::coded_groups;
  using Known::joins;
  using Known::rolls, Known::sketches, Known::exempts_in_parts;
  using Known::scale_groups;

  CacheBase(const CacheConfig& config, const LayerBasis& basis, const PolicySet& policies, std::shared_ptr<PagePool> pool, const LentMemory& workspace)
      : policies_(policies), config_(Known::checked(config, basis, policies, pool.get())), layer_(config_, Known::tiles_of(config_, basis, policies), folded_basis(basis, policies.quantizer, config_.shape.head_dim), Known::most_rows(config_, policies), Known::limits(policies), Known::listed(), std::move(pool), workspace),
        sequences_(config_), prompts_(config.max_sequences) {
    // Flushes of all sequences at once find their scratch memory there.
    compress_scratch(layer_, 0, 0, lists_of(static_cast<std::size_t>(config_.max_sequences), Phase::decode), config_.flush_interval, layer_.max_rows(layer_.tables().weighed), ever_pinned());
  }

  /// Rows of a sequence that are pinned, at most.
  std::int64_t ever_pinned() const { return pinned_rows(policies_.token_policy, 0, config_.max_tokens); }
  /// Lists of rows are chosen on the device: of the heads of one prompt, or of all sequences that are maintained at once.
  std::size_t lists_of(std::size_t sequences, Phase phase) const {
    const bool any = Rows::by_errors || Rows::keeps_masses || (phase == Phase::prefill && Known::scoring_window(policies_) > 0);
    return any ? static_cast<std::size_t>(config_.shape.num_kv_heads) * (std::min)(sequences, std::size_t{kMaxBatch}) : 0;
  }

  /// The slot of a sequence whose prompt is complete. @throws StateError if it is not
  int idle_slot(SequenceId seq) const {
    const int slot = sequences_.find(seq);
    if (prompts_.of(slot).open) {
      ::lowrankkv::detail::fail<StateError>("sequence ", seq, ": its prompt of ", tokens_of(slot), " tokens so far continues, a complete one is expected; call finish_prompt");
    }
    return slot;
  }
  /// The same of some sequences; one that is named twice is there once.
  std::vector<int> idle_slots(std::span<const SequenceId> seqs) const {
    std::vector<int> slots;
    for (const SequenceId seq : seqs) {
      const int slot = idle_slot(seq);
      if (std::find(slots.begin(), slots.end(), slot) == slots.end()) slots.push_back(slot);
    }
    return slots;
  }
  /// Tokens of a sequence, those of an unfinished chunk included.
  std::int64_t tokens_of(int slot) const { return layer_.sequence(slot).num_tokens + prompts_.of(slot).rows(); }

  /// Largest magnitude that may be stored. NaN and Inf never are: in a tail they would reach rows that come after them.
  float limit() const {
    if (!config_.check_finite) return max_finite(DType::f32);
    const float coded = config_.full_row_bits == 8 ? kScaledHalf * max_finite(DType::f16) : max_finite(DType::f32);  // so many steps, each an f16
    return (std::min)(max_finite(config_.full_type), coded);
  }

  void check_views(const KeyView& key, const ValueView& value, std::int64_t sequences, std::int64_t m) const {
    ::lowrankkv::detail::check_keys_and_values(key, value, sequences, m, config_.shape.num_kv_heads, config_.shape.head_dim);
  }

  /// Raises unless these are queries of so many tokens, side by side in no pages.
  void check_query(const QueryView& query, std::int64_t tokens) const {
    ::lowrankkv::detail::check_rows("query", query, tokens, config_.shape.num_qo_heads, config_.shape.head_dim);
    if (query.pages.used()) ::lowrankkv::detail::fail<ShapeError>("query: in pages of ", query.pages.page_tokens, " tokens, 0 expected on this backend");
  }
  void check_queries(const QueryView& query, const OutputView& out, const LseView& lse, std::int64_t tokens) const {
    check_query(query, tokens);
    ::lowrankkv::detail::check_rows("out", out, tokens, config_.shape.num_qo_heads, config_.shape.head_dim);
    if (lse.data != nullptr) check_lse(lse, tokens);
  }
  void check_lse(const LseView& lse, std::int64_t tokens) const {
    ::lowrankkv::detail::check_equal("num_heads", "cache", config_.shape.num_qo_heads, "lse", lse.num_heads);
    ::lowrankkv::detail::check_equal("num_tokens", "expected", tokens, "lse", lse.num_tokens);
  }
  /// Raises what certify() raises. Returns query tokens of a sequence.
  int check_certify(std::span<const SequenceId> seqs, const QueryView& query, const LseView& lse, const CertificateView& out) const {
    using ::lowrankkv::detail::fail;
    if (!config_.keep_residuals) fail<StateError>("certify: keep_residuals is ", config_.keep_residuals, ", 1 is needed: norms of residuals are kept as rows are stored");
    const std::int64_t count = static_cast<std::int64_t>(seqs.size());
    if (count == 0 || query.num_tokens == 0 || query.num_tokens % count != 0) fail<ShapeError>("certify: ", query.num_tokens, " query tokens for ", count, " sequences");
    check_query(query, query.num_tokens);
    if (lse.data == nullptr) fail<ShapeError>("lse: null pointer with num_tokens ", query.num_tokens);
    check_lse(lse, query.num_tokens);
    ::lowrankkv::detail::check_equal("num_tokens", "expected", query.num_tokens, "certificates", out.data == nullptr ? 0 : out.num_tokens);
    ::lowrankkv::detail::check_equal("num_heads", "cache", config_.shape.num_qo_heads, "certificates", out.num_heads);
    const std::int64_t m = query.num_tokens / count;
    if (m > config_.max_query_tokens) fail<ShapeError>("certify: ", m, " query tokens a sequence, max_query_tokens ", config_.max_query_tokens);
    for (const SequenceId seq : seqs) {
      const int tail = layer_.sequence(idle_slot(seq)).tail_length;
      if (m > tail) fail<ShapeError>("certify: ", m, " query tokens, sequence ", seq, " has ", tail, " tokens in its tail");
    }
    return static_cast<int>(m);
  }
  /// Raises unless masses are there for all sequences, in all positions; captured, in all that replays can reach.
  void check_masses(std::span<const SequenceId> seqs, const MassView& mass, bool captured) const {
    check_mass(config_, mass, static_cast<std::int64_t>(seqs.size()), captured);
    for (const SequenceId seq : seqs) {
      const std::int64_t tokens = layer_.sequence(idle_slot(seq)).num_tokens;
      if (mass.num_positions < tokens) ::lowrankkv::detail::fail<ShapeError>("mass: ", mass.num_positions, " positions, sequence ", seq, " has ", tokens, " tokens");
    }
  }

  /// Adds attention received to what rows have received before.
  void accumulate_masses(std::span<const SequenceId> seqs, const MassView& mass, cudaStream_t stream) const {
    if (mass.data == nullptr) return;
    const bool replayed = capturing(stream);
    check_masses(seqs, mass, replayed);
    check_distinct("accumulate", seqs);
    const HeadRows most{static_cast<std::int32_t>(layer_.max_rows(RowList::full)), static_cast<std::int32_t>(layer_.max_rows(RowList::compressed))};
    std::int64_t rows = replayed ? std::int64_t{layer_.tables().weighed_rows(most)} + config_.tail_capacity : 0;
    for (const SequenceId seq : seqs) {
      const HostSequence& now = layer_.sequence(sequences_.find(seq));
      rows = (std::max)(rows, std::int64_t{layer_.tables().weighed_rows(now.rows)} + now.tail_length);
    }
    if (rows == 0) return;
    for_each_batch(seqs, [&](const Batch& batch, std::int64_t first) { enqueue_accumulate(layer_, batch, {mass.data, mass.num_positions}, static_cast<int>(first), rows, stream); });
  }

  /// Describes the rows that leave a slot as sequence `i` of a batch. @param before  so many leave before them
  void describe(Leaving& leaving, int i, int slot, std::int64_t count, Phase phase, std::int64_t before = 0) const {
    const RowCounts counts = row_counts(policies_.token_policy, layer_.sequence(slot).first_tail() + before, count, phase);
    leaving.slots[i] = slot;
    leaving.rows[i] = static_cast<std::int32_t>(count);
    leaving.full[i] = static_cast<std::int32_t>(counts.full);
    leaving.compressed[i] = static_cast<std::int32_t>(counts.compressed);
    leaving.pinned[i] = static_cast<std::int32_t>(counts.pinned);
    leaving.position[i] = static_cast<std::int32_t>(layer_.sequence(slot).first_tail() + before);
    leaving.limit[i] = static_cast<std::int32_t>(counts.limit);
  }
  /// Whether leaving rows may take places of stored ones: in the head whose list has the most, so that the fewest go to its end.
  bool replaces_rows(const Leaving& leaving, int i, const SequenceRows& now) const {
    const RowList weighed = layer_.tables().weighed;
    const std::int32_t stored = layer_.tables().weighed_rows(now.rows);
    if (Rows::weighs_both) return stored + leaving.candidates(i) > leaving.limit[i];
    return Rows::keeps_masses && (stored > leaving.limit[i] || leaving.added(weighed, weighed, i, stored) < leaving.offered(weighed, i));
  }
  /// Whether how many rows stay full for their errors, only values say: of no part of a prompt might a head keep one, none might have a large enough error, and masses might keep none.
  bool counts_vary(Phase phase) const { return Rows::weighs_both || (Known::exempts_in_parts && phase == Phase::prefill) || least_error(policies_.token_policy) > 0.0F; }
  /// How many rows of a head come to the compressed list, at most.
  std::int32_t most_compressed(const Leaving& leaving, int i, Phase phase) const { return counts_vary(phase) ? leaving.candidates(i) : leaving.compressed[i]; }
  /// Adds the rows that leave sequence `i` of a batch, as many as lists may get.
  void add_most(SequenceRows& after, const Leaving& leaving, int i, Phase phase) const {
    if (Rows::weighs_both) return after.add_weighed(leaving, i, leaving.limit[i] + static_cast<std::int32_t>(ever_pinned()));
    after.add_rows(leaving, i, layer_.tables().weighed);
    after.rows.num_compressed += most_compressed(leaving, i, phase) - leaving.compressed[i];
  }
  /// Adds the pages for rows that leave in turns. Returns the rows of the lists then. @param turn  gives how many leave next; 0: no more do
  template <class Turn>
  SequenceRows demand_rows(int slot, Phase phase, PageDemand& demand, Turn&& turn) const {
    SequenceRows after = layer_.sequence(slot);
    Leaving leaving;
    bool replaces = false;
    std::int64_t before = 0;
    for (std::int64_t count = turn(); count > 0; before += count, count = turn()) {
      describe(leaving, 0, slot, count, phase, before);
      replaces = replaces || replaces_rows(leaving, 0, after);
      if (!Rows::weighs_both) after.limit_rows(leaving.limit[0], layer_.tables().weighed);
      add_most(after, leaving, 0, phase);
    }
    layer_.demand_rows(slot, after, replaces, demand);
    return after;
  }
  /// Rows of a tail beyond which it is flushed.
  int kept_rows() const { return recent_rows(policies_.token_policy) + config_.flush_interval; }
  /// Upper bound of the pages for the flushes that are due when each slot has `added` more tokens.
  std::int64_t pages_to_flush(std::span<const int> slots, std::int64_t added) const {
    PageDemand demand;
    for (const int slot : slots) {
      std::int64_t tail = layer_.sequence(slot).tail_length + added;
      demand_rows(slot, Phase::decode, demand, [&]() -> std::int64_t {
        if (tail <= kept_rows()) return 0;
        tail -= config_.flush_interval;
        return config_.flush_interval;
      });
    }
    return demand.total();
  }

  /// Rows for the tails of some sequences: how many each has.
  int check_tokens(std::span<const SequenceId> seqs, const KeyView& key, const ValueView& value) const {
    const std::int64_t count = static_cast<std::int64_t>(seqs.size());
    if (count == 0 || key.num_tokens % count != 0) ::lowrankkv::detail::fail<ShapeError>("append: ", key.num_tokens, " tokens for ", count, " sequences");
    check_views(key, value, count, key.num_tokens / count);
    return static_cast<int>(key.num_tokens / count);
  }
  /// Raises unless m more tokens fit each sequence, and its tail.
  void check_advance(std::span<const SequenceId> seqs, int m, std::int64_t tail_capacity) const {
    check_distinct("append", seqs);
    for (const SequenceId seq : seqs) {
      const HostSequence& now = layer_.sequence(idle_slot(seq));
      if (m > tail_capacity - now.tail_length) {
        ::lowrankkv::detail::fail<CapacityError>("tail_capacity: ", tail_capacity, ", sequence ", seq, " has ", now.tail_length, " rows in its tail, given ", m, "; call maintain");
      }
      const std::int64_t most = sequences_.max_tokens(sequences_.find(seq));
      if (m > most - now.num_tokens) ::lowrankkv::detail::fail<CapacityError>("max_tokens: ", most, ", sequence ", seq, " has ", now.num_tokens, ", given ", m);
    }
  }
  void advance_host(std::span<const SequenceId> seqs, int m) {
    for (const SequenceId seq : seqs) {
      HostSequence& now = layer_.sequence(sequences_.find(seq));
      now.tail_length += m;
      now.num_tokens += m;
    }
  }

  /// Whether what is enqueued will run later, perhaps often.
  static bool capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

  /// Raises while a graph is captured: what the call decides on the host would be replayed without it.
  static void refuse_capture(const char* call, cudaStream_t stream) {
    if (capturing(stream)) ::lowrankkv::detail::fail<StateError>(call, ": the stream is capturing a graph; only append, attend and accumulate can be captured");
  }

  /// Calls f(batch, index of its first sequence) for as many sequences at a time as a launch takes.
  template <class Function>
  void for_each_batch(std::span<const SequenceId> seqs, Function&& function) const {
    for (std::size_t first = 0; first < seqs.size(); first += kMaxBatch) {
      Batch batch;
      batch.count = static_cast<std::int32_t>((std::min)(seqs.size() - first, std::size_t{kMaxBatch}));
      for (int i = 0; i < batch.count; ++i) batch.slots[i] = sequences_.find(seqs[first + static_cast<std::size_t>(i)]);
      function(batch, static_cast<std::int64_t>(first));
    }
  }

  /// Raises if a sequence is named twice in a call that changes it.
  static void check_distinct(const char* call, std::span<const SequenceId> seqs) {
    for (std::size_t i = 0; i < seqs.size(); ++i) {
      const bool before = std::find(seqs.begin(), seqs.begin() + static_cast<std::ptrdiff_t>(i), seqs[i]) != seqs.begin() + static_cast<std::ptrdiff_t>(i);
      if (before) ::lowrankkv::detail::fail<SequenceError>(call, ": sequence ", seqs[i], " stands at place ", i, " and before");
    }
  }

  void enqueue_append(const Batch& batch, const KeyView& key, const ValueView& value, std::int64_t first, int m, cudaStream_t stream) const {
    with_rows(key, value, [&](auto keys, auto values) { append_kernel<<<static_cast<unsigned>(batch.count), 256, 0, stream>>>(layer_.tables(), batch, keys, values, first, m, limit()); });
    check(cudaGetLastError(), "append_kernel");
  }

  PolicySet policies_;
  CacheConfig config_;
  LayerState layer_;
  ::lowrankkv::detail::SequenceTable sequences_;
  OpenPrompts prompts_;
  CacheStatistics statistics_;
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
