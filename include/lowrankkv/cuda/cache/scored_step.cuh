// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache/scored_step.cuh  ScoreCalls: attend() with attention scores, and accumulate().
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cuda/cache/calls.hpp"
#include "lowrankkv/cuda/cache/checks.cuh"
#include "lowrankkv/cuda/cache/step_rows.cuh"
#include "lowrankkv/cuda/layer/layer.cuh"
#include "lowrankkv/cuda/scores/attention_scores.cuh"
#include "lowrankkv/cuda/scores/pre_rope_scores.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Enqueues the measurement of the attention that positions receive from the queries of a
/// decode step whose attention has been enqueued.
template <class Layer>
void measure_step(Layer& layer, std::span<const SequenceId> seqs, const QueryView& query,
                  const LseView& lse, const ScoreView& accumulated, cudaStream_t stream) {
  auto& state = layer.state;
  const int m = check_attend(layer, seqs, query);
  const HeadRows most = most_attended(layer, seqs, m, capturing(stream));
  const AttentionStep step = state.workspace().step(m);
  const DeviceScores scores{accumulated.data, accumulated.num_positions};
  for_each_batch(layer, seqs, [&](const Batch& batch, std::int64_t first_sequence) {
    const int first = static_cast<int>(first_sequence);
    const WeightQueries queries =
        weight_queries(state, query, lse.data, lse.token_stride, m, first_sequence * m);
    measure_scores(state, batch, queries, {}, scores, first, most.num_full, stream);
    if constexpr (Layer::Rows::compresses) {
      measure_compressed_scores<Layer::coded_groups>(state, step, batch, queries, scores, first,
                                                     most.num_compressed, stream);
    }
  });
}

/// @brief Enqueues the addition of received attention to the rows' accumulated scores.
template <class Layer>
void accumulate_scores(const Layer& layer, std::span<const SequenceId> seqs,
                       const ScoreView& accumulated, cudaStream_t stream) {
  if (accumulated.data == nullptr) return;
  const auto& state = layer.state;
  const bool captured = capturing(stream);
  check_scores(layer, seqs, accumulated, captured);
  check_distinct("accumulate", seqs);
  const HeadRows most{static_cast<std::int32_t>(state.max_rows(RowList::full)),
                      static_cast<std::int32_t>(state.max_rows(RowList::compressed))};
  std::int64_t rows =
      captured ? std::int64_t{state.tables().scored_rows(most)} + layer.config.tail_capacity : 0;
  for (const SequenceId seq : seqs) {
    const HostSequence& now = state.sequence(layer.sequences.find(seq));
    rows = (std::max)(rows, std::int64_t{state.tables().scored_rows(now.rows)} + now.tail_length);
  }
  if (rows == 0) return;
  for_each_batch(layer, seqs, [&](const Batch& batch, std::int64_t first) {
    const DeviceScores accumulated_scores{accumulated.data, accumulated.num_positions};
    enqueue_accumulate(state, batch, accumulated_scores, static_cast<int>(first), rows, stream);
  });
}

template <class Layer>
void ScoreCalls<Layer>::attend_scored(Layer& layer, Sequences seqs, const QueryView& query,
                                      const OutputView& out, const LseView& lse,
                                      const ScoreView& accumulated, cudaStream_t stream) {
  if (accumulated.data == nullptr) {
    StepCalls<Layer>::attend(layer, seqs, query, out, lse, stream);
    return;
  }
  check_queries(layer, query, out, lse, query.num_tokens);
  const bool captured = capturing(stream);
  const int m = check_attend(layer, seqs, query);
  static_cast<void>(most_attended(layer, seqs, m, captured));
  check_scores(layer, seqs, accumulated, captured);
  LseView sums = lse;
  if (lse.data == nullptr) {
    const int heads = layer.config.shape.num_qo_heads;
    sums = LseView(layer.state.workspace().step_lse(), query.num_tokens, heads);
  }
  clear_scores(accumulated, stream);
  // Scores read what attention leaves in the workspace, which holds one batch.
  for (std::size_t first = 0; first < seqs.size(); first += kMaxBatch) {
    const std::size_t count = (std::min)(seqs.size() - first, std::size_t{kMaxBatch});
    const std::int64_t row = static_cast<std::int64_t>(first) * m;
    const std::int64_t rows = static_cast<std::int64_t>(count) * m;
    const Sequences some = seqs.subspan(first, count);
    ScoreView of_some = accumulated;
    of_some.num_sequences = static_cast<std::int64_t>(count);
    of_some.data = accumulated.row(static_cast<std::int64_t>(first), 0);
    const LseView sums_of_some = sums.tokens(row, rows);
    StepCalls<Layer>::attend(layer, some, query.tokens(row, rows), out.tokens(row, rows),
                             sums_of_some, stream);
    measure_step(layer, some, query.tokens(row, rows), sums_of_some, of_some, stream);
  }
}
template <class Layer>
void ScoreCalls<Layer>::accumulate(Layer& layer, Sequences seqs, const ScoreView& accumulated,
                                   cudaStream_t stream) {
  accumulate_scores(layer, seqs, accumulated, stream);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
