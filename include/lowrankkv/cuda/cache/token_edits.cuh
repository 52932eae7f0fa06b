// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache/token_edits.cuh  EditCalls: truncate(), remove(), and moves of positions. Finds
/// the rows that are left, and checks that the sequence can continue with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/cuda/cache/calls.hpp"
#include "lowrankkv/cuda/cache/checks.cuh"
#include "lowrankkv/cuda/cache/full_row_limit.cuh"
#include "lowrankkv/cuda/layer/layer.cuh"
#include "lowrankkv/cuda/runtime/device_scope.hpp"
#include "lowrankkv/cuda/sequence/remove_tokens.cuh"
#include "lowrankkv/cuda/sequence/truncate_shift.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

namespace detail {

/// Checks that a sequence of `stored` tokens that have left the tail can continue with these rows
/// [heads]. @throws CapacityError
template <class Layer>
void check_left([[maybe_unused]] const Layer& layer, [[maybe_unused]] const char* call,
                [[maybe_unused]] const std::vector<HeadRows>& rows,
                [[maybe_unused]] std::int64_t stored) {
  if constexpr (Layer::Rows::by_errors && !Layer::Rows::accumulates_scores) {
    const std::int64_t most = most_full_rows(layer, stored);
    for (std::size_t head = 0; head < rows.size(); ++head) {
      if (rows[head].num_full <= most) continue;
      const std::int64_t room = layer.state.max_rows(RowList::full);
      ::lowrankkv::detail::fail<CapacityError>(
          call, ": head ", head, " would have ", rows[head].num_full, " full rows of ", stored,
          " tokens, and ", room - most, " may come: at most ", room, " in all");
    }
  }
}

}  // namespace detail

/// @brief Rows of every head [heads] that are left after truncation to `length` tokens. Raises what
/// truncate() raises. Waits for the stream (for the device, if it is null) if values chose among
/// rows that go.
template <class Layer>
std::vector<HeadRows> kept_below(const Layer& layer, SequenceId seq, std::int64_t length,
                                 cudaStream_t stream) {
  const int slot = idle_slot(layer, seq);
  const HostSequence& now = layer.state.sequence(slot);
  if (length < 0 || length > now.num_tokens) {
    ::lowrankkv::detail::fail<ShapeError>("truncate: length ", length, ", sequence has ",
                                          now.num_tokens, " tokens");
  }
  const std::size_t heads = static_cast<std::size_t>(layer.state.tables().num_heads);
  if (length == 0) return std::vector<HeadRows>(heads);
  PageDemand demand;
  demand_truncation(layer.state, slot, length, demand);
  layer.state.pool().allocator().require(demand.total());
  std::vector<HeadRows> rows =
      ListBounds(layer.state, slot, length, Layer::Rows::chooses, stream).below(length);
  if (length < now.first_tail()) detail::check_left(layer, "truncate", rows, length);
  return rows;
}

/// @brief The rows of tokens [first, first + count). Raises what remove() raises, except for
/// missing pages. Waits for the stream (for the device, if it is null) if values chose among rows
/// that go or move.
template <class Layer>
RemovedRows removed_rows(const Layer& layer, SequenceId seq, std::int64_t first, std::int64_t count,
                         cudaStream_t stream) {
  constexpr bool chooses = Layer::Rows::chooses;
  const int slot = idle_slot(layer, seq);
  const HostSequence& now = layer.state.sequence(slot);
  check_removal(layer.state, now, first, count);
  RemovedRows removed = RemovedRows::of(layer.state, slot, first, count, chooses, stream);
  const std::vector<HeadRows> left = removed.left(now);
  const std::int64_t of_tail = removed.tail_end - removed.tail_begin;
  const std::int64_t stored = now.first_tail() - (count - of_tail), full = left.front().num_full;
  if (!chooses && stored > full && pinned_rows(layer.policies.token_policy, stored, 1) > 0) {
    ::lowrankkv::detail::fail<StateError>("remove: ", stored, " stored tokens would be left, ",
                                          full,
                                          " of them at full rank, where the next would be kept so "
                                          "too; all, or none such, expected on this backend");
  }
  if (first < now.first_tail() && count > 0) detail::check_left(layer, "remove", left, stored);
  return removed;
}

