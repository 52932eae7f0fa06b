// SPDX-License-Identifier: Apache-2.0
/// @file cpu/compress.hpp  Rows leave full rank: decide, update the basis, publish, project, quantise, store.
///
/// The same steps serve a prompt (the rows of a chunk) and decoding (T rows of the tail). Everything sees rows as they
/// are stored, rounded to full_type, so that how a stream was split into calls leaves no trace.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "lowrankkv/cpu/adapt.hpp"
#include "lowrankkv/cpu/evict.hpp"
#include "lowrankkv/cpu/layer_state.hpp"
#include "lowrankkv/cpu/matmul.hpp"
#include "lowrankkv/cpu/outliers.hpp"
#include "lowrankkv/cpu/project.hpp"
#include "lowrankkv/cpu/segments.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Adds to `demand` an upper bound, from counts alone, of what moving `count` rows out of full rank takes from the
/// pool, in one step or in several. Merges and evictions may rewrite any stored row, so sharers of pages may need them all.
template <class State>
void demand_compress(const State& state, int slot, std::int64_t count, Phase phase, PageDemand& demand) {
  for (int head = 0; head < state.num_kv_heads(); ++head) {
    const RowBounds bounds = State::TokenImpl::bounds(state.token_policy, {head, state.first_tail_position(slot), count, phase});
    if (State::keeps_mass) {
      state.full.demand_rewrite(slot, head, bounds.full, demand);
    } else {
      state.full.demand_extend(slot, head, bounds.full, demand);
    }
    if (State::keeps_mass || (State::UpdaterImpl::adapts && bounds.compressed > 0)) {
      state.compressed.demand_rewrite(slot, head, bounds.compressed, demand);
    } else {
      state.compressed.demand_extend(slot, head, bounds.compressed, demand);
    }
  }
}

