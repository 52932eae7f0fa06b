// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache/decode_step.cuh  The calls of a decode step: append(), attend(),
/// attend_partial() and accumulate(), each for as many sequences at a time as a launch takes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cuda/attention/attend.cuh"
#include "lowrankkv/cuda/attention/merge_states.cuh"
#include "lowrankkv/cuda/cache/checks.cuh"
#include "lowrankkv/cuda/layer/layer.cuh"
#include "lowrankkv/cuda/scores/attention_scores.cuh"
#include "lowrankkv/cuda/scores/pre_rope_scores.cuh"
#include "lowrankkv/cuda/state/append_rows.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Calls function(batch, index of its first sequence) for batches of at most kMaxBatch
/// sequences.
template <class Layer, class Function>
void for_each_batch(const Layer& layer, std::span<const SequenceId> seqs, Function&& function) {
  for (std::size_t first = 0; first < seqs.size(); first += kMaxBatch) {
    Batch batch;
    batch.count =
        static_cast<std::int32_t>((std::min)(seqs.size() - first, std::size_t{kMaxBatch}));
    for (int i = 0; i < batch.count; ++i) {
      batch.slots[i] = layer.sequences.find(seqs[first + static_cast<std::size_t>(i)]);
    }
    function(batch, static_cast<std::int64_t>(first));
  }
}

/// @brief Enqueues the append of m rows to the tail of each sequence of a batch. The batch's rows
/// begin at row `first` of the views.
template <class Layer>
void enqueue_append(const Layer& layer, const Batch& batch, const KeyView& key,
                    const ValueView& value, std::int64_t first, int m, cudaStream_t stream) {
  with_rows(key, value, [&](auto keys, auto values) {
    append_kernel<<<static_cast<unsigned>(batch.count), 256, 0, stream>>>(
        layer.state.tables(), batch, keys, values, first, m, layer.value_limit());
  });
  check(cudaGetLastError(), "append_kernel");
}
/// @brief Advances the host's lengths by m tokens per sequence.
template <class Layer>
void advance_host(Layer& layer, std::span<const SequenceId> seqs, int m) {
  for (const SequenceId seq : seqs) {
    HostSequence& now = layer.state.sequence(layer.sequences.find(seq));
    now.tail_length += m;
    now.num_tokens += m;
  }
}

namespace detail {

/// Checks that there are equally many query tokens for each sequence. Returns that number.
/// @throws ShapeError, CapacityError
template <class Layer>
int check_attend(const Layer& layer, std::span<const SequenceId> seqs, const QueryView& query) {
  using ::lowrankkv::detail::fail;
  const CacheConfig& config = layer.config;
  const std::int64_t count = static_cast<std::int64_t>(seqs.size());
  if (count == 0 || query.num_tokens == 0 || query.num_tokens % count != 0) {
    fail<ShapeError>("attend: ", query.num_tokens, " query tokens for ", count, " sequences");
  }
  if (count > config.max_sequences) {
    fail<CapacityError>("attend: ", count, " sequences, max_sequences ", config.max_sequences);
  }
  const int m = static_cast<int>(query.num_tokens / count);
  if (m > config.max_query_tokens) {
    fail<ShapeError>("attend: ", m, " query tokens a sequence, max_query_tokens ",
                     config.max_query_tokens);
  }
  return m;
}

/// The most rows of the sequences' lists; during capture, the most that lists can ever have.
/// @throws ShapeError unless each tail has at least `own` tokens (not checked during capture)
template <class Layer>
HeadRows most_attended(const Layer& layer, std::span<const SequenceId> seqs, int own,
                       bool captured) {
  HeadRows most{0, 0};
  if (captured) {
    most = {static_cast<std::int32_t>(layer.state.max_rows(RowList::full)),
            static_cast<std::int32_t>(layer.state.max_rows(RowList::compressed))};
  }
  for (const SequenceId seq : seqs) {
    const HostSequence& now = layer.state.sequence(idle_slot(layer, seq));
    if (!captured && own > now.tail_length) {
      ::lowrankkv::detail::fail<ShapeError>("attend: ", own, " query tokens, sequence ", seq,
                                            " has ", now.tail_length, " tokens in its tail");
    }
    most.num_full = (std::max)(most.num_full, now.rows.num_full);
    most.num_compressed = (std::max)(most.num_compressed, now.rows.num_compressed);
  }
  return most;
}

}  // namespace detail

/// @brief Enqueues the attention of the queries of some sequences, and, if `accumulated` has data,
/// the attention that positions receive from them. The caller has checked the views, except for the
/// number of query tokens. Raises before anything changes.
/// @tparam has_scores  whether `accumulated` may have data; if not, its kernels are not compiled
template <bool has_scores, class Layer>
void attend_sequences(Layer& layer, std::span<const SequenceId> seqs, const QueryView& query,
                      const DeviceOutput& target, QueryTokens tokens, cudaStream_t stream,
                      [[maybe_unused]] const ScoreView& accumulated = {}) {
  using Rows = typename Layer::Rows;
  auto& state = layer.state;
  const int m = detail::check_attend(layer, seqs, query);
  const bool own = tokens == QueryTokens::own, captured = capturing(stream);
  const HeadRows most = detail::most_attended(layer, seqs, own ? m : 0, captured);
  if constexpr (has_scores) {
    if (accumulated.data != nullptr) {
      check_scores(layer, seqs, accumulated, captured);
      clear_scores(accumulated, stream);
    }
  }
  AttentionStep step = state.workspace().step(m);
  step.sees_all = !own;
  for_each_batch(layer, seqs, [&](const Batch& batch, std::int64_t first_sequence) {
    const int first = static_cast<int>(first_sequence);
    const std::int64_t first_row = first_sequence * m;
    attend_step<Layer::kForm, Rows::accumulates_scores, Layer::scale_groups, Layer::joins,
                Layer::Rule::adapts, false>(
        state, step, batch, device_rows(query), target, first_row, first,
        state.workspace().coded_splits(most.num_compressed), most.num_full, stream);
    if constexpr (has_scores) {
      if (accumulated.data == nullptr) return;
      const WeightQueries queries =
          weight_queries(state, query, target.lse, target.lse_stride, m, first_row);
      const DeviceScores accumulated_scores{accumulated.data, accumulated.num_positions};
      measure_scores(state, batch, queries, {}, accumulated_scores, first, most.num_full, stream);
      if constexpr (Rows::compresses) {
        measure_compressed_scores<Layer::coded_groups>(
            state, step, batch, queries, accumulated_scores, first, most.num_compressed, stream);
      }
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

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
