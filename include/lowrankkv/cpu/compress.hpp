// SPDX-License-Identifier: Apache-2.0
/// @file cpu/compress.hpp  Rows leave full rank: decide, update the basis, publish, project, quantise, store.
///
/// The same steps serve a prompt (the rows of a chunk) and decoding (T rows of the tail). Everything sees rows as they
/// are stored, rounded to full_type, so that how a stream was split into calls leaves no trace.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lowrankkv/cpu/adapt.hpp"
#include "lowrankkv/cpu/layer_state.hpp"
#include "lowrankkv/cpu/matmul.hpp"
#include "lowrankkv/cpu/segments.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Adds to `demand` an upper bound, from counts alone, of what moving `count` rows out of full rank takes from the
/// pool, in one step or in several. A merge may rewrite any compressed row, so sharers of pages may need them all.
template <class State>
void demand_compress(const State& state, int slot, std::int64_t count, Phase phase, PageDemand& demand) {
  std::vector<RowState> states;
  for (int head = 0; head < state.num_kv_heads(); ++head) {
    state.classify(slot, head, count, phase, states);
    const std::int64_t compressed = std::count(states.begin(), states.end(), RowState::compressed);
    state.full.demand_extend(slot, head, count - compressed, demand);
    if (State::UpdaterImpl::adapts && compressed > 0) {
      state.compressed.demand_rewrite(slot, head, compressed, demand);
    } else {
      state.compressed.demand_extend(slot, head, compressed, demand);
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
  state.classify(slot, head, count, phase, rows.states);
}

/// Coefficients (x - mean) down of `count` rows, tile by tile into the compressed list from row `first` on.
template <class State>
void project_and_store(State& state, int slot, int head, std::int32_t first, std::int32_t count, const float* keys, const float* values) {
  const int dim = state.head_dim();
  const EpochHead& maps = state.epochs.head(state.sequence(slot).epoch, head);
  const RowLayout& layout = state.compressed.layout(head);
  const int key_stride = padded(layout.key_rank);
  const int value_stride = padded(layout.value_rank);
  std::vector<float> key_map(static_cast<std::size_t>(dim * key_stride)), value_map(static_cast<std::size_t>(dim * value_stride));
  maps.key_down.load(key_map.data(), key_stride);
  maps.value_down.load(value_map.data(), value_stride);
  std::vector<float> rows(static_cast<std::size_t>(kTile * dim));
  std::vector<float> key_codes(static_cast<std::size_t>(kTile * key_stride)), value_codes(static_cast<std::size_t>(kTile * value_stride));
  const auto project = [&](const float* source, const StoredMatrix& mean, const std::vector<float>& map, int stride, std::int32_t n, std::vector<float>& out) {
    std::copy_n(source, static_cast<std::ptrdiff_t>(n) * dim, rows.begin());
    if (!mean.empty()) {
      const std::vector<float> centre = mean.values();
      for (std::int32_t row = 0; row < n; ++row) {
        for (int channel = 0; channel < dim; ++channel) rows[static_cast<std::size_t>(row * dim + channel)] -= centre[static_cast<std::size_t>(channel)];
      }
    }
    matmul<false>(n, stride, dim, rows.data(), dim, map.data(), stride, out.data(), stride);
  };
  for (std::int32_t done = 0; done < count; done += kTile) {
    const std::int32_t n = (std::min)(kTile, count - done);
    project(keys + static_cast<std::ptrdiff_t>(done) * dim, maps.key_mean, key_map, key_stride, n, key_codes);
    project(values + static_cast<std::ptrdiff_t>(done) * dim, maps.value_mean, value_map, value_stride, n, value_codes);
    state.compressed.overwrite(slot, head, first + done, n, key_codes.data(), key_stride, value_codes.data(), value_stride);
  }
}

/// Stores the decided rows of one head: runs of equal state go to the list of that state.
template <class State>
void store_head(State& state, int slot, int head, const LeavingRows& rows, std::int32_t full_row, std::int32_t compressed_row) {
  const int dim = state.head_dim();
  for (std::int64_t begin = 0; begin < rows.count;) {
    const RowState kind = rows.states[static_cast<std::size_t>(begin)];
    std::int64_t end = begin + 1;
    while (end < rows.count && rows.states[static_cast<std::size_t>(end)] == kind) ++end;
    const std::int32_t count = static_cast<std::int32_t>(end - begin);
    const float* keys = rows.keys.data() + begin * dim;
    const float* values = rows.values.data() + begin * dim;
    if (kind == RowState::full) {
      state.full.overwrite(slot, head, full_row, count, keys, dim, values, dim);
      full_row += count;
    } else {
      project_and_store(state, slot, head, compressed_row, count, keys, values);
      compressed_row += count;
    }
    begin = end;
  }
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
}

}  // namespace detail

/// @brief Moves the `count` oldest rows of the tail and the prompt chunk out of full rank; the others become the tail.
/// The caller has made sure of demand_compress(). Cost per row and head: O(head_dim rank), and what the updater takes.
template <class State>
void compress_rows(State& state, int slot, std::int64_t count, Phase phase) {
  const int heads = state.num_kv_heads();
  auto& sequence = state.sequence(slot);
  if (count > 0) {
    std::vector<LeavingRows> rows(static_cast<std::size_t>(heads));
    state.threads->run(heads, [&](std::int64_t head, int) {
      LeavingRows& mine = rows[static_cast<std::size_t>(head)];
      detail::gather_leaving(state, slot, static_cast<int>(head), count, phase, mine);
      if constexpr (State::UpdaterImpl::adapts) mine.rejected = adapt_head(state, slot, static_cast<int>(head), mine, phase);
    });
    for (const LeavingRows& head : rows) state.statistics.rejected_updates += head.rejected;
    std::int64_t most_compressed = 0;
    std::vector<std::int32_t> compressed(static_cast<std::size_t>(heads));
    for (std::size_t head = 0; head < rows.size(); ++head) {
      compressed[head] = static_cast<std::int32_t>(std::count(rows[head].states.begin(), rows[head].states.end(), RowState::compressed));
      most_compressed = (std::max)(most_compressed, std::int64_t{compressed[head]});
    }
    // The rows that an epoch was published for do not count towards the next one.
    const bool published = publication_due(state, slot, most_compressed, phase) && publish(state, slot);
    sequence.rows_since_publication = published ? 0 : sequence.rows_since_publication + most_compressed;
    if (most_compressed > 0) open_segment(state, slot);

    const std::int64_t first_position = state.first_tail_position(slot);
    std::vector<HeadRows> before(static_cast<std::size_t>(heads));
    for (int head = 0; head < heads; ++head) {
      const std::size_t h = static_cast<std::size_t>(head);
      before[h] = state.table.rows(slot, head);
      state.full.extend(slot, head, static_cast<std::int32_t>(count) - compressed[h]);
      state.compressed.extend(slot, head, compressed[h]);
      if (most_compressed > 0) state.used_segments(slot, head).back().num_rows += compressed[h];
      for (std::int64_t row = 0; row < count; ++row) {
        if (rows[h].states[static_cast<std::size_t>(row)] == RowState::full) state.add_full_position(slot, head, first_position + row);
      }
    }
    state.threads->run(heads, [&](std::int64_t head, int) {
      const std::size_t h = static_cast<std::size_t>(head);
      detail::store_head(state, slot, static_cast<int>(head), rows[h], before[h].num_full, before[h].num_compressed);
    });
    ++state.statistics.flushes;
  }
  detail::renew_tail(state, slot, count);
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
