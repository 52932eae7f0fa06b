// SPDX-License-Identifier: Apache-2.0
/// @file cuda/compress/compress.cuh  Moves rows out of full rank: the decisions about flushed rows
/// in their order, then the stores (cuda/compress/store_flushed.cuh).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <vector>

#include "lowrankkv/cuda/compress/evict.cuh"
#include "lowrankkv/cuda/compress/flushed_rows.cuh"
#include "lowrankkv/cuda/compress/prompt_parts.cuh"
#include "lowrankkv/cuda/compress/store_flushed.cuh"
#include "lowrankkv/cuda/decode/residuals.cuh"
#include "lowrankkv/cuda/layer/layer.cuh"
#include "lowrankkv/cuda/layer/read_rows.cuh"
#include "lowrankkv/cuda/state/append_rows.cuh"
#include "lowrankkv/cuda/store/compaction/place_rows.cuh"
#include "lowrankkv/cuda/update/adapt.cuh"
#include "lowrankkv/cuda/update/frequent_directions.cuh"
#include "lowrankkv/cuda/update/publish_on_device.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Rows that are flushed together, and the decisions made about them so far.
struct FlushedBatch {
  FlushBatch flushed;
  std::int64_t most_full = 0, most_compressed = 0;  ///< the most rows added to a list
  std::int64_t most_candidates = 0;  ///< the largest FlushBatch::candidates() of a sequence
  RowOrder full, compressed;         ///< which rows go to the lists
  std::int64_t replacing = 0;        ///< the most rows of a sequence that replace stored rows
  bool in_parts = false;             ///< compressed rows are stored part by part of a prompt
  bool counted = false;  ///< full rows are stored by parts too, and the device has counted both
  /// Device memory: rows added to the lists, if only the device knows them; else null.
  const std::int32_t* counts = nullptr;
};

/// Describes the rows that are flushed from some slots, and gives the sequences pages for them.
template <class Layer>
FlushedBatch begin_batch(Layer& layer, const CompressCall& call, std::span<const int> slots,
                         std::int64_t count) {
  FlushedBatch batch;
  FlushBatch& flushed = batch.flushed;
  flushed.count = static_cast<std::int32_t>(slots.size());
  const bool varies =
      (Layer::Rows::accumulates_scores && Layer::device_epochs) || counts_vary(layer, call.phase);
  for (int i = 0; i < flushed.count; ++i) {
    const int slot = slots[static_cast<std::size_t>(i)];
    describe_flushed(layer, flushed, i, slot, count, call.phase);
    batch.most_candidates = (std::max)(batch.most_candidates, std::int64_t{flushed.candidates(i)});
    const HostSequence& now = layer.state.sequence(slot);
    if (replaces_rows(layer, flushed, i, now)) own_scored_pages(layer.state, slot, call.stream);
    if constexpr (Layer::Rows::accumulates_scores) {
      limit_rows(layer.state, slot, flushed.limit[i], layer.most_pinned(), call.stream);
    }
    SequenceRows after = now;
    add_most(layer, after, flushed, i, call.phase);
    layer.state.add_pages(slot, after, call.stream);
    const auto most_added = [&](RowList list) {
      const RowList scored = layer.state.tables().scored;
      return std::int64_t{
          flushed.added(list, scored, i, static_cast<std::int32_t>(now.least_rows(list)))};
    };
    batch.most_full = (std::max)(batch.most_full, most_added(RowList::full));
    batch.most_compressed = (std::max)(
        batch.most_compressed, varies ? std::int64_t{most_compressed(layer, flushed, i, call.phase)}
                                      : most_added(RowList::compressed));
  }
  return batch;
}

