// SPDX-License-Identifier: Apache-2.0
/// @file cuda/compress/compress.cuh  Rows leave full rank: what is decided of them, by what, in which order, and the launches that store them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "lowrankkv/cuda/cache/cache_base.cuh"
#include "lowrankkv/cuda/compress/evict.cuh"
#include "lowrankkv/cuda/compress/prompt_parts.cuh"
#include "lowrankkv/cuda/decode/residuals.cuh"
#include "lowrankkv/cuda/state/append_rows.cuh"
#include "lowrankkv/cuda/store/compaction/place_rows.cuh"
#include "lowrankkv/cuda/update/adapt.cuh"
#include "lowrankkv/cuda/update/frequent_directions.cuh"
#include "lowrankkv/cuda/update/publish_on_device.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief How a cache's rows leave full rank, of tails and of prompts.
template <class Basis, class Updater, class TokenPolicy, class Quantizer, class EpochPolicy>
class FlushCalls : public CacheBase<Basis, Updater, TokenPolicy, Quantizer, EpochPolicy> {
 public:  // CompressedKVCache inherits it privately
  using Base = CacheBase<Basis, Updater, TokenPolicy, Quantizer, EpochPolicy>;
  using Base::Base;
  using Base::config_, Base::layer_, Base::policies_, Base::statistics_;
  using Base::rolls, Base::sketches, Base::exempts_in_parts, Base::joins, Base::coded_groups, Base::scale_groups;
  using typename Base::Codec;
  using typename Base::Rows;
  using typename Base::Rule;

