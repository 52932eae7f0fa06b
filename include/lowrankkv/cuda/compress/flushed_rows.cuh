// SPDX-License-Identifier: Apache-2.0
/// @file cuda/compress/flushed_rows.cuh  Plans a flush on the host: how many rows go to each list,
/// as far as counts tell, and the pages and scratch memory that it takes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "lowrankkv/core/page_allocator.hpp"
#include "lowrankkv/cuda/layer/layer.cuh"
#include "lowrankkv/cuda/update/compress_scratch.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Describes `count` flushed rows of a slot as sequence `i` of a batch.
/// @param before  number of rows that are flushed before them
template <class Layer>
void describe_flushed(const Layer& layer, FlushBatch& flushed, int i, int slot, std::int64_t count,
                      Phase phase, std::int64_t before = 0) {
  const std::int64_t position = layer.state.sequence(slot).first_tail() + before;
  const RowCounts counts = row_counts(layer.policies.token_policy, position, count, phase);
  flushed.slots[i] = slot;
  flushed.rows[i] = static_cast<std::int32_t>(count);
  flushed.full[i] = static_cast<std::int32_t>(counts.full);
  flushed.compressed[i] = static_cast<std::int32_t>(counts.compressed);
  flushed.pinned[i] = static_cast<std::int32_t>(counts.pinned);
  flushed.position[i] = static_cast<std::int32_t>(position);
  flushed.limit[i] = static_cast<std::int32_t>(counts.limit);
}

/// @brief Whether flushed rows may replace stored rows of a scored list. Decided for the head with
/// the longest list, to whose end the fewest rows go.
template <class Layer>
bool replaces_rows(const Layer& layer, const FlushBatch& flushed, int i, const SequenceRows& now) {
  using Rows = typename Layer::Rows;
  const RowList scored = layer.state.tables().scored;
  const std::int32_t stored = layer.state.tables().scored_rows(now.rows);
  if (Rows::scores_both) return stored + flushed.candidates(i) > flushed.limit[i];
  return Rows::accumulates_scores &&
         (stored > flushed.limit[i] ||
          flushed.added(scored, scored, i, stored) < flushed.offered(scored, i));
}

/// @brief Whether only values determine how many rows stay full for their errors. This is so if
/// rows are kept by accumulated score, if errors choose in parts of a prompt, of which a head may
/// keep no row, and if errors must exceed a threshold, which none may.
template <class Layer>
bool counts_vary(const Layer& layer, Phase phase) {
  return Layer::Rows::scores_both || (Layer::exempts_in_parts && phase == Phase::prefill) ||
         least_error(layer.policies.token_policy) > 0.0F;
}

/// @brief The most rows that are added to a head's compressed list.
template <class Layer>
std::int32_t most_compressed(const Layer& layer, const FlushBatch& flushed, int i, Phase phase) {
  return counts_vary(layer, phase) ? flushed.candidates(i) : flushed.compressed[i];
}

/// @brief Adds the flushed rows of sequence `i` of a batch to `after`: as many as lists may get.
template <class Layer>
void add_most(const Layer& layer, SequenceRows& after, const FlushBatch& flushed, int i,
              Phase phase) {
  if (Layer::Rows::scores_both) {
    const std::int32_t pinned = static_cast<std::int32_t>(layer.most_pinned());
    return after.add_scored(flushed, i, flushed.limit[i] + pinned);
  }
  after.add_rows(flushed, i, layer.state.tables().scored);
  after.rows.num_compressed += most_compressed(layer, flushed, i, phase) - flushed.compressed[i];
}

/// @brief Adds to `demand` the pages for several flushes in a row. Returns the rows of the lists
/// afterwards, at most.
/// @param next_flush  next_flush() returns the number of rows of the next flush; 0: no more flushes
template <class Layer, class NextFlush>
SequenceRows demand_rows(const Layer& layer, int slot, Phase phase, PageDemand& demand,
                         NextFlush&& next_flush) {
  SequenceRows after = layer.state.sequence(slot);
  FlushBatch flushed;
  bool replaces = false;
  std::int64_t before = 0;
  for (std::int64_t count = next_flush(); count > 0; before += count, count = next_flush()) {
    describe_flushed(layer, flushed, 0, slot, count, phase, before);
    replaces = replaces || replaces_rows(layer, flushed, 0, after);
    if (!Layer::Rows::scores_both) after.limit_rows(flushed.limit[0], layer.state.tables().scored);
    add_most(layer, after, flushed, 0, phase);
  }
  layer.state.demand_rows(slot, after, replaces, demand);
  return after;
}

/// @brief Upper bound of the pages for the flushes that are due once each slot has `added` more
/// tokens.
template <class Layer>
std::int64_t pages_to_flush(const Layer& layer, std::span<const int> slots, std::int64_t added) {
  PageDemand demand;
  for (const int slot : slots) {
    std::int64_t tail = layer.state.sequence(slot).tail_length + added;
    demand_rows(layer, slot, Phase::decode, demand, [&]() -> std::int64_t {
      if (tail <= layer.kept_rows()) return 0;
      tail -= layer.config.flush_interval;
      return layer.config.flush_interval;
    });
  }
  return demand.total();
}

/// @brief Number of lists whose rows the device chooses at once: KV heads x sequences of a launch;
/// 0: the device chooses none.
template <class Layer>
std::size_t chosen_lists(const Layer& layer, std::size_t sequences, Phase phase) {
  using Rows = typename Layer::Rows;
  const bool any = Rows::by_errors || Rows::accumulates_scores ||
                   (phase == Phase::prefill && layer.scoring_window() > 0);
  if (!any) return 0;
  return static_cast<std::size_t>(layer.config.shape.num_kv_heads) *
         (std::min)(sequences, std::size_t{kMaxBatch});
}

/// @brief Scratch memory for a flush of `sequences` sequences.
/// @param scored  the most rows of a scored list
template <class Layer>
CompressScratch flush_scratch(const Layer& layer, std::size_t sequences, std::int64_t scored) {
  return compress_scratch(layer.state, 0, 0, chosen_lists(layer, sequences, Phase::decode),
                          layer.config.flush_interval, scored, layer.most_pinned());
}

/// @brief Scratch memory for a chunk of a prompt.
/// @param rows  packed rows, those of the tail included
/// @param columns  columns of the queries that score them
/// @param scored  the most rows of the scored list
template <class Layer>
CompressScratch prompt_scratch(const Layer& layer, std::int64_t rows, int columns,
                               std::int64_t scored) {
  return compress_scratch(layer.state, rows, columns, chosen_lists(layer, 1, Phase::prefill), rows,
                          scored, layer.most_pinned(), Layer::Rows::by_scores);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