/// Chooses which rows of a prompt are kept, by their scores.
template <class Layer>
void choose_by_scores(const Layer& layer, const CompressCall& call, FlushedBatch& batch) {
  using Rows = typename Layer::Rows;
  if (call.phase != Phase::prefill) return;
  if (!Rows::accumulates_scores && batch.flushed.candidates(0) <= 0) return;
  const AttentionScores wanted = attention_scores(layer.policies.token_policy);
  const float* scores = enqueue_scores(layer.state, call.scratch, call.queries.last(wanted.window),
                                       wanted, ScoreScope::kv_head, batch.flushed, call.stream);
  RowOrder& order = Rows::compresses ? batch.compressed : batch.full;
  order =
      choose_kept(layer.state, batch.flushed, call.scratch, scores, !Rows::compresses, call.stream);
}

/// Chooses which stored and flushed rows are kept, by their accumulated scores. Prompt scores may
/// have dropped some of the flushed rows before.
template <class Layer>
void evict_by_scores(const Layer& layer, const CompressCall& call, FlushedBatch& batch) {
  using Rows = typename Layer::Rows;
  const FlushBatch& flushed = batch.flushed;
  RowOrder& order = Rows::compresses ? batch.compressed : batch.full;
  const float* accumulated_scores = call.accumulated_scores();
  if (order.rows != nullptr) {
    const int kept = flushed.candidates(0) + (Rows::compresses ? 0 : flushed.pinned[0]);
    accumulated_scores = mask_scores(layer.state, call.scratch, accumulated_scores, order, kept,
                                     flushed.rows[0], call.stream);
  }
  constexpr bool compacts = Layer::device_epochs || Rows::scores_both;
  order = evict_rows<compacts>(layer.state, flushed, layer.most_pinned(), accumulated_scores,
                               call.source, call.scratch, batch.replacing, call.stream);
}

/// Stores the rows of a part of a prompt: its compressed rows, `exempt` rows that stay full for
/// their errors, and with the first part the pinned rows. Returns the row counts that
/// for_each_part() needs.
template <class Layer>
const std::int32_t* store_part_rows(const Layer& layer, const CompressCall& call,
                                    const FlushBatch& part, const RowOrder& order,
                                    [[maybe_unused]] std::int64_t exempt) {
  const std::int32_t length = layer.config.flush_interval;
  const std::int64_t most = (std::min)(part.compressed[0], length);
  [[maybe_unused]] const CompressScratch& scratch = call.scratch;
  if constexpr (Layer::exempts_in_parts) {
    const auto& policy = layer.policies.token_policy;
    const std::int64_t pinned = order.part == 0 ? part.pinned[0] : 0;
    if (exempt + pinned > 0) {
      const auto [full, compressed] = exempt_of_part<Layer::coded_groups>(
          layer.state, part, order, length, exempt, policy, call.source, scratch, call.stream);
      if constexpr (Layer::Rows::scores_both) {
        note_scores(layer.state, part, scratch.accumulated_scores, scratch.rows, full, compressed,
                    call.stream);
      }
      store_full(layer, call, part, full, exempt + pinned);
      store_compressed(layer, call, part, compressed, {}, most);
      return scratch.exempt;
    }
  }
  if constexpr (Layer::Rows::scores_both) {
    FlushBatch none = part;
    none.full[0] = 0;
    note_scores(layer.state, none, scratch.accumulated_scores, scratch.rows, {}, order,
                call.stream);
  }
  store_compressed(layer, call, part, order, {}, most);
  return nullptr;
}

