// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache/saved_rows.cuh  SaveCalls: save() and load(), and whether a cache can continue
/// with the rows of a saved state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/cuda/cache/calls.hpp"
#include "lowrankkv/cuda/cache/checks.cuh"
#include "lowrankkv/cuda/cache/full_row_limit.cuh"
#include "lowrankkv/cuda/layer/layer.cuh"
#include "lowrankkv/cuda/runtime/device_scope.hpp"
#include "lowrankkv/cuda/sequence/saved_state.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Checks that this cache's token policy can keep the rows of a saved state in which
/// `stored` tokens have left the tail. @throws FormatError
template <class Layer>
void check_saved_rows(const Layer& layer, const HeadRows& saved, std::int64_t stored) {
  const LayerState& state = layer.state;
  const auto check_kept = [&](const char* which, std::int64_t saved_rows, std::int64_t most_rows) {
    if (saved_rows <= most_rows) return;
    ::lowrankkv::detail::fail<FormatError>("saved state: ", saved_rows, " ", which, " rows of ",
                                           stored, ", this cache's token policy keeps at most ",
                                           most_rows);
  };
  // After tokens were removed, a scored list may have more rows than the policy keeps.
  const auto& policy = layer.policies.token_policy;
  const bool any_full = state.is_scored(RowList::full),
             any_compressed = state.is_scored(RowList::compressed);
  check_kept("full", saved.num_full,
             any_full ? state.max_rows(RowList::full) : most_full_rows(layer, stored));
  check_kept("compressed", saved.num_compressed,
             any_compressed ? state.max_rows(RowList::compressed)
                            : Layer::most_rows(policy, stored).compressed);
}

template <class Layer>
std::size_t SaveCalls<Layer>::save_bytes(const Layer& layer, SequenceId seq) {
  const DeviceScope on(layer.state.device());
  return save_sequence(layer.state, idle_slot(layer, seq), {}, true, nullptr);
}
template <class Layer>
std::size_t SaveCalls<Layer>::save(const Layer& layer, SequenceId seq, std::span<std::byte> buffer,
                                   cudaStream_t stream) {
  const DeviceScope on("save", layer.state.device(), stream);
  refuse_capture("save", stream);
  return save_sequence(layer.state, idle_slot(layer, seq), buffer, false, stream);
}
template <class Layer>
void SaveCalls<Layer>::load(Layer& layer, SequenceId seq, std::span<const std::byte> saved,
                            cudaStream_t stream) {
  const DeviceScope on("load", layer.state.device(), stream);
  refuse_capture("load", stream);
  const SavedSequence sequence = read_sequence(layer.state, saved);
  check_saved_rows(layer, sequence.rows, sequence.counts.num_tokens - sequence.counts.tail_length);
  // What may fail comes before the sequence exists.
  layer.state.pool().scratch(sequence.block.size());
  const HeldPages held(layer.state.pool().allocator(), layer.state.pages_of(sequence));
  AddedSlot<Layer> added(layer, seq);
  load_sequence(layer.state, added.slot(), sequence, stream);
  added.keep();
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
