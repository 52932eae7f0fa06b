// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache/step_rows.cuh  The sequences of a decode step: in batches of a launch, and how
/// many rows they have.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cuda/cache/checks.cuh"
#include "lowrankkv/cuda/layer/layer.cuh"

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

/// @brief The same for sequences whose slots are in device memory.
template <class Layer, class Function>
void for_each_batch(const Layer&, const SlotView& slots, Function&& function) {
  for (int first = 0; first < slots.count; first += kMaxBatch) {
    Batch batch;
    batch.count = (std::min)(slots.count - first, kMaxBatch);
    batch.on_device = slots.data + first;
    function(batch, std::int64_t{first});
  }
}

/// @brief Checks that a step has equally many tokens for each slot, and memory for the slots.
/// Returns the number of tokens of a sequence, which may be 0: then nothing is launched.
/// @throws ShapeError, CapacityError
template <class Layer>
int check_slots(const char* call, const Layer& layer, const SlotView& slots,
                std::int64_t num_tokens) {
  using ::lowrankkv::detail::fail;
  if (slots.count < 0 || slots.count > layer.config.max_sequences)
    fail<CapacityError>(call, ": ", slots.count, " slots, 0 to max_sequences ",
                        layer.config.max_sequences, " expected");
  const int m = tokens_of_each(call, num_tokens, "tokens", slots.count, "slots");
  if (m > 0 && slots.data == nullptr)
    fail<ShapeError>(call, ": null pointer with ", slots.count, " slots");
  return m;
}

/// @brief Checks that there are equally many query tokens for each sequence. Returns that number,
/// which may be 0: then nothing is launched.
/// @throws ShapeError, CapacityError
template <class Layer>
int check_attend(const Layer& layer, std::span<const SequenceId> seqs, const QueryView& query) {
  const std::int64_t count = static_cast<std::int64_t>(seqs.size());
  const int m = tokens_of_each("attend", query.num_tokens, "query tokens", count, "sequences");
  if (count > layer.config.max_sequences) {
    ::lowrankkv::detail::fail<CapacityError>("attend: ", count, " sequences, max_sequences ",
                                             layer.config.max_sequences);
  }
  check_query_tokens("attend", layer, m);
  return m;
}

/// @brief The most rows of the sequences' lists; during capture, the most that lists can ever have.
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

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