/// Stores the rows that scores or accumulated scores kept of a prompt, part by part, under
/// device-managed epochs. Where errors choose too, the device counts the rows of the lists.
template <class Layer>
void compress_in_parts(Layer& layer, const CompressCall& call, const FlushedBatch& batch) {
  const std::int32_t length = layer.config.flush_interval;
  const auto& policy = layer.policies.token_policy;
  const auto store = [&](const FlushBatch& part, const RowOrder& order, std::int32_t before) {
    const std::int64_t first = std::int64_t{order.part} * length;
    const std::int64_t rows = (std::min)(std::int64_t{length}, part.rows[0] - first);
    const std::int64_t exempt = exempt_rows(policy, part.position[0] + first, rows, Phase::prefill);
    // With a threshold on errors, all rows may turn out to be compressed.
    const int least_exempt = least_error(policy) > 0.0F ? 0 : static_cast<int>(exempt);
    roll_over<Layer::coded_groups>(layer.state, layer.policies.updater, part, 0, 1, call.source,
                                   order, least_exempt, before, call.phase, call.scratch,
                                   call.stream);
    return store_part_rows(layer, call, part, order, exempt);
  };
  for_each_part(layer.state, batch.flushed, batch.compressed, length, call.scratch, call.stream,
                store);
}

/// Adds rows to the sketches, which may begin epochs.
template <class Layer>
void sketch_flushed(Layer& layer, const CompressCall& call, const FlushedBatch& batch,
                    const FlushBatch& publishing) {
  if (batch.in_parts) return compress_in_parts(layer, call, batch);
  if (batch.most_candidates <= 0) return;
  const int heads = layer.config.shape.num_kv_heads;
  for (int first = 0; first < publishing.count; first += kAdaptBatch) {
    const int count = (std::min)(kAdaptBatch, publishing.count - first);
    roll_over<Layer::coded_groups>(layer.state, layer.policies.updater, publishing, first, count,
                                   call.source, batch.compressed.from(first, heads), 0, 0,
                                   call.phase, call.scratch, call.stream);
  }
}

/// Shows rows to the updater, which may move bases. Then opens segments for new epochs.
template <class Layer>
void adapt_flushed(Layer& layer, const CompressCall& call, const FlushBatch& flushed,
                   const RowOrder& kept) {
  auto& state = layer.state;
  const CompressScratch& scratch = call.scratch;
  const PromptSelection selection = Layer::Rule::prompt_selection(layer.policies.updater);
  const float* scores = nullptr;
  if (call.queries.count > 0 && selection.share < 1.0F) {
    const ScoreQueries queries = call.queries.last(selection.scores.window);
    scores = enqueue_scores(state, scratch, queries, selection.scores, selection.scope, flushed,
                            call.stream);
    if (kept.rows != nullptr) {
      scores = mask_scores(state, scratch, scores, kept, flushed.candidates(0), flushed.rows[0],
                           call.stream);
    }
  }
  for (int first = 0; first < flushed.count; first += kAdaptBatch) {
    const int count = (std::min)(kAdaptBatch, flushed.count - first);
    const RowOrder own = kept.from(first, layer.config.shape.num_kv_heads);
    adapt(state, layer.policies.updater, flushed, first, count, call.source, scratch, call.phase,
          own, scores, selection.share, layer.statistics, call.stream);
    if constexpr (Layer::device_epochs) {
      const bool observes = scores == nullptr || selection.share > 0.0F;
      decide_publications(state, flushed, first, count, own, call.phase, observes, scratch,
                          call.stream);
      const int splits = call.phase == Phase::prefill ? kMomentSplits : 1;
      begin_epochs<Layer::coded_groups>(state, flushed, first, count, call.source, own, 0, 0,
                                        splits, call.phase, scratch, call.stream);
    }
  }
  if constexpr (!Layer::device_epochs) {
    for (int i = 0; i < flushed.count; ++i) {
      // A segment is opened even if all rows may turn out to stay full: release_and_upload() erases
      // an empty one.
      if (most_compressed(layer, flushed, i, call.phase) <= 0) continue;
      open_segment<Layer::coded_groups>(state, flushed.slots[i], call.phase, scratch,
                                        layer.statistics, call.stream);
    }
  }
}

