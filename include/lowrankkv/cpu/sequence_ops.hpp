// SPDX-License-Identifier: Apache-2.0
/// @file cpu/sequence_ops.hpp  Fork, truncate, erase, reconstruct and byte counts of one sequence.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "lowrankkv/core/memory_usage.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cpu/layer_state.hpp"
#include "lowrankkv/cpu/segments.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Drops the compressed rows of each head's lists from row rows_of_head(head) on. With joint
/// values, a group's value list follows the group's first head.
template <class State, class RowsOfHead>
void truncate_compressed(State& state, int slot, RowsOfHead&& rows_of_head) {
  if (!State::TokenImpl::compresses) return;
  for (int head = 0; head < state.num_kv_heads(); ++head) {
    state.compressed.truncate(slot, head, rows_of_head(head));
    if (State::joins && head % state.heads_per_group() == 0)
      state.compressed.truncate(slot, state.value_list(head), rows_of_head(head));
  }
}

/// @brief Frees all resources of a slot.
template <class State>
void clear_slot(State& state, int slot) noexcept {
  for (int head = 0; head < state.num_kv_heads(); ++head) state.full.truncate(slot, head, 0);
  truncate_compressed(state, slot, [](int) { return 0; });
  for (const Segment& segment : state.used_segments(slot, 0)) state.epochs.release(segment.epoch);
  if (State::TokenImpl::compresses) state.epochs.release(state.sequence(slot).epoch);
  state.table.lengths(slot) = {};
  state.sequence(slot) = {};
}

/// @brief The updater state of a new sequence.
template <class State>
typename State::UpdaterImpl::State start_state(const State& state, int head, Part part) {
  if constexpr (requires(const UpdaterStart& start) {
                  State::UpdaterImpl::start(state.updater, start);
                }) {
    const HeadBasis& basis = state.calibrated.heads[static_cast<std::size_t>(head)];
    const bool keys = part == Part::key;
    return State::UpdaterImpl::start(
        state.updater, {state.head_dim(), keys ? basis.key_rank : basis.value_rank, part,
                        keys ? basis.key_threshold : basis.value_threshold});
  } else {
    return {};
  }
}

/// @brief Reserves accumulated scores for a full tail, because append() must not allocate.
template <class State>
void reserve_scores(const State& state, typename State::Sequence& sequence) {
  for (HeadScores& accumulated : sequence.accumulated)
    accumulated.recent.reserve(static_cast<std::size_t>(state.config.tail_capacity));
}

/// @brief An empty sequence under the calibrated epoch, for open_slot().
template <class State>
typename State::Sequence new_sequence(const State& state) {
  const std::size_t heads = static_cast<std::size_t>(state.num_kv_heads());
  typename State::Sequence sequence;
  sequence.used = true;
  sequence.adaptation.resize(heads);
  sequence.runs.resize(heads);
  if (State::accumulates_scores) sequence.accumulated.resize(heads);
  if (state.config.keep_residuals) sequence.residuals.resize(heads);
  reserve_scores(state, sequence);
  for (std::size_t head = 0; head < heads && State::TokenImpl::compresses; ++head) {
    sequence.adaptation[head].key_state = start_state(state, static_cast<int>(head), Part::key);
    sequence.adaptation[head].value_state = start_state(state, static_cast<int>(head), Part::value);
  }
  sequence.chunk = PromptChunk(state.num_kv_heads(), state.config.shape.num_qo_heads,
                               state.head_dim(), state.scoring_window());
  return sequence;
}

/// @brief Turns an unused slot into the sequence of new_sequence().
template <class State>
void open_slot(State& state, int slot, typename State::Sequence&& fresh) noexcept {
  state.sequence(slot) = std::move(fresh);
  if (State::TokenImpl::compresses) state.epochs.share(0);
}

/// @brief A copy of a sequence, for fork_slot().
template <class State>
typename State::Sequence copy_sequence(const State& state, int source) {
  typename State::Sequence copy = state.sequence(source);
  reserve_scores(state, copy);
  return copy;
}

