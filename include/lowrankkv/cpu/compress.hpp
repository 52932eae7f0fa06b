// SPDX-License-Identifier: Apache-2.0
/// @file cpu/compress.hpp  Moves rows out of full rank: decides their fate, updates the basis,
/// publishes, projects, quantises and stores.
///
/// The same steps serve a prompt (the rows of a chunk) and decoding (T rows of the tail). All steps
/// see rows as they are stored, rounded to full_type, so that results do not depend on how a stream
/// was split into calls.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "lowrankkv/cpu/adapt.hpp"
#include "lowrankkv/cpu/evict.hpp"
#include "lowrankkv/cpu/layer_state.hpp"
#include "lowrankkv/cpu/outliers.hpp"
#include "lowrankkv/cpu/project.hpp"
#include "lowrankkv/cpu/residuals.hpp"
#include "lowrankkv/cpu/segments.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Adds to `demand` an upper bound of the pages that moving `count` rows out of full rank
/// takes, in one step or in several. The bound is computed from counts alone. Merges and evictions
/// may rewrite any stored row, so every shared page may need a copy.
template <class State>
void demand_compress(const State& state, int slot, std::int64_t count, Phase phase,
                     PageDemand& demand) {
  const auto add = [&](const auto& rows, int list, std::int64_t more, bool rewrites) {
    if (rewrites) {
      rows.demand_rewrite(slot, list, more, demand);
    } else {
      rows.demand_extend(slot, list, more, demand);
    }
  };
  for (int head = 0; head < state.num_kv_heads(); ++head) {
    const RowBounds bounds = State::TokenImpl::bounds(
        state.token_policy, {head, state.first_tail_position(slot), count, phase});
    add(state.full, head, bounds.full, State::accumulates_scores);
    const bool rewrites =
        State::accumulates_scores || (State::UpdaterImpl::adapts && bounds.compressed > 0);
    add(state.compressed, head, bounds.compressed, rewrites);
    if (State::joins && head % state.heads_per_group() == 0)
      add(state.compressed, state.value_list(head), bounds.compressed, rewrites);
  }
}