/// Adapts bases to the flushed rows. New epochs may begin.
template <class Layer>
void adapt_bases(Layer& layer, const CompressCall& call, const FlushedBatch& batch) {
  FlushBatch publishing = batch.flushed;
  if (Layer::device_epochs && least_error(layer.policies.token_policy) > 0.0F) {
    for (int i = 0; i < publishing.count; ++i) {  // all candidates may turn out to be compressed
      publishing.full[i] = batch.flushed.pinned[i];
      publishing.compressed[i] = batch.flushed.candidates(i);
    }
  }
  if constexpr (Layer::sketches) {
    sketch_flushed(layer, call, batch, publishing);
  } else {
    if (batch.most_candidates > 0) adapt_flushed(layer, call, publishing, batch.compressed);
  }
}

/// Chooses which of the rows that could be compressed stay full, by their errors.
template <class Layer>
void choose_by_errors(const Layer& layer, const CompressCall& call, FlushedBatch& batch) {
  const FlushBatch& flushed = batch.flushed;
  const auto& policy = layer.policies.token_policy;
  bool any = Layer::Rows::scores_both && batch.most_candidates > 0;
  for (int i = 0; i < flushed.count; ++i) any = any || flushed.full[i] > flushed.pinned[i];
  if (!any || batch.counted) return;
  std::tie(batch.full, batch.compressed) = exempt_outliers<Layer::coded_groups, Layer::joins>(
      layer.state, flushed, policy, batch.compressed, call.source, call.scratch, call.stream);
  batch.counts = batch.full.ends;
}

/// Stores the rows of a batch that are not stored yet, and updates the device's lengths of lists
/// and tails.
template <class Layer>
void store_batch(const Layer& layer, const CompressCall& call, const FlushedBatch& batch) {
  using Rows = typename Layer::Rows;
  const FlushBatch& flushed = batch.flushed;
  if constexpr (Rows::scores_both) {
    if (!batch.in_parts) {
      note_scores(layer.state, flushed, call.accumulated_scores(), call.scratch.rows, batch.full,
                  batch.compressed, call.stream);
    }
  }
  if (batch.most_full > 0 && !batch.counted) {
    store_full(layer, call, flushed, batch.full, batch.most_full);
  }
  if (batch.most_compressed > 0 && !batch.in_parts) {
    store_compressed(layer, call, flushed, batch.compressed, {}, batch.most_compressed);
  }
  if constexpr (Rows::accumulates_scores && Rows::compresses && !Layer::device_epochs &&
                !Rows::scores_both) {
    if (batch.replacing > 0) {
      const CompressScratch& scratch = call.scratch;
      store_compressed(layer, call, flushed, batch.compressed, scratch.staging, batch.replacing);
      place_rows(layer.state, flushed, scratch.staging, {scratch.rest, scratch.rows},
                 batch.replacing, call.stream);
    }
  }
  note_stored_kernel<><<<static_cast<unsigned>(flushed.count), 128, 0, call.stream>>>(
      layer.state.tables(), flushed, call.of_tails(), !batch.counted, !batch.in_parts,
      batch.counts);
  check(cudaGetLastError(), "note_stored_kernel");
}

/// Updates the host's row counts: from what it knows, or read from the device, which waits for the
/// stream. With config.keep_residuals, notes what compression lost.
template <class Layer>
void finish_batch(Layer& layer, const CompressCall& call, const FlushedBatch& batch,
                  std::int64_t count) {
  auto& state = layer.state;
  const FlushBatch& flushed = batch.flushed;
  // Only the device knows how many rows were added.
  const bool reads_counts = batch.counted || batch.counts != nullptr || Layer::Rows::scores_both;
  if (reads_counts)
    read_rows(state, {flushed.slots, static_cast<std::size_t>(flushed.count)}, call.stream);
  for (int i = 0; i < flushed.count; ++i) {
    const int slot = flushed.slots[i];
    HostSequence& now = state.sequence(slot);
    if (!reads_counts) now.add_rows(flushed, i, state.tables().scored);
    if (call.of_tails()) now.tail_length -= static_cast<std::int32_t>(count);
    if (layer.config.keep_residuals) {
      const std::int32_t behind =
          call.of_tails() ? state.tables().ring_rows() - flushed.rows[i] : 0;
      const FlushedRows own_rows{call.source, slot, flushed.rows[i], behind, flushed.position[i]};
      note_residuals<Layer::coded_groups, Layer::joins, Layer::Rows::accumulates_scores>(
          state, own_rows, flushed.full[i], most_compressed(layer, flushed, i, call.phase),
          call.scratch.decoded, call.stream);
    }
    // Release pages that the lists might have taken but did not. A prompt does so at its end.
    if (reads_counts && call.of_tails()) state.release_and_upload(slot, call.stream, true);
  }
  layer.statistics.flushes += flushed.count;
}

}  // namespace detail

