// SPDX-License-Identifier: Apache-2.0
/// @file cuda/sequence/truncate_shift.cuh  Truncates a sequence, and shifts or divides its
/// positions.
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

/// @brief Removes the tokens from `length` on. The caller has checked the length and the pages
/// (demand_truncation).
/// @param kept  rows of every head [heads] that are left
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

/// @brief Adds to `demand` the pages shared with forks that truncate_sequence() must copy.
inline void demand_truncation(const LayerState& layer, int slot, std::int64_t length,
                              PageDemand& demand) {
  const HostSequence& now = layer.sequence(slot);
  for (const RowList list : {RowList::full, RowList::compressed}) {
    if (layer.is_scored(list) && length > 0 && length < now.first_tail())
      layer.demand_writes(slot, list, 0, now.num_rows(list), demand);
  }
}

/// @brief The shifts of a sequence after its tokens from `first` on have moved by `delta`.
/// @throws StateError with post-RoPE keys, ShapeError beyond the sequence, ValueError if an offset
/// would exceed farthest_shift(), CapacityError beyond kMaxShifts pieces
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
/// @brief The shifts of a sequence after the positions of tokens [first, first + count) were
/// divided.
/// @throws StateError with post-RoPE keys, ShapeError beyond the sequence, ValueError unless the
/// product of a token's divisors is in [1, 2^20], CapacityError beyond kMaxShifts pieces
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
