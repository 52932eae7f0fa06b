// SPDX-License-Identifier: Apache-2.0
/// @file cpu/evict.hpp  Dropping rows that are stored already: lists close up, positions of the others stay what they were.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lowrankkv/cpu/adapt.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

namespace detail {

/// Drops the rows of one list of a head; its masses follow.
template <class State>
void retain_rows(State& state, int slot, int head, RowState kind, const std::vector<bool>& keep) {
  std::vector<float>& mass = state.mass(slot, head).of(kind);
  std::size_t kept = 0;
  for (std::size_t row = 0; row < keep.size(); ++row) {
    if (keep[row]) mass[kept++] = mass[row];
  }
  mass.resize(kept);
  if (kind == RowState::full) {
    state.full.retain(slot, head, keep);
    return;
  }
  std::int32_t first = 0;
  for (Segment& segment : state.used_segments(slot, head)) {
    std::int32_t rows = 0;
    for (std::int32_t row = segment.first_row; row < segment.first_row + segment.num_rows; ++row) rows += keep[static_cast<std::size_t>(row)] ? 1 : 0;
    segment.first_row = first;
    segment.num_rows = rows;
    first += rows;
  }
  state.compressed.retain(slot, head, keep);
}

}  // namespace detail

/// @brief Lets the token policy drop stored and leaving rows of a head by the attention they have received.
/// Cost: O(stored rows), and a copy of the codes behind the first row dropped.
template <class State>
void evict_rows(State& state, int slot, int head, LeavingRows& rows, Phase phase) {
  RowRuns& runs = state.runs(slot, head);
  std::vector<RowState> states = runs.states();
  std::vector<StoredRow> stored;
  for (std::size_t position = 0; position < states.size(); ++position) {
    if (states[position] == RowState::dropped) continue;
    const RowPlace place = runs.find(static_cast<std::int64_t>(position));
    StoredRow row{state.mass(slot, head).of(place.state)[static_cast<std::size_t>(place.row)]};
    if constexpr (requires { State::TokenImpl::pinned(state.token_policy, std::int64_t{}); }) {
      row.pinned = State::TokenImpl::pinned(state.token_policy, static_cast<std::int64_t>(position));
    }
    stored.push_back(row);
  }
  RowBatch batch{head, state.first_tail_position(slot), rows.count, phase};
  batch.mass = std::span(state.mass(slot, head).recent).first(static_cast<std::size_t>(rows.count));
  State::TokenImpl::evict(state.token_policy, batch, stored, rows.fates);

  std::vector<bool> keep[2];
  std::size_t next = 0;
  bool any = false;
  for (RowState& kind : states) {
    if (kind == RowState::dropped) continue;
    const bool gone = stored[next++].gone;
    keep[kind == RowState::full ? 0 : 1].push_back(!gone);
    if (gone) kind = RowState::dropped;
    any = any || gone;
  }
  if (!any) return;
  runs.assign(states);
  detail::retain_rows(state, slot, head, RowState::full, keep[0]);
  detail::retain_rows(state, slot, head, RowState::compressed, keep[1]);
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
