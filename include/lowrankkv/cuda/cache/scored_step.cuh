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
#include "lowrankkv/cuda/runtime/device_scope.hpp"
#include "lowrankkv/cuda/scores/attention_scores.cuh"
#include "lowrankkv/cuda/scores/pre_rope_scores.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Enqueues the addition of received attention to the rows' accumulated scores.
template <class Layer>
void accumulate_scores(Layer& layer, std::span<const SequenceId> seqs, const ScoreView& accumulated,
                       cudaStream_t stream) {
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
  ::lowrankkv::detail::ChangedSequences changed(layer.sequences,
                                                captured ? std::span<const SequenceId>() : seqs);
  for_each_batch(layer, seqs, [&](const Batch& batch, std::int64_t first) {
    const DeviceScores accumulated_scores{accumulated.data, accumulated.num_positions};
    enqueue_accumulate(state, batch, accumulated_scores, static_cast<int>(first), rows, stream);
  });
  changed.done();
}

template <class Layer>
void ScoreCalls<Layer>::attend_scored(Layer& layer, Sequences seqs, const QueryView& query,
                                      const OutputView& out, const LseView& lse,
                                      const ScoreView& accumulated, cudaStream_t stream) {
  const DeviceScope on("attend", layer.state.device(), stream);
  if (accumulated.data == nullptr) {
    StepCalls<Layer>::attend(layer, seqs, query, out, lse, stream);
    return;
  }
  check_queries(layer, query, out, lse, query.num_tokens);
  const bool captured = capturing(stream);
  const int m = check_attend(layer, seqs, query);
  const HeadRows most = most_attended(layer, seqs, m, captured);
  check_scores(layer, seqs, accumulated, captured);
  auto& state = layer.state;
  LseView sums = lse;
  if (lse.data == nullptr) {
    const int heads = layer.config.shape.num_qo_heads;
    sums = LseView(state.workspace().step_lse(), query.num_tokens, heads);
  }
  clear_scores(accumulated, stream);
  if (m == 0) return;
  const DeviceScores scores{accumulated.data, accumulated.num_positions};
  // Scores read the projected queries that attention leaves in the workspace, which holds one
  // batch.
  for_each_batch(layer, seqs, [&](const Batch& batch, std::int64_t first) {
    const std::int64_t row = first * m, rows = std::int64_t{batch.count} * m;
    const Sequences some =
        seqs.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(batch.count));
    StepCalls<Layer>::attend(layer, some, query.tokens(row, rows), out.tokens(row, rows),
                             sums.tokens(row, rows), stream);
    const MeasuredQueries queries =
        measured_queries(state, query, sums.data, sums.token_stride, m, row);
    measure_scores(state, batch, queries, {}, scores, static_cast<int>(first), most.num_full,
                   stream);
    if constexpr (Layer::Rows::compresses) {
      measure_compressed_scores<Layer::coded_groups>(state, state.workspace().step(m), batch,
                                                     queries, scores, static_cast<int>(first),
                                                     most.num_compressed, stream);
    }
  });
}
template <class Layer>
void ScoreCalls<Layer>::accumulate(Layer& layer, Sequences seqs, const ScoreView& accumulated,
                                   cudaStream_t stream) {
  const DeviceScope on("accumulate", layer.state.device(), stream);
  accumulate_scores(layer, seqs, accumulated, stream);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