  /// Moves the `count` oldest rows of each slot out of full rank: of its tail, or of a packed prompt (one slot). Pages were checked. @param queries  the last of the prompt's, if any are known
  void compress(std::span<const int> slots, std::int64_t count, const RowSource& source, const CompressScratch& scratch, Phase phase, const ScoreQueries& queries, cudaStream_t stream) {
    for (std::size_t first = 0; first < slots.size(); first += kMaxBatch) {
      Leaving leaving;
      leaving.count = static_cast<std::int32_t>((std::min)(slots.size() - first, std::size_t{kMaxBatch}));
      std::int64_t most_full = 0, most_compressed = 0, most_candidates = 0;
      for (int i = 0; i < leaving.count; ++i) {
        const int slot = slots[first + static_cast<std::size_t>(i)];
        this->describe(leaving, i, slot, count, phase);
        most_candidates = (std::max)(most_candidates, std::int64_t{leaving.candidates(i)});
        const HostSequence& now = layer_.sequence(slot);
        const RowList weighed = layer_.tables().weighed;
        if (this->replaces_rows(leaving, i, now)) own_weighed_pages(layer_, slot, stream);
        if constexpr (Rows::keeps_masses) limit_rows(layer_, slot, leaving.limit[i], this->ever_pinned(), stream);
        SequenceRows after = now;
        this->add_most(after, leaving, i, phase);
        layer_.add_pages(slot, after, stream);
        const auto most_added = [&](RowList list) { return std::int64_t{leaving.added(list, weighed, i, static_cast<std::int32_t>(now.least_rows(list)))}; };
        most_full = (std::max)(most_full, most_added(RowList::full));
        most_compressed = (std::max)(most_compressed, (Rows::keeps_masses && rolls) || this->counts_vary(phase) ? std::int64_t{this->most_compressed(leaving, i, phase)} : most_added(RowList::compressed));
      }
      std::pair<RowOrder, RowOrder> orders;  // of the full list, of the compressed one
      [[maybe_unused]] std::int64_t replacing = 0;
      [[maybe_unused]] RowOrder& order = Rows::compresses ? orders.second : orders.first;
      if constexpr (Rows::by_scores) {
        if (phase == Phase::prefill && (Rows::keeps_masses || leaving.candidates(0) > 0)) {
          const AttentionScores wanted = attention_scores(policies_.token_policy);
          order = choose_kept(layer_, leaving, scratch, enqueue_scores(layer_, scratch, queries.last(wanted.window), wanted, leaving, stream), !Rows::compresses, stream);
        }
      }
      [[maybe_unused]] const float* const own_masses = source.packed == nullptr ? nullptr : scratch.masses;
      if constexpr (Rows::keeps_masses) {
        const float* masses = own_masses;
        if (order.rows != nullptr) masses = mask_scores(layer_, scratch, masses, order, leaving.candidates(0) + (Rows::compresses ? 0 : leaving.pinned[0]), leaving.rows[0], stream);
        order = evict_rows<rolls || Rows::weighs_both>(layer_, leaving, this->ever_pinned(), masses, source, scratch, replacing, stream);
      }
      const bool in_parts = sketches && phase == Phase::prefill && orders.second.rows != nullptr, counted = in_parts && exempts_in_parts;
      const std::int32_t* counts = nullptr;  // of rows that come to the lists, where only the device knows
      if constexpr (Rule::adapts && Rows::compresses) {
        Leaving rolling = leaving;
        for (int i = 0; i < leaving.count && rolls && least_error(policies_.token_policy) > 0.0F; ++i) {  // it may turn out that all of them are compressed
          rolling.full[i] = leaving.pinned[i];
          rolling.compressed[i] = leaving.candidates(i);
        }
        if constexpr (sketches) {
          if (in_parts) compress_in_parts(leaving, orders.second, source, scratch, stream);
          for (int one = 0; one < leaving.count && most_candidates > 0 && !in_parts; one += kAdaptBatch) {
            roll_over<coded_groups>(layer_, policies_.updater, rolling, one, (std::min)(kAdaptBatch, leaving.count - one), source, orders.second.from(one, config_.shape.num_kv_heads), 0, 0, scratch, stream);
          }
        } else {
          if (most_candidates > 0) adapt_leaving(rolling, source, scratch, phase, orders.second, queries, stream);
        }
      }
      if constexpr (Rows::by_errors) {
        const bool any = std::any_of(leaving.full, leaving.full + leaving.count, [&](const std::int32_t& full) { return full > leaving.pinned[&full - leaving.full]; });
        if ((any || (Rows::weighs_both && most_candidates > 0)) && !counted) {
          orders = exempt_outliers<coded_groups, joins>(layer_, leaving, relative_errors(policies_.token_policy), least_error(policies_.token_policy), orders.second, source, scratch, stream);
          counts = orders.first.ends;
        }
      }
      if constexpr (Rows::weighs_both) {
        if (!in_parts) note_masses(layer_, leaving, own_masses, scratch.rows, orders.first, orders.second, stream);
      }
      if (most_full > 0 && !counted) launch_store<StoreForm::full, RowPath::words>(leaving, source, orders.first, {}, most_full, config_.full_type, stream);
      if (most_compressed > 0 && !in_parts) store_compressed(leaving, source, scratch, orders.second, {}, most_compressed, stream);
      if constexpr (Rows::keeps_masses && Rows::compresses && !rolls && !Rows::weighs_both) {
        if (replacing > 0) {
          store_compressed(leaving, source, scratch, orders.second, scratch.loose, replacing, stream);
          place_rows(layer_, leaving, scratch.loose, {scratch.rest, scratch.rows}, replacing, stream);
        }
      }
      note_stored_kernel<><<<static_cast<unsigned>(leaving.count), 128, 0, stream>>>(layer_.tables(), leaving, source.packed == nullptr, !counted, !in_parts, counts);
      check(cudaGetLastError(), "note_stored_kernel");
      const bool asks = counted || counts != nullptr || Rows::weighs_both;  // the host does not know how many rows came
      if (asks) read_rows(layer_, {leaving.slots, static_cast<std::size_t>(leaving.count)}, stream);
      for (int i = 0; i < leaving.count; ++i) {
        HostSequence& now = layer_.sequence(leaving.slots[i]);
        if (!asks) now.add_rows(leaving, i, layer_.tables().weighed);
        if (source.packed == nullptr) now.tail_length -= static_cast<std::int32_t>(count);
        if (config_.keep_residuals) {
          const LeftRows left{source, leaving.slots[i], leaving.rows[i], source.packed == nullptr ? layer_.tables().ring_rows() - leaving.rows[i] : 0, leaving.position[i]};
          note_residuals<coded_groups, joins, Rows::keeps_masses>(layer_, left, leaving.full[i], this->most_compressed(leaving, i, phase), scratch.decoded, stream);
        }
        if (asks && source.packed == nullptr) layer_.settle(leaving.slots[i], stream, true);  // pages that lists might have taken; of a prompt, at its end
      }
      statistics_.flushes += leaving.count;
    }
  }