/// @brief Makes the unused slot `target` a copy of `source`. Pages are shared until one of the two
/// writes. @param copy  of copy_sequence()
template <class State>
void fork_slot(State& state, int source, int target, typename State::Sequence&& copy) noexcept {
  state.table.lengths(target) = state.table.lengths(source);
  for (int head = 0; head < state.num_kv_heads(); ++head) {
    state.full.share(source, target, head);
    const auto from = state.used_segments(source, head);
    std::copy(from.begin(), from.end(), state.used_segments(target, head).begin());
  }
  for (int list = 0; State::TokenImpl::compresses && list < state.num_lists(); ++list)
    state.compressed.share(source, target, list);
  for (const Segment& segment : state.used_segments(target, 0)) state.epochs.share(segment.epoch);
  state.sequence(target) = std::move(copy);
  if (State::TokenImpl::compresses) state.epochs.share(state.sequence(target).epoch);
  state.tail.copy(source, target);
}

/// @brief Drops the positions from `length` on, where `length` is before the tail. Rows are
/// dropped; epochs and updater state stay.
template <class State>
void truncate_stored(State& state, int slot, std::int64_t length) noexcept {
  SequenceLengths& lengths = state.table.lengths(slot);
  for (int head = 0; head < state.num_kv_heads(); ++head) {
    RowRuns& runs = state.runs(slot, head);
    runs.truncate(length);
    const std::int32_t compressed = runs.num_rows(RowState::compressed);
    state.full.truncate(slot, head, runs.num_rows(RowState::full));
    if (State::accumulates_scores) {
      HeadScores& accumulated = state.accumulated(slot, head);
      accumulated.full.resize(static_cast<std::size_t>(runs.num_rows(RowState::full)));
      accumulated.compressed.resize(static_cast<std::size_t>(compressed));
      accumulated.recent.clear();
    }
    for (const RowState kind : {RowState::full, RowState::compressed}) {
      if (state.keeps_residuals(kind))
        state.residuals(slot, head).of(kind).resize(static_cast<std::size_t>(runs.num_rows(kind)));
    }
    for (Segment& segment : state.used_segments(slot, head)) {
      segment.num_rows =
          (std::max)(0, (std::min)(segment.num_rows, compressed - segment.first_row));
      segment.first_row = (std::min)(segment.first_row, compressed);
    }
  }
  truncate_compressed(
      state, slot, [&](int head) { return state.runs(slot, head).num_rows(RowState::compressed); });
  while (lengths.num_segments > 0) {
    bool last_empty = true;
    for (int head = 0; head < state.num_kv_heads(); ++head)
      last_empty = last_empty && state.used_segments(slot, head).back().num_rows == 0;
    if (!last_empty) break;
    state.epochs.release(state.used_segments(slot, 0).back().epoch);
    --lengths.num_segments;
  }
  std::int32_t& merging = state.sequence(slot).merging;
  if (merging + 1 >= lengths.num_segments) merging = -1;
  lengths.tail_length = 0;
  lengths.num_tokens = length;
}