namespace detail {

/// All rows of a head that are still at full rank, oldest first: the tail's, then the prompt chunk's.
template <class State>
void gather_leaving(const State& state, int slot, int head, std::int64_t count, Phase phase, LeavingRows& rows) {
  const int dim = state.head_dim();
  const PromptChunk& chunk = state.sequence(slot).chunk;
  const std::int64_t tail = state.table.lengths(slot).tail_length;
  rows.count = count;
  // Decoded rows are decided on alone; a prompt's recent window takes part in scoring.
  rows.total = phase == Phase::prefill ? tail + chunk.size() : count;
  rows.keys.resize(static_cast<std::size_t>(rows.total * dim));
  rows.values.resize(static_cast<std::size_t>(rows.total * dim));
  for (std::int64_t row = 0; row < rows.total; ++row) {
    float* key = rows.keys.data() + row * dim;
    float* value = rows.values.data() + row * dim;
    if (row < tail) {
      state.tail.read(slot, head, Part::key, static_cast<int>(row), key);
      state.tail.read(slot, head, Part::value, static_cast<int>(row), value);
      continue;
    }
    chunk.read_key(head, row - tail, key);
    std::copy_n(chunk.values(head, row - tail), dim, value);
    for (int channel = 0; channel < dim; ++channel) {
      key[channel] = round_to(state.config.full_type, key[channel]);
      value[channel] = round_to(state.config.full_type, value[channel]);
    }
  }
  rows.fates.resize(static_cast<std::size_t>(count));
  RowBatch batch{head, state.first_tail_position(slot), count, phase};
  std::vector<float> scores;
  if constexpr (wants(State::TokenImpl::evidence, Evidence::attention)) {
    if (phase == Phase::prefill) scores = prompt_scores(state, slot, head, rows, State::TokenImpl::attention_scores(state.token_policy));
    batch.attention = scores;
  }
  State::TokenImpl::classify(state.token_policy, batch, rows.fates);
}

/// Stores the decided rows of `range` of one head: runs of equal state go to the list of that state.
template <class State>
void store_head(State& state, int slot, int head, const LeavingRows& rows, RowRange range, const HeadRows& first) {
  const int dim = state.head_dim();
  std::int32_t full_row = first.num_full;
  std::int32_t compressed_row = first.num_compressed;
  std::optional<Projection> projection;
  for (std::int64_t begin = range.begin; begin < range.end;) {
    const RowState kind = state_of(rows.fates[static_cast<std::size_t>(begin)]);
    std::int64_t end = begin + 1;
    while (end < range.end && state_of(rows.fates[static_cast<std::size_t>(end)]) == kind) ++end;
    const std::int32_t count = static_cast<std::int32_t>(end - begin);
    const float* keys = rows.keys.data() + begin * dim;
    const float* values = rows.values.data() + begin * dim;
    if (kind == RowState::full) {
      state.full.overwrite(slot, head, full_row, count, keys, dim, values, dim);
      full_row += count;
    } else if (kind == RowState::compressed) {
      if (!projection) projection.emplace(state.epochs.head(state.sequence(slot).epoch, head), dim);
      for (std::int32_t done = 0; done < count; done += kTile) {
        const std::int32_t n = (std::min)(kTile, count - done);
        const float* key_codes = projection->project(Part::key, keys + static_cast<std::ptrdiff_t>(done) * dim, n);
        const float* value_codes = projection->project(Part::value, values + static_cast<std::ptrdiff_t>(done) * dim, n);
        state.compressed.overwrite(slot, head, compressed_row + done, n, key_codes, projection->stride(Part::key), value_codes, projection->stride(Part::value));
      }
      compressed_row += count;
    }
    begin = end;
  }
}

/// Lists the decided rows of `range` of one head: makes room for them, notes where they are. Returns where they begin.
template <class State>
HeadRows list_rows(State& state, int slot, int head, const LeavingRows& rows, RowRange range) {
  const HeadRows before = state.table.rows(slot, head);
  std::int32_t counts[3] = {0, 0, 0};
  for (std::int64_t row = range.begin; row < range.end; ++row) {
    const RowState kind = state_of(rows.fates[static_cast<std::size_t>(row)]);
    ++counts[static_cast<int>(kind)];
    state.runs(slot, head).append(kind, 1);
    if (State::keeps_mass && kind != RowState::dropped) {
      HeadMass& mass = state.mass(slot, head);
      mass.of(kind).push_back(mass.recent[static_cast<std::size_t>(row)]);
    }
  }
  state.full.extend(slot, head, counts[static_cast<int>(RowState::full)]);
  const std::int32_t compressed = counts[static_cast<int>(RowState::compressed)];
  state.compressed.extend(slot, head, compressed);
  if (compressed > 0) state.used_segments(slot, head).back().num_rows += compressed;
  return before;
}

/// Rows [range) leave: the updater sees them, a basis may be published, those that it reconstructs badly may stay at full
/// rank, and all are stored.
template <class State>
void compress_range(State& state, int slot, std::vector<LeavingRows>& rows, RowRange range, Phase phase) {
  const int heads = state.num_kv_heads();
  auto& sequence = state.sequence(slot);
  const auto most_compressed = [&] {
    std::int64_t most = 0;
    for (const LeavingRows& head : rows) most = (std::max)(most, std::count(head.fates.begin() + range.begin, head.fates.begin() + range.end, RowFate::compressed));
    return most;
  };
  std::int64_t compressed = most_compressed();
  if (State::UpdaterImpl::adapts && compressed > 0) {
    state.threads->run(heads, [&](std::int64_t head, int) {
      LeavingRows& mine = rows[static_cast<std::size_t>(head)];
      mine.moved = false;
      mine.rejected = 0;
      adapt_head(state, slot, static_cast<int>(head), mine, range, phase);
    });
    bool moved = false;
    for (const LeavingRows& head : rows) {
      state.statistics.rejected_updates += head.rejected;
      moved = moved || head.moved;
    }
    // The rows that an epoch was published for do not count towards the next one.
    const bool published = publication_due(state, slot, compressed, moved, phase) && publish(state, slot, rows, range);
    sequence.rows_since_publication = published ? 0 : sequence.rows_since_publication + compressed;
  }
  if constexpr (wants(State::TokenImpl::evidence, Evidence::residuals)) {
    state.threads->run(heads, [&](std::int64_t head, int) {
      exempt_outliers(state, slot, static_cast<int>(head), rows[static_cast<std::size_t>(head)], range, phase);
    });
    compressed = most_compressed();
  }
  if (compressed > 0) open_segment(state, slot);
  std::vector<HeadRows> before;
  for (int head = 0; head < heads; ++head) before.push_back(list_rows(state, slot, head, rows[static_cast<std::size_t>(head)], range));
  state.threads->run(heads, [&](std::int64_t head, int) {
    store_head(state, slot, static_cast<int>(head), rows[static_cast<std::size_t>(head)], range, before[static_cast<std::size_t>(head)]);
  });
}

/// The rows that stay: the tail without the rows that left it, then the rest of the prompt chunk.
template <class State>
void renew_tail(State& state, int slot, std::int64_t count) {
  SequenceLengths& lengths = state.table.lengths(slot);
  auto& chunk = state.sequence(slot).chunk;
  const int from_tail = static_cast<int>((std::min)(count, std::int64_t{lengths.tail_length}));
  state.tail.drop_front(slot, from_tail, lengths.tail_length);
  lengths.tail_length -= from_tail;
  std::vector<float> key(static_cast<std::size_t>(state.head_dim()));
  for (std::int64_t row = count - from_tail; row < chunk.size(); ++row) {
    for (int head = 0; head < state.num_kv_heads(); ++head) {
      chunk.read_key(head, row, key.data());
      state.tail.write(slot, head, Part::key, lengths.tail_length, key.data());
      state.tail.write(slot, head, Part::value, lengths.tail_length, chunk.values(head, row));
    }
    ++lengths.tail_length;
  }
  if (!chunk.empty()) chunk.clear();
  if (!State::keeps_mass) return;
  for (int head = 0; head < state.num_kv_heads(); ++head) {
    std::vector<float>& recent = state.mass(slot, head).recent;
    recent.erase(recent.begin(), recent.begin() + count);
  }
}

}  // namespace detail

/// @brief Moves the `count` oldest rows of the tail and the prompt chunk out of full rank; the others become the tail.
/// The caller has made sure of demand_compress(). Cost per row and head: O(head_dim rank), and what the updater takes.
template <class State>
void compress_rows(State& state, int slot, std::int64_t count, Phase phase) {
  if (count > 0) {
    std::vector<LeavingRows> rows(static_cast<std::size_t>(state.num_kv_heads()));
    state.threads->run(state.num_kv_heads(), [&](std::int64_t head, int) {
      detail::gather_leaving(state, slot, static_cast<int>(head), count, phase, rows[static_cast<std::size_t>(head)]);
    });
    if constexpr (State::keeps_mass) {
      for (int head = 0; head < state.num_kv_heads(); ++head) evict_rows(state, slot, head, rows[static_cast<std::size_t>(head)], phase);
    }
    const std::int64_t step = updates_sequentially<typename State::UpdaterPolicy, Cpu>() ? state.config.flush_interval : count;
    for (std::int64_t begin = 0; begin < count; begin += step) {
      detail::compress_range(state, slot, rows, {begin, (std::min)(begin + step, count)}, phase);
    }
    ++state.statistics.flushes;
  }
  detail::renew_tail(state, slot, count);
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
