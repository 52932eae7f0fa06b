// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache/flush.cuh  FlushCalls: maintain() and append_maintained().
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "lowrankkv/cuda/cache/calls.hpp"
#include "lowrankkv/cuda/cache/checks.cuh"
#include "lowrankkv/cuda/compress/compress.cuh"
#include "lowrankkv/cuda/compress/flushed_rows.cuh"
#include "lowrankkv/cuda/layer/layer.cuh"
#include "lowrankkv/cuda/runtime/device_scope.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

template <class Layer>
void FlushCalls<Layer>::maintain(Layer& layer, Sequences seqs, cudaStream_t stream) {
  const DeviceScope on("maintain", layer.state.device(), stream);
  refuse_capture("maintain", stream);
  std::vector<int> slots = idle_slots(layer, seqs);
  const HeldPages held(layer.state.pool().allocator(), pages_to_flush(layer, slots, 0));
  erase_short_tails(layer, slots);
  if (slots.empty()) return;
  flush_scratch(layer, slots.size(), most_scored(layer, slots));
  ::lowrankkv::detail::ChangedSequences changed(layer.sequences, seqs);
  flush(layer, std::move(slots), stream);
  changed.done();
}
template <class Layer>
std::int64_t FlushCalls<Layer>::pages_to_maintain(const Layer& layer, Sequences seqs) {
  return pages_to_flush(layer, idle_slots(layer, seqs), 0);
}
template <class Layer>
void FlushCalls<Layer>::append_maintained(Layer& layer, Sequences seqs, const KeyView& key,
                                          const ValueView& value, cudaStream_t stream) {
  const DeviceScope on("append_maintained", layer.state.device(), stream);
  refuse_capture("append_maintained", stream);
  const int m = check_tokens(layer, seqs, key, value);
  check_advance(layer, seqs, m, std::int64_t{1} << 40);
  if (seqs.empty()) return;
  const std::vector<int> slots = idle_slots(layer, seqs);
  const HeldPages held(layer.state.pool().allocator(), pages_to_flush(layer, slots, m));
  flush_scratch(layer, slots.size(), most_scored(layer, slots));
  ::lowrankkv::detail::ChangedSequences changed(layer.sequences, seqs);
  maintain(layer, seqs, stream);
  const auto room = [&](SequenceId seq) {
    return layer.config.tail_capacity - layer.state.sequence(layer.sequences.find(seq)).tail_length;
  };
  if (std::all_of(seqs.begin(), seqs.end(), [&](SequenceId seq) { return m <= room(seq); })) {
    StepCalls<Layer>::append(layer, seqs, key, value, stream);
  } else {
    for (std::size_t i = 0; i < seqs.size(); ++i) {
      for (int done = 0; done < m;) {
        const int count = (std::min)(room(seqs[i]), m - done);
        const std::int64_t first = static_cast<std::int64_t>(i) * m + done;
        const Sequences one(&seqs[i], 1);
        StepCalls<Layer>::append(layer, one, key.tokens(first, count), value.tokens(first, count),
                                 stream);
        maintain(layer, one, stream);
        done += count;
      }
    }
  }
  maintain(layer, seqs, stream);
  changed.done();
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