namespace detail {

/// Gathers all rows of a head that are still at full rank, oldest first: the tail's rows, then the
/// prompt chunk's.
template <class State>
void gather_flushed(const State& state, int slot, int head, std::int64_t count, Phase phase,
                    FlushedRows& rows) {
  const int dim = state.head_dim();
  const PromptChunk& chunk = state.sequence(slot).chunk;
  const std::int64_t tail = state.table.lengths(slot).tail_length;
  rows.count = count;
  // A prompt's recent window takes part in scoring. Decoded rows are decided on without it.
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
  if constexpr (wants(State::TokenImpl::evidence, Evidence::attention)) {
    if (phase == Phase::prefill)
      rows.scores = prompt_scores(state, slot, head, rows,
                                  State::TokenImpl::attention_scores(state.token_policy));
  }
}

/// Decides the fate of the flushed rows of the heads of a group, from their summed evidence.
template <class State>
void decide_group(State& state, int slot, int group, std::vector<FlushedRows>& rows, Phase phase) {
  const int first = group * state.heads_per_group();
  FlushedRows& leader = rows[static_cast<std::size_t>(first)];
  leader.fates.resize(static_cast<std::size_t>(leader.count));
  for (int head = first + 1; head < first + state.heads_per_group(); ++head) {
    const FlushedRows& other = rows[static_cast<std::size_t>(head)];
    for (std::size_t row = 0; row < leader.scores.size(); ++row)
      leader.scores[row] += other.scores[row];
  }
  RowBatch batch{first, state.first_tail_position(slot), leader.count, phase};
  if constexpr (requires { State::TokenImpl::pinned(state.token_policy, std::int64_t{}); }) {
    // Rows that stay in any case must not count against the number of kept rows.
    for (std::size_t row = 0; row < leader.scores.size(); ++row) {
      if (State::TokenImpl::pinned(state.token_policy,
                                   batch.first_position + static_cast<std::int64_t>(row)))
        leader.scores[row] = -1.0F;
    }
  }
  batch.attention = leader.scores;
  State::TokenImpl::classify(state.token_policy, batch, leader.fates);
  if constexpr (State::accumulates_scores) evict_rows(state, slot, first, leader, phase);
  for (int head = first + 1; head < first + state.heads_per_group(); ++head)
    rows[static_cast<std::size_t>(head)].fates = leader.fates;
}

/// Raises StateError if the token policy kept more rows than its bounds() allow: page tables are
/// sized by these.
template <class State>
void check_bounds(const State& state, int slot, const std::vector<FlushedRows>& rows, Phase phase) {
  for (int head = 0; head < state.num_kv_heads(); ++head) {
    const FlushedRows& mine = rows[static_cast<std::size_t>(head)];
    const RowBounds most = State::TokenImpl::bounds(
        state.token_policy, {head, state.first_tail_position(slot), mine.count, phase});
    const auto check = [&](RowState kind, const char* name, std::int64_t limit) {
      const auto kept = std::count_if(mine.fates.begin(), mine.fates.end(),
                                      [kind](RowFate fate) { return state_of(fate) == kind; });
      if (kept <= limit) return;
      ::lowrankkv::detail::fail<StateError>("token policy: classify() makes ", kept, " of ",
                                            mine.count, " rows of KV head ", head, " ", name,
                                            ", bounds() allows ", limit);
    };
    check(RowState::full, "full", most.full);
    check(RowState::compressed, "compressed", most.compressed);
  }
}

/// Calls store(first row in `rows`, count, row of the list) for the runs of rows of `range` in
/// state `kind`. `next` is the row of the list at which the first run goes.
template <class Store>
void for_each_run(const FlushedRows& rows, RowRange range, RowState kind, std::int32_t next,
                  Store&& store) {
  for (std::int64_t begin = range.begin; begin < range.end;) {
    const RowState here = state_of(rows.fates[static_cast<std::size_t>(begin)]);
    std::int64_t end = begin + 1;
    while (end < range.end && state_of(rows.fates[static_cast<std::size_t>(end)]) == here) ++end;
    if (here == kind) {
      store(begin, static_cast<std::int32_t>(end - begin), next);
      next += static_cast<std::int32_t>(end - begin);
    }
    begin = end;
  }
}

/// for_each_run(), with runs split into tiles of at most kTile rows.
template <class Store>
void for_each_tile(const FlushedRows& rows, RowRange range, RowState kind, std::int32_t next,
                   Store&& store) {
  for_each_run(rows, range, kind, next,
               [&](std::int64_t begin, std::int32_t count, std::int32_t row) {
                 for (std::int32_t done = 0; done < count; done += kTile)
                   store(begin + done, (std::min)(kTile, count - done), row + done);
               });
}

/// Stores the decided rows of `range` of the heads of a group. first[head] holds the sizes of the
/// head's lists before these rows.
template <class State>
void store_group(State& state, int slot, int group, const std::vector<FlushedRows>& rows,
                 RowRange range, const std::vector<HeadRows>& first) {
  const int dim = state.head_dim();
  const int leader = group * state.heads_per_group();
  std::vector<Projection> projections;
  for (int head = leader; head < leader + state.heads_per_group(); ++head) {
    const FlushedRows& mine = rows[static_cast<std::size_t>(head)];
    const HeadRows& next = first[static_cast<std::size_t>(head)];
    for_each_run(mine, range, RowState::full, next.num_full,
                 [&](std::int64_t begin, std::int32_t count, std::int32_t row) {
                   state.full.overwrite(slot, head, row, count, mine.keys.data() + begin * dim, dim,
                                        mine.values.data() + begin * dim, dim);
                 });
    if (std::find(mine.fates.begin() + range.begin, mine.fates.begin() + range.end,
                  RowFate::compressed) == mine.fates.begin() + range.end)
      continue;
    Projection& projection =
        projections.emplace_back(state.epochs.head(state.sequence(slot).epoch, head), dim);
    for_each_tile(
        mine, range, RowState::compressed, next.num_compressed,
        [&](std::int64_t begin, std::int32_t count, std::int32_t row) {
          const float* keys = projection.project(Part::key, mine.keys.data() + begin * dim, count);
          const float* values =
              State::joins
                  ? nullptr
                  : projection.project(Part::value, mine.values.data() + begin * dim, count);
          state.compressed.overwrite(slot, head, row, count, keys, projection.stride(Part::key),
                                     values, State::joins ? 0 : projection.stride(Part::value));
        });
  }
  if (!State::joins || projections.empty()) return;
  // One latent: the sum over heads of each head's values times its block of the value map.
  const int stride = projections.front().stride(Part::value);
  std::vector<float> sum(static_cast<std::size_t>(kTile * stride));
  for_each_tile(rows[static_cast<std::size_t>(leader)], range, RowState::compressed,
                first[static_cast<std::size_t>(leader)].num_compressed,
                [&](std::int64_t begin, std::int32_t count, std::int32_t row) {
                  std::fill(sum.begin(), sum.end(), 0.0F);
                  for (std::size_t member = 0; member < projections.size(); ++member) {
                    const FlushedRows& mine = rows[static_cast<std::size_t>(leader) + member];
                    const float* part = projections[member].project(
                        Part::value, mine.values.data() + begin * dim, count);
                    for (std::int32_t i = 0; i < count * stride; ++i)
                      sum[static_cast<std::size_t>(i)] += part[i];
                  }
                  state.compressed.overwrite(slot, state.value_list(leader), row, count, nullptr, 0,
                                             sum.data(), stride);
                });
}

/// Records what compression lost of the rows of `range` of the heads of a group. All these rows are
/// stored already.
template <class State>
void note_losses(State& state, int slot, int group, const std::vector<FlushedRows>& rows,
                 RowRange range, const std::vector<HeadRows>& first) {
  const int dim = state.head_dim();
  for (int head = group * state.heads_per_group(); head < (group + 1) * state.heads_per_group();
       ++head) {
    const FlushedRows& mine = rows[static_cast<std::size_t>(head)];
    float& largest = state.residuals(slot, head).largest_value;
    for (std::int64_t row = range.begin; row < range.end; ++row) {
      const float norm = 1.001F * static_cast<float>(norm_of(mine.values.data() + row * dim, dim));
      largest = norm <= largest    ? largest
                : std::isnan(norm) ? std::numeric_limits<float>::infinity()
                                   : norm;
    }
    const HeadRows& next = first[static_cast<std::size_t>(head)];
    for (const RowState list : {RowState::full, RowState::compressed}) {
      if (!state.keeps_residuals(list)) continue;
      for_each_tile(mine, range, list, list == RowState::full ? next.num_full : next.num_compressed,
                    [&](std::int64_t begin, std::int32_t count, std::int32_t row) {
                      note_residuals(state, slot, head, list, row, count,
                                     mine.keys.data() + begin * dim,
                                     mine.values.data() + begin * dim);
                    });
    }
  }
}

/// Extends the lists of one head by the decided rows of `range`, and records where the rows are.
/// @return the sizes of the lists before
template <class State>
HeadRows list_rows(State& state, int slot, int head, const FlushedRows& rows, RowRange range) {
  const HeadRows before = state.table.rows(slot, head);
  std::int32_t counts[3] = {0, 0, 0};
  for (std::int64_t row = range.begin; row < range.end; ++row) {
    const RowState kind = state_of(rows.fates[static_cast<std::size_t>(row)]);
    ++counts[static_cast<int>(kind)];
    state.runs(slot, head).append(kind, 1);
    if (State::accumulates_scores && kind != RowState::dropped) {
      HeadScores& accumulated = state.accumulated(slot, head);
      accumulated.of(kind).push_back(accumulated.recent[static_cast<std::size_t>(row)]);
    }
  }
  state.full.extend(slot, head, counts[static_cast<int>(RowState::full)]);
  const std::int32_t compressed = counts[static_cast<int>(RowState::compressed)];
  if (compressed == 0) return before;
  state.compressed.extend(slot, head, compressed);
  if (State::joins && head % state.heads_per_group() == 0)
    state.compressed.extend(slot, state.value_list(head), compressed);
  state.used_segments(slot, head).back().num_rows += compressed;
  return before;
}

/// Runs the updater on rows of `range`, and publishes the moved bases if a publication is due. At
/// most `compressed` rows per head will be compressed.
template <class State>
void adapt_range(State& state, int slot, std::vector<FlushedRows>& rows, RowRange range,
                 std::int64_t compressed, Phase phase) {
  score_for_updater(state, slot, rows, phase);
  state.threads->run(state.num_kv_heads(), [&](std::int64_t head, int) {
    adapt_head(state, slot, static_cast<int>(head), rows[static_cast<std::size_t>(head)], range,
               phase);
  });
  bool moved = false;
  for (const FlushedRows& head : rows) {
    state.statistics.rejected_updates += head.rejected;
    moved = moved || head.moved;
  }
  // Rows for which an epoch was published do not count towards the next one.
  const bool published =
      publication_due(state, slot, compressed, moved, phase) && publish(state, slot, rows, range);
  auto& sequence = state.sequence(slot);
  sequence.rows_since_publication = published ? 0 : sequence.rows_since_publication + compressed;
}

/// Moves the rows of `range` out of full rank: the updater observes them, a basis may be published,
/// outlier rows may stay at full rank, and all rows are stored.
template <class State>
void compress_range(State& state, int slot, std::vector<FlushedRows>& rows, RowRange range,
                    Phase phase) {
  const auto most_compressed = [&] {
    std::int64_t most = 0;
    for (const FlushedRows& head : rows) {
      most = (std::max)(
          most, std::int64_t{std::count(head.fates.begin() + range.begin,
                                        head.fates.begin() + range.end, RowFate::compressed)});
    }
    return most;
  };
  std::int64_t compressed = most_compressed();
  if constexpr (State::UpdaterImpl::adapts) {
    if (compressed > 0) adapt_range(state, slot, rows, range, compressed, phase);
  }
  if constexpr (State::TokenImpl::compresses &&
                wants(State::TokenImpl::evidence, Evidence::residuals)) {
    if (compressed > 0)
      state.threads->run(state.num_groups(), [&](std::int64_t group, int) {
        exempt_outliers(state, slot, static_cast<int>(group), rows, range, phase);
      });
    compressed = most_compressed();
    check_bounds(state, slot, rows, phase);
  }
  if (compressed > 0) open_segment(state, slot, phase);
  std::vector<HeadRows> before;
  for (int head = 0; head < state.num_kv_heads(); ++head)
    before.push_back(list_rows(state, slot, head, rows[static_cast<std::size_t>(head)], range));
  state.threads->run(state.num_groups(), [&](std::int64_t group, int) {
    store_group(state, slot, static_cast<int>(group), rows, range, before);
    if (state.config.keep_residuals)
      note_losses(state, slot, static_cast<int>(group), rows, range, before);
  });
}

/// Rebuilds the tail: the old tail without the `count` oldest rows, then the rest of the prompt
/// chunk.
template <class State>
void renew_tail(State& state, int slot, std::int64_t count) {
  SequenceLengths& lengths = state.table.lengths(slot);
  const PromptChunk& chunk = state.sequence(slot).chunk;
  const int from_tail = static_cast<int>((std::min)(count, std::int64_t{lengths.tail_length}));
  state.tail.remove(slot, 0, from_tail, lengths.tail_length);
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
  if (!chunk.empty()) clear_chunk(state, slot);
  if (!State::accumulates_scores) return;
  for (int head = 0; head < state.num_kv_heads(); ++head) {
    std::vector<float>& recent = state.accumulated(slot, head).recent;
    recent.erase(recent.begin(), recent.begin() + count);
  }
}

}  // namespace detail

