// SPDX-License-Identifier: Apache-2.0
/// @file cuda/sequence_ops.cuh  A sequence forgets its last tokens; its tokens move to other positions.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lowrankkv/core/calls.hpp"
#include "lowrankkv/cuda/layer.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Whether a sequence can forget the tokens from `length` on. @param chosen  values decided which rows are stored how: the host does not know how many go
/// @throws ShapeError beyond the sequence, StateError deeper than the tail, but for 0, where rows were chosen
inline void check_truncation(const HostSequence& now, std::int64_t length, bool chosen) {
  using ::lowrankkv::detail::fail;
  if (length < 0 || length > now.num_tokens) fail<ShapeError>("truncate: length ", length, ", sequence has ", now.num_tokens, " tokens");
  const std::int64_t first_tail = now.num_tokens - now.tail_length;
  if (length < first_tail && chosen && length > 0) fail<StateError>("truncate: length ", length, ", rows up to ", first_tail, " are stored as their values decided; at least that, or 0, expected on this backend");
}

/// @brief Forgets the tokens from `length` on, which check_truncation() has found to be possible.
inline TruncateResult truncate_sequence(LayerState& layer, int slot, std::int64_t length, cudaStream_t stream) {
  HostSequence& now = layer.sequence(slot);
  const std::int64_t first_tail = now.num_tokens - now.tail_length;
  const bool exact = length >= first_tail;
  if (length < now.num_tokens && !now.shifts.pieces().empty()) {
    now.shifts.truncate(length);
    layer.rotary().write_shifts(slot, now.shifts, stream);
  }
  now.tail_length = exact ? static_cast<std::int32_t>(length - first_tail) : 0;
  now.num_tokens = length;
  if (!exact) {
    now.rows.num_full = static_cast<std::int32_t>((std::min)(length, std::int64_t{now.rows.num_full}));
    now.rows.num_compressed = (std::min)(static_cast<std::int32_t>(length) - now.rows.num_full, now.rows.num_compressed);  // others were dropped
  }
  layer.settle(slot, stream);
  return exact ? TruncateResult::exact : TruncateResult::inexact;
}

/// @brief What the shifts of a sequence are after the tokens from `first` on have moved by `delta`.
/// @throws StateError if keys are stored turned, ShapeError beyond the sequence, ValueError beyond farthest_shift() in all, CapacityError beyond kMaxShifts pieces
inline PositionShifts shifted(const LayerState& layer, int slot, std::int64_t first, std::int64_t delta) {
  const HostSequence& now = layer.sequence(slot);
  ::lowrankkv::detail::check_shift(now.shifts, layer.tables().rotary.turns(), now.num_tokens, first, delta, farthest_shift(layer.config().max_tokens));
  PositionShifts moved = now.shifts;
  moved.add(first, delta);
  if (moved.pieces().size() > kMaxShifts) ::lowrankkv::detail::fail<CapacityError>("shift_positions: positions in ", moved.pieces().size(), " pieces, at most ", kMaxShifts, " on this backend");
  return moved;
}
/// @brief What they are after the positions of tokens [first, first + count) were divided.
/// @throws StateError if keys are stored turned, ShapeError beyond the sequence, ValueError for other divisors than 1 to 2^20 in all, CapacityError beyond kMaxShifts pieces
inline PositionShifts divided(const LayerState& layer, int slot, std::int64_t first, std::int64_t count, std::int64_t divisor) {
  const HostSequence& now = layer.sequence(slot);
  ::lowrankkv::detail::check_division(now.shifts, layer.tables().rotary.turns(), now.num_tokens, first, count, divisor);
  PositionShifts moved = now.shifts;
  moved.divide(first, count, divisor);
  if (moved.pieces().size() > kMaxShifts) ::lowrankkv::detail::fail<CapacityError>("divide_positions: positions in ", moved.pieces().size(), " pieces, at most ", kMaxShifts, " on this backend");
  return moved;
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