/// @brief Writes the stored form of positions [first, first + count) of one head: full rows as they
/// are, compressed rows decoded, dropped rows as zeros. Cost: O(head_dim rank) per compressed row,
/// in runs of up to kTile rows.
template <class State>
void reconstruct_head(const State& state, int slot, int head, std::int64_t first,
                      std::int64_t count, const KeyTargetView& key, const ValueTargetView& value) {
  const int dim = state.head_dim();
  const int width = padded(dim);
  const PromptChunk& chunk = state.sequence(slot).chunk;
  const std::int64_t tail_position = state.first_tail_position(slot);
  const std::int64_t chunk_position = tail_position + state.table.lengths(slot).tail_length;
  std::vector<float> rows(static_cast<std::size_t>(kTile * width));
  for (std::int64_t token = 0; token < count;) {
    const std::int64_t position = first + token;
    float* const k = rows.data();
    float* const v = k + width;
    const RowPlace place = position < tail_position ? state.runs(slot, head).find(position)
                                                    : RowPlace{RowState::full, 0};
    if (place.state != RowState::compressed) {
      if (position >= chunk_position) {
        chunk.read_key(head, position - chunk_position, k);
        std::copy_n(chunk.values(head, position - chunk_position), dim, v);
      } else if (position >= tail_position) {
        state.tail.read(slot, head, Part::key, static_cast<int>(position - tail_position), k);
        state.tail.read(slot, head, Part::value, static_cast<int>(position - tail_position), v);
      } else if (place.state == RowState::dropped) {
        std::fill_n(k, dim, 0.0F);
        std::fill_n(v, dim, 0.0F);
      } else {
        load_coefficients(state.full, slot, head, Part::key, place.row, 1, k, dim);
        load_coefficients(state.full, slot, head, Part::value, place.row, 1, v, dim);
      }
      store_row(key, token, head, k);
      store_row(value, token, head, v);
      ++token;
      continue;
    }
    const auto segments = state.used_segments(slot, head);
    const auto segment = std::find_if(segments.begin(), segments.end(), [&](const Segment& s) {
      return place.row < s.first_row + s.num_rows;
    });
    const std::int32_t limit =
        (std::min)(segment->first_row + segment->num_rows - place.row, kTile);
    std::int32_t run = 1;
    while (run < limit && token + run < count && position + run < tail_position) {
      if (state.runs(slot, head).find(position + run).state != RowState::compressed) break;
      ++run;
    }
    const EpochHead& maps = state.epochs.head(segment->epoch, head);
    for (const Part part : {Part::key, Part::value}) {
      decode_rows(state, slot, head, maps, part, place.row, run, rows.data());
      for (std::int32_t i = 0; i < run; ++i) {
        if (part == Part::key)
          store_row(key, token + i, head, rows.data() + i * width);
        else
          store_row(value, token + i, head, rows.data() + i * width);
      }
    }
    token += run;
  }
}

/// @brief Bytes of one sequence, by category.
template <class State>
MemoryUsage slot_memory(const State& state, int slot) {
  const auto& sequence = state.sequence(slot);
  const SequenceLengths& lengths = state.table.lengths(slot);
  MemoryUsage usage;
  const auto count_pages = [&](std::size_t bytes, std::int32_t pages) {
    usage.slack_bytes += static_cast<std::size_t>(pages) * state.pool->page_bytes() - bytes;
  };
  for (int list = 0; State::TokenImpl::compresses && list < state.num_lists(); ++list) {
    const std::size_t coefficients =
        state.compressed.layout(list).bytes(state.table.rows(slot, list).num_compressed);
    usage.coefficient_bytes += coefficients;
    count_pages(coefficients, state.compressed.num_pages(slot, list));
  }
  for (int head = 0; head < state.num_kv_heads(); ++head) {
    const std::size_t h = static_cast<std::size_t>(head);
    const std::size_t full = state.full.layout(head).bytes(state.table.rows(slot, head).num_full);
    usage.full_row_bytes += full;
    count_pages(full, state.full.num_pages(slot, head));
    usage.position_bytes += sequence.runs[h].bytes();
    if (State::accumulates_scores) usage.updater_bytes += sequence.accumulated[h].bytes();
    if (state.config.keep_residuals) usage.residual_bytes += sequence.residuals[h].bytes();
    const auto& adaptation = sequence.adaptation[h];
    usage.updater_bytes += adaptation.key_basis.data.size() + adaptation.value_basis.data.size() +
                           State::UpdaterImpl::state_bytes(adaptation.key_state) +
                           State::UpdaterImpl::state_bytes(adaptation.value_state);
  }
  usage.position_bytes += sequence.shifts.bytes();
  usage.tail_bytes = static_cast<std::size_t>(lengths.tail_length) * state.tail.token_bytes();
  usage.pending_bytes = sequence.chunk.bytes();
  bool current_counted = sequence.epoch == 0;
  for (const Segment& segment : state.used_segments(slot, 0)) {
    if (segment.epoch != 0) usage.epoch_bytes += state.epochs.bytes(segment.epoch);
    current_counted = current_counted || segment.epoch == sequence.epoch;
  }
  if (!current_counted) usage.epoch_bytes += state.epochs.bytes(sequence.epoch);
  return usage;
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
