// SPDX-License-Identifier: Apache-2.0
/// @file cuda/compress/flushed_rows.cuh  Rows that are about to leave full rank: how many of them
/// go to which list, as far as the host knows, and the pages and the scratch memory that it takes.
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

/// @brief Describes the rows that leave a slot as sequence `i` of a batch.
/// @param before  so many leave before them
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

/// @brief Whether leaving rows may take places of stored ones: in the head whose list has the most,
/// so that the fewest go to its end.
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

/// @brief Whether how many rows stay full for their errors, only values say: of no part of a prompt
/// might a head keep one, none might have a large enough error, and masses might keep none.
template <class Layer>
bool counts_vary(const Layer& layer, Phase phase) {
  return Layer::Rows::scores_both || (Layer::exempts_in_parts && phase == Phase::prefill) ||
         least_error(layer.policies.token_policy) > 0.0F;
}

/// @brief How many rows of a head come to the compressed list, at most.
template <class Layer>
std::int32_t most_compressed(const Layer& layer, const FlushBatch& flushed, int i, Phase phase) {
  return counts_vary(layer, phase) ? flushed.candidates(i) : flushed.compressed[i];
}

/// @brief Adds the rows that leave sequence `i` of a batch, as many as lists may get.
template <class Layer>
void add_most(const Layer& layer, SequenceRows& after, const FlushBatch& flushed, int i,
              Phase phase) {
  if (Layer::Rows::scores_both) {
    const std::int32_t pinned = static_cast<std::int32_t>(layer.ever_pinned());
    return after.add_scored(flushed, i, flushed.limit[i] + pinned);
  }
  after.add_rows(flushed, i, layer.state.tables().scored);
  after.rows.num_compressed += most_compressed(layer, flushed, i, phase) - flushed.compressed[i];
}

/// @brief Adds the pages for rows that leave in turns. Returns the rows of the lists then.
/// @param turn  gives how many leave next; 0: no more do
template <class Layer, class Turn>
SequenceRows demand_rows(const Layer& layer, int slot, Phase phase, PageDemand& demand,
                         Turn&& turn) {
  SequenceRows after = layer.state.sequence(slot);
  FlushBatch flushed;
  bool replaces = false;
  std::int64_t before = 0;
  for (std::int64_t count = turn(); count > 0; before += count, count = turn()) {
    describe_flushed(layer, flushed, 0, slot, count, phase, before);
    replaces = replaces || replaces_rows(layer, flushed, 0, after);
    if (!Layer::Rows::scores_both) after.limit_rows(flushed.limit[0], layer.state.tables().scored);
    add_most(layer, after, flushed, 0, phase);
  }
  layer.state.demand_rows(slot, after, replaces, demand);
  return after;
}

/// @brief Upper bound of the pages for the flushes that are due when each slot has `added` more
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

/// @brief Lists of rows that are chosen on the device: of the heads of one prompt, or of all
/// sequences that are maintained at once. 0: none are.
template <class Layer>
std::size_t chosen_lists(const Layer& layer, std::size_t sequences, Phase phase) {
  using Rows = typename Layer::Rows;
  const bool any = Rows::by_errors || Rows::accumulates_scores ||
                   (phase == Phase::prefill && layer.scoring_window() > 0);
  if (!any) return 0;
  return static_cast<std::size_t>(layer.config.shape.num_kv_heads) *
         (std::min)(sequences, std::size_t{kMaxBatch});
}

/// @brief Scratch memory of a flush of so many sequences.
/// @param weighed  rows of their lists that masses choose, at most
template <class Layer>
CompressScratch flush_scratch(const Layer& layer, std::size_t sequences, std::int64_t scored) {
  return compress_scratch(layer.state, 0, 0, chosen_lists(layer, sequences, Phase::decode),
                          layer.config.flush_interval, scored, layer.ever_pinned());
}

/// @brief Scratch memory of a chunk of a prompt. @param rows  packed ones, the tail's included
/// @param columns  of the queries that score them  @param weighed  rows of the list that masses
/// choose, at most
template <class Layer>
CompressScratch prompt_scratch(const Layer& layer, std::int64_t rows, int columns,
                               std::int64_t scored) {
  return compress_scratch(layer.state, rows, columns, chosen_lists(layer, 1, Phase::prefill), rows,
                          scored, layer.ever_pinned(), Layer::Rows::by_scores);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