  /// Flushes every tail that is longer than kept_rows().
  void flush(std::span<const SequenceId> seqs, cudaStream_t stream) {
    std::vector<int> slots = this->idle_slots(seqs);
    layer_.pool().allocator().require(this->pages_to_flush(slots, 0));
    for (;;) {
      std::erase_if(slots, [&](int slot) { return layer_.sequence(slot).tail_length <= this->kept_rows(); });
      if (slots.empty()) return;
      std::int64_t weighed = 0;
      for (const int slot : slots) weighed = (std::max)(weighed, layer_.sequence(slot).num_rows(layer_.tables().weighed));
      const int interval = config_.flush_interval;
      compress(slots, interval, {}, compress_scratch(layer_, 0, 0, this->lists_of(slots.size(), Phase::decode), interval, weighed, this->ever_pinned()), Phase::decode, {}, stream);
    }
  }

 private:
  /// Rows of a prompt that scores or masses chose go under epochs that begin when values say so, part by part; where errors choose too, the host is told how many rows lists have then.
  void compress_in_parts(const Leaving& leaving, const RowOrder& kept, const RowSource& source, const CompressScratch& scratch, cudaStream_t stream) {
    const std::int32_t length = config_.flush_interval;
    for_each_part(layer_, leaving, kept, length, scratch, stream, [&](const Leaving& part, const RowOrder& order, std::int32_t before) -> const std::int32_t* {
      const std::int64_t first = std::int64_t{order.part} * length, exempt = exempt_rows(policies_.token_policy, part.position[0] + first, (std::min)(std::int64_t{length}, part.rows[0] - first), Phase::prefill);
      const float least = least_error(policies_.token_policy);
      roll_over<coded_groups>(layer_, policies_.updater, part, 0, 1, source, order, least > 0.0F ? 0 : static_cast<int>(exempt), before, scratch, stream);
      const std::int64_t most = (std::min)(part.compressed[0], length);
      if constexpr (exempts_in_parts) {
        const std::int64_t pinned = order.part == 0 ? part.pinned[0] : 0;
        if (exempt + pinned > 0) {
          const auto [full, compressed] = exempt_of_part<coded_groups>(layer_, part, order, length, exempt, relative_errors(policies_.token_policy), least, source, scratch, stream);
          if constexpr (Rows::weighs_both) note_masses(layer_, part, scratch.masses, scratch.rows, full, compressed, stream);
          launch_store<StoreForm::full, RowPath::words>(part, source, full, {}, exempt + pinned, config_.full_type, stream);
          store_compressed(part, source, scratch, compressed, {}, most, stream);
          return scratch.exempt;
        }
      }
      if constexpr (Rows::weighs_both) {
        Leaving none = part;
        none.full[0] = 0;
        note_masses(layer_, none, scratch.masses, scratch.rows, {}, order, stream);
      }
      store_compressed(part, source, scratch, order, {}, most, stream);
      return nullptr;
    });
  }
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
        decide_publications(layer_, leaving, first, count, own, phase, scores == nullptr || selection.share > 0.0F, scratch, stream);
        roll_epochs<coded_groups>(layer_, leaving, first, count, source, own, 0, 0, phase == Phase::prefill ? kMomentSplits : 1, scratch, stream);
      }
    }
    for (int i = 0; i < leaving.count; ++i) {
      if constexpr (!rolls) {
        // Where it might turn out that all rows stay full, too: settle() closes a segment of none.
        if (this->most_compressed(leaving, i, phase) > 0) open_segment<coded_groups>(layer_, leaving.slots[i], scratch, statistics_, stream);
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