/// @brief What flushes and prompts share: a struct, so that one source can instantiate it for both
/// (cmake/lowrankkv_cuda_caches.cmake).
template <class Layer>
struct Compression {
  /// @brief Moves the `count` oldest rows of each slot out of full rank: from its tail, or from a
  /// packed prompt (one slot). The caller has checked the pages (cuda/compress/flushed_rows.cuh).
  /// @param queries  the prompt's last queries, if known
  static void run(Layer& layer, std::span<const int> slots, std::int64_t count,
                  const RowSource& source, const CompressScratch& scratch, Phase phase,
                  const ScoreQueries& queries, cudaStream_t stream);
};
template <class Layer>
void Compression<Layer>::run(Layer& layer, std::span<const int> slots, std::int64_t count,
                             const RowSource& source, const CompressScratch& scratch, Phase phase,
                             const ScoreQueries& queries, cudaStream_t stream) {
  using Rows = typename Layer::Rows;
  const detail::CompressCall call{source, scratch, phase, queries, stream};
  for (std::size_t first = 0; first < slots.size(); first += kMaxBatch) {
    const std::size_t together = (std::min)(slots.size() - first, std::size_t{kMaxBatch});
    detail::FlushedBatch batch =
        detail::begin_batch(layer, call, slots.subspan(first, together), count);
    if constexpr (Rows::by_scores) detail::choose_by_scores(layer, call, batch);
    if constexpr (Rows::accumulates_scores) detail::evict_by_scores(layer, call, batch);
    batch.in_parts = Layer::sketches && phase == Phase::prefill && batch.compressed.rows != nullptr;
    batch.counted = batch.in_parts && Layer::exempts_in_parts;
    if constexpr (Layer::Rule::adapts && Rows::compresses) detail::adapt_bases(layer, call, batch);
    if constexpr (Rows::by_errors) detail::choose_by_errors(layer, call, batch);
    detail::store_batch(layer, call, batch);
    detail::finish_batch(layer, call, batch, count);
  }
}

/// @brief Leaves the slots whose tail is longer than Layer::kept_rows().
template <class Layer>
void erase_short_tails(const Layer& layer, std::vector<int>& slots) {
  std::erase_if(
      slots, [&](int slot) { return layer.state.sequence(slot).tail_length <= layer.kept_rows(); });
}
/// @brief The most rows that a scored list of these slots has.
template <class Layer>
std::int64_t most_scored(const Layer& layer, std::span<const int> slots) {
  std::int64_t most = 0;
  for (const int slot : slots)
    most = (std::max)(most, layer.state.sequence(slot).num_rows(layer.state.tables().scored));
  return most;
}

/// @brief Flushes every tail of these slots that is longer than Layer::kept_rows(), until none is.
/// The caller holds the pages (pages_to_flush()).
template <class Layer>
void flush(Layer& layer, std::vector<int> slots, cudaStream_t stream) {
  for (;;) {
    erase_short_tails(layer, slots);
    if (slots.empty()) return;
    const CompressScratch scratch = flush_scratch(layer, slots.size(), most_scored(layer, slots));
    Compression<Layer>::run(layer, slots, layer.config.flush_interval, {}, scratch, Phase::decode,
                            {}, stream);
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
