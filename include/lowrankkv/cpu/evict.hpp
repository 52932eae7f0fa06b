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

/// @brief Removes segments that have no row left in any head, and releases their epochs. A merge of
/// such a segment is over.
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
    std::int32_t& merging = state.sequence(slot).merging;
    if (index == merging || index == merging + 1) {
      merging = -1;
    } else if (index < merging) {
      --merging;
    }
  }
}

/// @brief Lets the token policy drop stored and flushed rows of the heads of a group, by the
/// attention that the heads' rows have received together.
/// @param first  first head of the group
/// @param rows   the flushed rows
///
/// Cost: O(stored rows + runs of positions), and a copy of the codes behind the first dropped row.
template <class State>
void evict_rows(State& state, int slot, int first, FlushedRows& rows, Phase phase) {
  const int end = first + state.heads_per_group();
  const RowRuns& runs = state.runs(slot, first);  // the same for all heads of the group
  // Calls use(state, position, row) for every stored row, and skip(count) for dropped positions.
  const auto for_each_row = [&runs](auto&& use, auto&& skip) {
    for (std::size_t index = 0; index < runs.runs().size(); ++index) {
      const RowRun& run = runs.runs()[index];
      const std::int32_t length = runs.end_of(index) - run.first_position;
      if (run.state == RowState::dropped) {
        skip(length);
        continue;
      }
      for (std::int32_t at = 0; at < length; ++at)
        use(run.state, std::int64_t{run.first_position} + at,
            static_cast<std::size_t>(run.first_row + at));
    }
  };
  std::vector<StoredRow> stored;
  for_each_row(
      [&](RowState kind, [[maybe_unused]] std::int64_t position, std::size_t at) {
        StoredRow row;
        for (int head = first; head < end; ++head)
          row.accumulated += state.accumulated(slot, head).of(kind)[at];
        if constexpr (requires { State::TokenImpl::pinned(state.token_policy, std::int64_t{}); })
          row.pinned = State::TokenImpl::pinned(state.token_policy, position);
        stored.push_back(row);
      },
      [](std::int32_t) {});
  std::vector<float> flushed(static_cast<std::size_t>(rows.count), 0.0F);
  for (int head = first; head < end; ++head) {
    for (std::size_t row = 0; row < flushed.size(); ++row)
      flushed[row] += state.accumulated(slot, head).recent[row];
  }
  RowBatch batch{first, state.first_tail_position(slot), rows.count, phase};
  batch.accumulated = flushed;
  State::TokenImpl::evict(state.token_policy, batch, stored, rows.fates);

  std::vector<bool> keep_full, keep_compressed;
  RowRuns left;
  std::size_t next = 0;
  bool any = false;
  for_each_row(
      [&](RowState kind, std::int64_t, std::size_t) {
        const bool gone = stored[next++].gone;
        (kind == RowState::full ? keep_full : keep_compressed).push_back(!gone);
        left.append(gone ? RowState::dropped : kind, 1);
        any = any || gone;
      },
      [&](std::int32_t count) { left.append(RowState::dropped, count); });
  if (!any) return;
  for (int head = first; head < end; ++head) {
    state.runs(slot, head) = left;
    detail::retain_rows(state, slot, head, RowState::full, keep_full);
    detail::retain_rows(state, slot, head, RowState::compressed, keep_compressed);
  }
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