namespace detail {

template <class Layer>
void set_shifts(Layer& layer, int slot, PositionShifts shifts, cudaStream_t stream) {
  layer.state.rotary().write_shifts(slot, shifts, stream);
  layer.state.sequence(slot).shifts = std::move(shifts);
}

}  // namespace detail

template <class Layer>
std::int64_t EditCalls<Layer>::rollback_limit(const Layer& layer, SequenceId seq) {
  return layer.state.sequence(idle_slot(layer, seq)).first_tail();
}
template <class Layer>
TruncateResult EditCalls<Layer>::truncate(Layer& layer, SequenceId seq, std::int64_t length,
                                          cudaStream_t stream) {
  const DeviceScope on("truncate", layer.state.device(), stream);
  refuse_capture("truncate", stream);
  std::vector<HeadRows> kept = kept_below(layer, seq, length, stream);
  const int slot = layer.sequences.find(seq);
  PageDemand demand;
  demand_truncation(layer.state, slot, length, demand);
  const HeldPages held(layer.state.pool().allocator(), demand.total());
  reserve_moves(layer.state, slot);
  ::lowrankkv::detail::ChangedSequences changed(layer.sequences, {&seq, 1});
  const TruncateResult result =
      truncate_sequence(layer.state, slot, length, std::move(kept), stream);
  changed.done();
  return result;
}
template <class Layer>
void EditCalls<Layer>::check_truncate(const Layer& layer, SequenceId seq, std::int64_t length) {
  const DeviceScope on(layer.state.device());
  static_cast<void>(kept_below(layer, seq, length, nullptr));
}
template <class Layer>
void EditCalls<Layer>::remove(Layer& layer, SequenceId seq, std::int64_t first, std::int64_t count,
                              cudaStream_t stream) {
  const DeviceScope on("remove", layer.state.device(), stream);
  refuse_capture("remove", stream);
  const RemovedRows rows = removed_rows(layer, seq, first, count, stream);
  const int slot = layer.sequences.find(seq);
  PageDemand demand;
  demand_removal(layer.state, slot, rows, demand);
  const HeldPages held(layer.state.pool().allocator(), demand.total());
  reserve_moves(layer.state, slot);
  ::lowrankkv::detail::ChangedSequences changed(layer.sequences, {&seq, 1});
  remove_tokens(layer.state, slot, first, count, rows, stream);
  changed.done();
}
template <class Layer>
std::int64_t EditCalls<Layer>::pages_to_remove(const Layer& layer, SequenceId seq,
                                               std::int64_t first, std::int64_t count) {
  const DeviceScope on(layer.state.device());
  const RemovedRows rows = removed_rows(layer, seq, first, count, nullptr);
  PageDemand demand;
  demand_removal(layer.state, layer.sequences.find(seq), rows, demand);
  return demand.total();
}
template <class Layer>
void EditCalls<Layer>::shift_positions(Layer& layer, SequenceId seq, std::int64_t first,
                                       std::int64_t delta, cudaStream_t stream) {
  const DeviceScope on("shift_positions", layer.state.device(), stream);
  refuse_capture("shift_positions", stream);
  const int slot = idle_slot(layer, seq);
  detail::set_shifts(layer, slot, shifted(layer.state, slot, first, delta), stream);
}
template <class Layer>
void EditCalls<Layer>::check_shift(const Layer& layer, SequenceId seq, std::int64_t first,
                                   std::int64_t delta) {
  static_cast<void>(shifted(layer.state, idle_slot(layer, seq), first, delta));
}
template <class Layer>
void EditCalls<Layer>::divide_positions(Layer& layer, SequenceId seq, std::int64_t first,
                                        std::int64_t count, std::int64_t divisor,
                                        cudaStream_t stream) {
  const DeviceScope on("divide_positions", layer.state.device(), stream);
  refuse_capture("divide_positions", stream);
  const int slot = idle_slot(layer, seq);
  detail::set_shifts(layer, slot, divided(layer.state, slot, first, count, divisor), stream);
}
template <class Layer>
void EditCalls<Layer>::check_division(const Layer& layer, SequenceId seq, std::int64_t first,
                                      std::int64_t count, std::int64_t divisor) {
  static_cast<void>(divided(layer.state, idle_slot(layer, seq), first, count, divisor));
}
template <class Layer>
const PositionShifts& EditCalls<Layer>::position_shifts(const Layer& layer, SequenceId seq) {
  return layer.state.sequence(layer.sequences.find(seq)).shifts;
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
