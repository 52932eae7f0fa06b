// SPDX-License-Identifier: Apache-2.0
/// @file cuda/sequence/truncate_shift.cuh  A sequence forgets its last tokens; its tokens move to
/// other positions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "lowrankkv/core/calls.hpp"
#include "lowrankkv/cuda/layer/layer_state.cuh"
#include "lowrankkv/cuda/store/compaction/retain_rows.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Forgets the tokens from `length` on, which the sequence has. @param kept  rows of every
/// head that stand before that. Pages were checked (demand_truncation).
template <class = void>
TruncateResult truncate_sequence(LayerState& layer, int slot, std::int64_t length,
                                 std::vector<HeadRows> kept, cudaStream_t stream) {
  HostSequence& now = layer.sequence(slot);
  const std::int64_t first_tail = now.first_tail();
  const bool exact = length >= first_tail;
  if (length < now.num_tokens && !now.shifts.pieces().empty()) {
    now.shifts.truncate(length);
    layer.rotary().write_shifts(slot, now.shifts, stream);
  }
  if (!exact && length > 0 && layer.tables().tail_scores != nullptr) {
    own_scored_pages(layer, slot, stream);
    retain_rows(layer, slot,
                {static_cast<std::int32_t>(length), std::numeric_limits<std::int32_t>::max()},
                stream);
  }
  now.tail_length = exact ? static_cast<std::int32_t>(length - first_tail) : 0;
  now.num_tokens = length;
  now.set_rows(std::move(kept));
  layer.release_and_upload(slot, stream);
  return exact ? TruncateResult::exact : TruncateResult::inexact;
}

/// @brief Adds the pages that truncate_sequence() has to copy, since forks share them.
inline void demand_truncation(const LayerState& layer, int slot, std::int64_t length,
                              PageDemand& demand) {
  const HostSequence& now = layer.sequence(slot);
  for (const RowList list : {RowList::full, RowList::compressed}) {
    if (layer.is_scored(list) && length > 0 && length < now.first_tail())
      layer.demand_writes(slot, list, 0, now.num_rows(list), demand);
  }
}

/// @brief What the shifts of a sequence are after the tokens from `first` on have moved by `delta`.
/// @throws StateError if keys are stored turned, ShapeError beyond the sequence, ValueError beyond
/// farthest_shift() in all, CapacityError beyond kMaxShifts pieces
inline PositionShifts shifted(const LayerState& layer, int slot, std::int64_t first,
                              std::int64_t delta) {
  const HostSequence& now = layer.sequence(slot);
  ::lowrankkv::detail::check_shift(now.shifts, layer.tables().rotary.pre_rope(), now.num_tokens,
                                   first, delta, farthest_shift(layer.config().max_tokens));
  PositionShifts moved = now.shifts;
  moved.add(first, delta);
  if (moved.pieces().size() > kMaxShifts)
    ::lowrankkv::detail::fail<CapacityError>("shift_positions: positions in ",
                                             moved.pieces().size(), " pieces, at most ", kMaxShifts,
                                             " on this backend");
  return moved;
}
/// @brief What they are after the positions of tokens [first, first + count) were divided.
/// @throws StateError if keys are stored turned, ShapeError beyond the sequence, ValueError for
/// other divisors than 1 to 2^20 in all, CapacityError beyond kMaxShifts pieces
inline PositionShifts divided(const LayerState& layer, int slot, std::int64_t first,
                              std::int64_t count, std::int64_t divisor) {
  const HostSequence& now = layer.sequence(slot);
  ::lowrankkv::detail::check_division(now.shifts, layer.tables().rotary.pre_rope(), now.num_tokens,
                                      first, count, divisor);
  PositionShifts moved = now.shifts;
  moved.divide(first, count, divisor);
  if (moved.pieces().size() > kMaxShifts)
    ::lowrankkv::detail::fail<CapacityError>("divide_positions: positions in ",
                                             moved.pieces().size(), " pieces, at most ", kMaxShifts,
                                             " on this backend");
  return moved;
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
