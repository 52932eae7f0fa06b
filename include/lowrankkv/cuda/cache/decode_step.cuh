// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache/decode_step.cuh  StepCalls: append(), attend() and attend_partial(), each for
/// as many sequences at a time as a launch takes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cuda/attention/attend.cuh"
#include "lowrankkv/cuda/cache/calls.hpp"
#include "lowrankkv/cuda/cache/checks.cuh"
#include "lowrankkv/cuda/cache/step_rows.cuh"
#include "lowrankkv/cuda/layer/layer.cuh"
#include "lowrankkv/cuda/runtime/device_scope.hpp"
#include "lowrankkv/cuda/state/append_rows.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

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

/// @brief Enqueues attention to the stored rows of sequences, which have at most `most` of them.
/// @param sequences  ids, or slots in device memory
template <class Layer, class Sequences>
void enqueue_attend(Layer& layer, const Sequences& sequences, const AttentionStep& step,
                    const QueryView& query, const DeviceOutput& target, const HeadRows& most,
                    cudaStream_t stream) {
  auto& state = layer.state;
  for_each_batch(layer, sequences, [&](const Batch& batch, std::int64_t first) {
    attend_step<Layer::kForm, Layer::Rows::accumulates_scores, Layer::scale_groups, Layer::joins,
                Layer::Rule::adapts, false>(
        state, step, batch, device_rows(query), target, first * step.m, static_cast<int>(first),
        state.workspace().coded_splits(most.num_compressed), most.num_full, stream);
  });
}

/// @brief Enqueues the attention of the queries of some sequences. The caller has checked the
/// views, except for the number of query tokens. Raises before anything changes.
template <class Layer>
void attend_sequences(Layer& layer, std::span<const SequenceId> seqs, const QueryView& query,
                      const DeviceOutput& target, QueryTokens tokens, cudaStream_t stream) {
  const int m = check_attend(layer, seqs, query);
  const bool own = tokens == QueryTokens::own;
  const HeadRows most = most_attended(layer, seqs, own ? m : 0, capturing(stream));
  if (m == 0) return;
  AttentionStep step = layer.state.workspace().step(m);
  step.sees_all = !own;
  enqueue_attend(layer, seqs, step, query, target, most, stream);
}

template <class Layer>
void StepCalls<Layer>::append(Layer& layer, Sequences seqs, const KeyView& key,
                              const ValueView& value, cudaStream_t stream) {
  const DeviceScope on("append", layer.state.device(), stream);
  const int m = check_tokens(layer, seqs, key, value);
  const bool replayed = capturing(stream);
  if (!replayed) check_advance(layer, seqs, m);
  ::lowrankkv::detail::ChangedSequences changed(layer.sequences, replayed ? Sequences() : seqs);
  for_each_batch(layer, seqs, [&](const Batch& batch, std::int64_t first) {
    enqueue_append(layer, batch, key, value, first * m, m, stream);
  });
  if (!replayed) advance_host(layer, seqs, m);
  changed.done();
}
template <class Layer>
void StepCalls<Layer>::advance(Layer& layer, Sequences seqs, int m) {
  check_advance(layer, seqs, m);
  advance_host(layer, seqs, m);
}
template <class Layer>
void StepCalls<Layer>::check_advance(const Layer& layer, Sequences seqs, int m) {
  ::lowrankkv::cuda::check_advance(layer, seqs, m, layer.config.tail_capacity);
}
template <class Layer>
void StepCalls<Layer>::attend(Layer& layer, Sequences seqs, const QueryView& query,
                              const OutputView& out, const LseView& lse, cudaStream_t stream) {
  const DeviceScope on("attend", layer.state.device(), stream);
  check_queries(layer, query, out, lse, query.num_tokens);
  const DeviceOutput target{out.data, out.token_stride, out.head_stride, lse.data,
                            lse.token_stride};
  attend_sequences(layer, seqs, query, target, QueryTokens::own, stream);
}
template <class Layer>
void StepCalls<Layer>::append(Layer& layer, const SlotView& slots, const KeyView& key,
                              const ValueView& value, cudaStream_t stream) {
  const DeviceScope on("append", layer.state.device(), stream);
  const int m = check_slots("append", layer, slots, key.num_tokens);
  check_views(layer, key, value, slots.count, m);
  if (m > layer.config.tail_capacity)
    ::lowrankkv::detail::fail<CapacityError>("tail_capacity: ", layer.config.tail_capacity,
                                             ", given ", m, " tokens a sequence");
  if (m == 0) return;
  for_each_batch(layer, slots, [&](const Batch& batch, std::int64_t first) {
    enqueue_append(layer, batch, key, value, first * m, m, stream);
  });
}
template <class Layer>
void StepCalls<Layer>::attend(Layer& layer, const SlotView& slots, const QueryView& query,
                              const OutputView& out, const LseView& lse, cudaStream_t stream) {
  const DeviceScope on("attend", layer.state.device(), stream);
  check_queries(layer, query, out, lse, query.num_tokens);
  const int m = check_slots("attend", layer, slots, query.num_tokens);
  check_query_tokens("attend", layer, m);
  if (m == 0) return;
  const DeviceOutput target{out.data, out.token_stride, out.head_stride, lse.data,
                            lse.token_stride};
  const auto most = [&](RowList list) {
    return static_cast<std::int32_t>(layer.state.max_rows(list));
  };
  enqueue_attend(layer, slots, layer.state.workspace().step(m), query, target,
                 {most(RowList::full), most(RowList::compressed)}, stream);
}
template <class Layer>
void StepCalls<Layer>::attend_partial(Layer& layer, Sequences seqs, const QueryView& query,
                                      const StateView& states, QueryTokens tokens,
                                      cudaStream_t stream) {
  const DeviceScope on("attend_partial", layer.state.device(), stream);
  const OutputView out{states.values, states.num_tokens, states.num_heads, states.head_dim};
  const LseView lse{states.maximum, states.num_tokens, states.num_heads};
  check_queries(layer, query, out, lse, query.num_tokens);
  if (states.num_tokens > 0 && (states.maximum == nullptr || states.sum == nullptr)) {
    ::lowrankkv::detail::fail<ShapeError>("states: maximum or sum is null, memory for ",
                                          states.num_tokens, " x ", states.num_heads,
                                          " numbers expected");
  }
  const std::int64_t token_stride = std::int64_t{states.num_heads} * states.head_dim;
  const DeviceOutput target{states.values,  token_stride,     states.head_dim,
                            states.maximum, states.num_heads, states.sum};
  attend_sequences(layer, seqs, query, target, tokens, stream);
}
}  // namespace cuda
LOWRANKKV_NAMESPACE_END
