// SPDX-License-Identifier: Apache-2.0
/// @file cpu/remove_tokens.hpp  Removes tokens from the middle of a sequence: lists are compacted
/// (order kept), and later tokens take the freed indices.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lowrankkv/cpu/evict.hpp"
#include "lowrankkv/cpu/layer_state.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Adds the pages that remove_tokens() may have to copy because forks share them.
template <class State>
void demand_removal(const State& state, int slot, std::int64_t first, std::int64_t count,
                    PageDemand& demand) {
  for (int head = 0; head < state.num_kv_heads(); ++head) {
    const RowRuns& runs = state.runs(slot, head);
    for (const RowState kind : {RowState::full, RowState::compressed}) {
      const std::int32_t begin = runs.rows_before(kind, first),
                         end = runs.rows_before(kind, first + count);
      if (begin == end || end == runs.num_rows(kind)) continue;  // no row moves
      if (kind == RowState::full) {
        state.full.demand_rewrite(slot, head, 0, demand, begin);
      } else {
        state.compressed.demand_rewrite(slot, head, 0, demand, begin);
        if (State::joins && head % state.heads_per_group() == 0)
          state.compressed.demand_rewrite(slot, state.value_list(head), 0, demand, begin);
      }
    }
  }
}

/// @brief Removes the tokens [first, first + count), from the stored lists and from the tail. The
/// caller has checked demand_removal(). Cost: O(stored rows), and a copy of the codes behind the
/// first removed row.
template <class State>
void remove_tokens(State& state, int slot, std::int64_t first, std::int64_t count) {
  SequenceLengths& lengths = state.table.lengths(slot);
  const std::int64_t tail = state.first_tail_position(slot),
                     stored = std::clamp(tail - first, std::int64_t{0}, count);
  const int in_tail = static_cast<int>((std::max)(std::int64_t{0}, first - tail)),
            recent = static_cast<int>(count - stored);
  for (int head = 0; head < state.num_kv_heads(); ++head) {
    if (State::accumulates_scores) {
      std::vector<float>& accumulated_scores = state.accumulated(slot, head).recent;
      accumulated_scores.erase(accumulated_scores.begin() + in_tail,
                               accumulated_scores.begin() + in_tail + recent);
    }
    if (stored == 0) continue;
    RowRuns& runs = state.runs(slot, head);
    for (const RowState kind : {RowState::full, RowState::compressed}) {
      const std::int32_t begin = runs.rows_before(kind, first),
                         end = runs.rows_before(kind, first + stored);
      if (begin == end) continue;
      std::vector<bool> keep(static_cast<std::size_t>(runs.num_rows(kind)), true);
      std::fill(keep.begin() + begin, keep.begin() + end, false);
      detail::retain_rows(state, slot, head, kind, keep);
    }
    runs.remove(first, stored);
  }
  if (State::TokenImpl::compresses) drop_empty_segments(state, slot);
  state.tail.remove(slot, in_tail, recent, lengths.tail_length);
  lengths.tail_length -= recent;
  lengths.num_tokens -= count;
  state.sequence(slot).shifts.remove(first, count);
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
