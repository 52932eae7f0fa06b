// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache_base.cuh  Under CompressedKVCache<Cuda, ...>: its layer and sequences, what is checked before a call changes anything, and
/// the launches that calls share.
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
#include "lowrankkv/cuda/adapt.cuh"
#include "lowrankkv/cuda/attention_mass.cuh"
#include "lowrankkv/cuda/cache_rules.cuh"
#include "lowrankkv/cuda/evict.cuh"
#include "lowrankkv/cuda/frequent_directions.cuh"
#include "lowrankkv/cuda/open_prompt.cuh"
#include "lowrankkv/cuda/place_rows.cuh"
#include "lowrankkv/cuda/prompt_parts.cuh"
#include "lowrankkv/cuda/residuals.cuh"
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
  using Known::rolls, Known::sketches;
  using Known::scale_groups;

  CacheBase(const CacheConfig& config, const LayerBasis& basis, const PolicySet& policies, std::shared_ptr<PagePool> pool, const LentMemory& workspace)
      : policies_(policies), config_(Known::checked(config, basis, policies, pool.get())), layer_(config_, Known::tiles_of(config_, basis, policies), folded_basis(basis, policies.quantizer, config_.shape.head_dim), Known::most_rows(config_, policies), Known::limits(policies), Known::listed(), std::move(pool), workspace),
        sequences_(config_), prompts_(config.max_sequences) {
    // Flushes of all sequences at once find their scratch memory there.
    compress_scratch(layer_, 0, 0, lists_of(static_cast<std::size_t>(config_.max_sequences), Phase::decode), config_.flush_interval, layer_.max_rows(layer_.tables().weighed));
  }

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
    const RowList weighed = layer_.tables().weighed;
    std::int64_t rows = replayed ? layer_.max_rows(weighed) + config_.tail_capacity : 0;
    for (const SequenceId seq : seqs) {
      const HostSequence& now = layer_.sequence(sequences_.find(seq));
      rows = (std::max)(rows, now.num_rows(weighed) + now.tail_length);
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
    const std::int32_t stored = static_cast<std::int32_t>(now.num_rows(weighed));
    return Rows::keeps_masses && (stored > leaving.limit[i] || (weighed == RowList::full ? 0 : leaving.full[i]) + leaving.added(weighed, weighed, i, stored) < leaving.rows[i]);
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
      after.limit_rows(leaving.limit[0], layer_.tables().weighed);
      after.add_rows(leaving, 0, layer_.tables().weighed);
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

  /// Moves the `count` oldest rows of each slot out of full rank: of its tail, or of a packed prompt (one slot). Pages were checked. @param queries  the last of the prompt's, if any are known
  void compress(std::span<const int> slots, std::int64_t count, const RowSource& source, const CompressScratch& scratch, Phase phase, const ScoreQueries& queries, cudaStream_t stream) {
    for (std::size_t first = 0; first < slots.size(); first += kMaxBatch) {
      Leaving leaving;
      leaving.count = static_cast<std::int32_t>((std::min)(slots.size() - first, std::size_t{kMaxBatch}));
      std::int64_t most_full = 0, most_compressed = 0, most_candidates = 0;
      for (int i = 0; i < leaving.count; ++i) {
        const int slot = slots[first + static_cast<std::size_t>(i)];
        describe(leaving, i, slot, count, phase);
        most_candidates = (std::max)(most_candidates, std::int64_t{leaving.candidates(i)});
        const HostSequence& now = layer_.sequence(slot);
        const RowList weighed = layer_.tables().weighed;
        if (replaces_rows(leaving, i, now)) layer_.own_pages(slot, weighed, 0, now.num_rows(weighed), stream);
        if constexpr (Rows::keeps_masses) limit_rows(layer_, slot, leaving.limit[i], pinned_rows(policies_.token_policy, 0, config_.max_tokens), stream);
        SequenceRows after = now;
        after.add_rows(leaving, i, weighed);
        layer_.add_pages(slot, after, stream);
        const auto most_added = [&](RowList list) { return std::int64_t{leaving.added(list, weighed, i, static_cast<std::int32_t>(now.least_rows(list)))}; };
        most_full = (std::max)(most_full, most_added(RowList::full));
        most_compressed = (std::max)(most_compressed, Rows::keeps_masses && rolls ? std::int64_t{leaving.most_compressed(i)} : most_added(RowList::compressed));
      }
      std::pair<RowOrder, RowOrder> orders;  // of the full list, of the compressed one
      [[maybe_unused]] std::int64_t replacing = 0;
      if constexpr (Rows::keeps_masses) (Rows::compresses ? orders.second : orders.first) = evict_rows<rolls>(layer_, leaving, pinned_rows(policies_.token_policy, 0, config_.max_tokens), source, scratch, replacing, stream);
      if constexpr (Rows::by_scores) {
        if (phase == Phase::prefill && leaving.candidates(0) > 0) {
          const AttentionScores wanted = attention_scores(policies_.token_policy);
          const RowOrder kept = choose_kept(layer_, leaving, scratch, enqueue_scores(layer_, scratch, queries.last(wanted.window), wanted, leaving, stream), !Rows::compresses, stream);
          (Rows::compresses ? orders.second : orders.first) = kept;
        }
      }
      const bool in_parts = sketches && phase == Phase::prefill && orders.second.rows != nullptr;  // and stored so
      if constexpr (Rule::adapts && Rows::compresses) {
        if (most_candidates > 0) {
          if constexpr (sketches) {
            const auto roll = [&](const Leaving& some, int one, const RowOrder& order, std::int32_t before) {
              roll_over<coded_groups>(layer_, policies_.updater, some, one, (std::min)(kAdaptBatch, some.count - one), source, order, before, scratch, stream);
            };
            if (in_parts) {
              for_each_part(layer_, leaving, orders.second, config_.flush_interval, scratch, stream, [&](const Leaving& part, const RowOrder& order, std::int32_t before) {
                roll(part, 0, order, before);
                store_compressed(part, source, scratch, order, {}, (std::min)(part.most_compressed(0), config_.flush_interval), stream);
              });
            } else {
              for (int one = 0; one < leaving.count; one += kAdaptBatch) roll(leaving, one, orders.second.from(one, config_.shape.num_kv_heads), 0);
            }
          } else {
            adapt_leaving(leaving, source, scratch, phase, orders.second, queries, stream);
          }
        }
      }
      if constexpr (Rows::by_errors) {
        const bool any = std::any_of(leaving.full, leaving.full + leaving.count, [&](const std::int32_t& full) { return full > leaving.pinned[&full - leaving.full]; });
        if (any) orders = exempt_outliers<coded_groups, joins>(layer_, leaving, relative_errors(policies_.token_policy), orders.second, source, scratch, stream);
      }
      if (most_full > 0) launch_store<StoreForm::full, RowPath::words>(leaving, source, orders.first, {}, most_full, config_.full_type, stream);
      if (most_compressed > 0 && !in_parts) store_compressed(leaving, source, scratch, orders.second, {}, most_compressed, stream);
      if constexpr (Rows::keeps_masses && Rows::compresses && !rolls) {
        if (replacing > 0) {
          store_compressed(leaving, source, scratch, orders.second, scratch.loose, replacing, stream);
          place_rows(layer_, leaving, scratch.loose, {scratch.rest, scratch.rows}, replacing, stream);
        }
      }
      note_stored_kernel<><<<static_cast<unsigned>(leaving.count), 128, 0, stream>>>(layer_.tables(), leaving, source.packed == nullptr, in_parts);
      check(cudaGetLastError(), "note_stored_kernel");
      for (int i = 0; i < leaving.count; ++i) {
        HostSequence& now = layer_.sequence(leaving.slots[i]);
        now.add_rows(leaving, i, layer_.tables().weighed);
        if (source.packed == nullptr) now.tail_length -= static_cast<std::int32_t>(count);
        if (config_.keep_residuals) {
          const LeftRows left{source, leaving.slots[i], leaving.rows[i], source.packed == nullptr ? layer_.tables().ring_rows() - leaving.rows[i] : 0, leaving.position[i]};
          note_residuals<coded_groups, joins, Rows::keeps_masses>(layer_, left, leaving.full[i], leaving.compressed[i], scratch.decoded, stream);
        }
      }
      statistics_.flushes += leaving.count;
    }
  }

  /// Flushes every tail that is longer than kept_rows().
  void flush(std::span<const SequenceId> seqs, cudaStream_t stream) {
    std::vector<int> slots = idle_slots(seqs);
    layer_.pool().allocator().require(pages_to_flush(slots, 0));
    for (;;) {
      std::erase_if(slots, [&](int slot) { return layer_.sequence(slot).tail_length <= kept_rows(); });
      if (slots.empty()) return;
      std::int64_t weighed = 0;
      for (const int slot : slots) weighed = (std::max)(weighed, layer_.sequence(slot).num_rows(layer_.tables().weighed));
      const int interval = config_.flush_interval;
      compress(slots, interval, {}, compress_scratch(layer_, 0, 0, lists_of(slots.size(), Phase::decode), interval, weighed), Phase::decode, {}, stream);
    }
  }

  PolicySet policies_;
  CacheConfig config_;
  LayerState layer_;
  ::lowrankkv::detail::SequenceTable sequences_;
  OpenPrompts prompts_;
  CacheStatistics statistics_;

 private:
  void adapt_leaving(const Leaving& leaving, const RowSource& source, const CompressScratch& scratch, Phase phase, const RowOrder& kept, const ScoreQueries& queries, cudaStream_t stream) {
    const PromptSelection selection = Rule::prompt_selection(policies_.updater);
    const float* scores = nullptr;
    if (queries.count > 0 && selection.share < 1.0F) {
      scores = enqueue_scores(layer_, scratch, queries.last(selection.scores.window), selection.scores, leaving, stream);
      if (kept.rows != nullptr) scores = mask_scores(layer_, scratch, scores, kept, leaving.candidates(0), leaving.rows[0], stream);
    }
    for (int first = 0; first < leaving.count; first += kAdaptBatch) {
      const int count = (std::min)(kAdaptBatch, leaving.count - first);
      const RowOrder own = kept.from(first, config_.shape.num_kv_heads);
      adapt(layer_, policies_.updater, leaving, first, count, source, scratch, phase, own, scores, selection.share, statistics_, stream);
      if constexpr (rolls) {
        decide_publications(layer_, leaving, first, count, own, phase, scratch, stream);
        roll_epochs<coded_groups>(layer_, leaving, first, count, source, own, 0, phase == Phase::prefill ? kMomentSplits : 1, scratch, stream);
      }
    }
    for (int i = 0; i < leaving.count; ++i) {
      if constexpr (!rolls) {
        if (leaving.compressed[i] > 0) open_segment<coded_groups>(layer_, leaving.slots[i], scratch, statistics_, stream);
      }
    }
  }
  /// Stores leaving rows of a list, at most so many of a sequence: those at its end, or those that wait in loose tiles.
  template <StoreForm form, RowPath path>
  void launch_store(const Leaving& leaving, const RowSource& source, const RowOrder& order, const LooseTiles& loose, std::int64_t most, DType type, cudaStream_t stream) const {
    constexpr int groups = form == StoreForm::codes ? scale_groups : 1;
    const std::size_t bytes = detail::store_bytes(form, path, config_.shape.head_dim, layer_.most_rank(), form == StoreForm::codes ? layer_.tiles().max_head_tile_bytes() : 0, groups);
    // A piece more, since lists go on inside a tile.
    const dim3 grid(static_cast<unsigned>((most + kStoreRows - 1) / kStoreRows + 1), static_cast<unsigned>(config_.shape.num_kv_heads), static_cast<unsigned>(leaving.count));
    detail::launch_kernel(store_rows_kernel<form, path, groups>, grid, kStoreThreads, bytes, "store_rows_kernel", stream, layer_.tables(), source, leaving, order, loose, type);
  }
  /// The same of compressed rows.
  void store_compressed(const Leaving& leaving, const RowSource& source, [[maybe_unused]] const CompressScratch& scratch, const RowOrder& order, const LooseTiles& loose, std::int64_t most, cudaStream_t stream) const {
    if constexpr (joins) store_latents<coded_groups>(layer_, leaving, source, most, order, loose, scratch.latents, stream);
    detail::with_path(config_.epoch_type != config_.full_type ? RowPath::wide : order.rows != nullptr ? RowPath::staged : RowPath::words, [&](auto path) {
      constexpr StoreForm form = Codec::form == CodedForm::codes ? StoreForm::codes : StoreForm::coefficients;
      launch_store<form, path()>(leaving, source, order, loose, most, layer_.tiles().coded_type, stream);
    });
  }
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
