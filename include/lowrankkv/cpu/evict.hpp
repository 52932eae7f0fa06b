// SPDX-License-Identifier: Apache-2.0
/// @file cpu/evict.hpp  Drops stored rows: lists are compacted (order kept), and the remaining rows
/// keep their positions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lowrankkv/cpu/adapt.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

namespace detail {

/// Keeps the rows of one list of a head whose `keep` is true, with their accumulated scores and
/// residuals.
template <class State>
void retain_rows(State& state, int slot, int head, RowState kind, const std::vector<bool>& keep) {
  if (State::accumulates_scores) keep_only(state.accumulated(slot, head).of(kind), keep);
  if (state.keeps_residuals(kind)) state.residuals(slot, head).of(kind).retain(keep);
  if (kind == RowState::full) {
    state.full.retain(slot, head, keep);
    return;
  }
  std::int32_t first = 0;
  for (Segment& segment : state.used_segments(slot, head)) {
    std::int32_t rows = 0;
    for (std::int32_t row = segment.first_row; row < segment.first_row + segment.num_rows; ++row)
      rows += keep[static_cast<std::size_t>(row)] ? 1 : 0;
    segment.first_row = first;
    segment.num_rows = rows;
    first += rows;
  }
  state.compressed.retain(slot, head, keep);
  if (State::joins && head % state.heads_per_group() == 0)
    state.compressed.retain(slot, state.value_list(head), keep);
}

}  // namespace detail

/// @brief Removes segments that have no row left in any head, and releases their epochs.
template <class State>
void drop_empty_segments(State& state, int slot) {
  SequenceLengths& lengths = state.table.lengths(slot);
  for (int index = lengths.num_segments - 1; index >= 0; --index) {
    const auto at = [&](int head) { return state.used_segments(slot, head).begin() + index; };
    bool empty = true;
    for (int head = 0; head < state.num_kv_heads(); ++head)
      empty = empty && at(head)->num_rows == 0;
    if (!empty) continue;
    state.epochs.release(at(0)->epoch);
    for (int head = 0; head < state.num_kv_heads(); ++head)
      std::copy(at(head) + 1, state.used_segments(slot, head).end(), at(head));
    --lengths.num_segments;
  }
}

/// @brief Lets the token policy drop stored and flushed rows of the heads of a group, by the
/// attention that the heads' rows have received together.
/// @param first  first head of the group
/// @param rows   the flushed rows
///
/// Cost: O(stored rows), and a copy of the codes behind the first dropped row.
template <class State>
void evict_rows(State& state, int slot, int first, FlushedRows& rows, Phase phase) {
  const int end = first + state.heads_per_group();
  // The same for all heads of the group.
  std::vector<RowState> states = state.runs(slot, first).states();
  std::vector<StoredRow> stored;
  for (std::size_t position = 0; position < states.size(); ++position) {
    if (states[position] == RowState::dropped) continue;
    const RowPlace place = state.runs(slot, first).find(static_cast<std::int64_t>(position));
    StoredRow row;
    for (int head = first; head < end; ++head)
      row.accumulated +=
          state.accumulated(slot, head).of(place.state)[static_cast<std::size_t>(place.row)];
    if constexpr (requires { State::TokenImpl::pinned(state.token_policy, std::int64_t{}); }) {
      row.pinned =
          State::TokenImpl::pinned(state.token_policy, static_cast<std::int64_t>(position));
    }
    stored.push_back(row);
  }
  std::vector<float> flushed(static_cast<std::size_t>(rows.count), 0.0F);
  for (int head = first; head < end; ++head) {
    for (std::size_t row = 0; row < flushed.size(); ++row)
      flushed[row] += state.accumulated(slot, head).recent[row];
  }
  RowBatch batch{first, state.first_tail_position(slot), rows.count, phase};
  batch.accumulated = flushed;
  State::TokenImpl::evict(state.token_policy, batch, stored, rows.fates);

  std::vector<bool> keep_full, keep_compressed;
  std::size_t next = 0;
  bool any = false;
  for (RowState& kind : states) {
    if (kind == RowState::dropped) continue;
    const bool gone = stored[next++].gone;
    (kind == RowState::full ? keep_full : keep_compressed).push_back(!gone);
    if (gone) kind = RowState::dropped;
    any = any || gone;
  }
  if (!any) return;
  for (int head = first; head < end; ++head) {
    state.runs(slot, head).assign(states);
    detail::retain_rows(state, slot, head, RowState::full, keep_full);
    detail::retain_rows(state, slot, head, RowState::compressed, keep_compressed);
  }
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