/// @brief Moves the `count` oldest rows of the tail and the prompt chunk out of full rank. The
/// other rows become the tail. The caller has checked demand_compress(). Cost per row and head:
/// O(head_dim rank), plus the updater's cost.
template <class State>
void compress_rows(State& state, int slot, std::int64_t count, Phase phase) {
  if (count > 0) {
    std::vector<FlushedRows> rows(static_cast<std::size_t>(state.num_kv_heads()));
    state.threads->run(state.num_kv_heads(), [&](std::int64_t head, int) {
      detail::gather_flushed(state, slot, static_cast<int>(head), count, phase,
                             rows[static_cast<std::size_t>(head)]);
    });
    for (int group = 0; group < state.num_groups(); ++group)
      detail::decide_group(state, slot, group, rows, phase);
    detail::check_bounds(state, slot, rows, phase);
    if constexpr (State::accumulates_scores) drop_empty_segments(state, slot);
    const std::int64_t step = updates_sequentially<typename State::UpdaterPolicy, Cpu>()
                                  ? state.config.flush_interval
                                  : count;
    for (std::int64_t begin = 0; begin < count; begin += step) {
      detail::compress_range(state, slot, rows, {begin, (std::min)(begin + step, count)}, phase);
    }
    ++state.statistics.flushes;
  }
  detail::renew_tail(state, slot, count);
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
