// SPDX-License-Identifier: Apache-2.0
/// @file cpu/attention_mass.hpp  How much attention every stored row gets from a block of queries: what H2O accumulates.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "lowrankkv/cpu/attend.hpp"
#include "lowrankkv/cpu/layer_state.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

namespace detail {

/// target[t] += sum over rows i of exp(q_i k_t - lse_i) for the first visible(i) tokens of a tile.
template <class Visible>
void absorb_mass(const QueryRows& query, const float* keys, int count, const float* lse, Visible&& visible, float* logits, float* target) {
  matmul<false>(query.rows, padded(count), query.key_width, query.data, query.stride, keys, kTile, logits, kTile);
  for (int row = 0; row < query.rows; ++row) {
    const float shift = lse[row] - (query.bias != nullptr ? query.bias[row] : 0.0F);
    const int seen = (std::clamp)(visible(row), 0, count);
    for (int token = 0; token < seen; ++token) target[token] += std::exp(logits[row * kTile + token] - shift);
  }
}

/// The same for rows [first, first + count) of a list, all visible.
template <class Rows>
void mass_of_rows(const Rows& list, int slot, int head, std::int32_t first, std::int32_t count, const QueryRows& query, const float* lse,
                  AttentionWorkspace& work, float* target) {
  for (std::int32_t done = 0; done < count; done += kTile) {
    const int rows = (std::min)(kTile, count - done);
    list.load_keys(slot, head, first + done, rows, work.keys.data(), kTile);
    absorb_mass(query, work.keys.data(), rows, lse, [rows](int) { return rows; }, work.logits.data(), target + done);
  }
}

}  // namespace detail

/// @brief Adds to `mass`, for every row of one KV head, its softmax weights under query tokens [first_token, first_token +
/// num_tokens) of `block`, summed over them and over the group's heads. block.lse holds their log-sum-exp.
/// Cost: the logits once more, about half of attend_block.
template <class Quantizer>
void mass_of_block(const StoredHead<Quantizer>& stored, const QueryBlock& block, std::int64_t first_token, int num_tokens, AttentionWorkspace& work, HeadMass& mass) {
  const int group = block.group_size;
  const QueryRows query = detail::load_queries(block, stored.head, stored.head_dim, first_token, num_tokens, work);
  std::vector<float> lse(static_cast<std::size_t>(query.rows));
  for (int row = 0; row < query.rows; ++row) {
    lse[static_cast<std::size_t>(row)] = block.lse.data[(first_token + row / group) * block.lse.token_stride + stored.head * group + row % group];
  }
  detail::mass_of_rows(*stored.full, stored.slot, stored.head, 0, stored.full->size(stored.slot, stored.head), query, lse.data(), work, mass.full.data());
  for (const Segment& segment : stored.segments) {
    if (segment.num_rows == 0) continue;
    const EpochHead& maps = stored.epochs->head(segment.epoch, stored.head);
    const QueryRows projected = detail::project_queries(maps, stored.head_dim, maps.rank(Part::key), 0, query, work);
    detail::mass_of_rows(*stored.compressed, stored.slot, stored.head, segment.first_row, segment.num_rows, projected, lse.data(), work,
                         mass.compressed.data() + segment.first_row);
  }
  const bool prompt = stored.chunk != nullptr;
  const auto seen = [&](int row, int done, int count) {
    return static_cast<int>((std::clamp)(block.own_row + first_token + row / group + 1 - done, std::int64_t{0}, std::int64_t{count}));
  };
  for (int done = 0; done < stored.tail_length; done += kTile) {
    const int count = (std::min)(kTile, stored.tail_length - done);
    stored.tail->load_keys(stored.slot, stored.head, done, count, work.keys.data(), kTile, work.row.data());
    detail::absorb_mass(query, work.keys.data(), count, lse.data(), [&](int row) { return prompt ? count : seen(row, done, count); }, work.logits.data(),
                        mass.recent.data() + done);
  }
  if (!prompt) return;
  for (int done = 0; done < static_cast<int>(stored.chunk->size()); done += kTile) {
    const int count = (std::min)(kTile, static_cast<int>(stored.chunk->size()) - done);
    detail::absorb_mass(query, stored.chunk->key_tile(stored.head, done / kTile), count, lse.data(), [&](int row) { return seen(row, done, count); },
                        work.logits.data(), mass.recent.data() + stored.tail_length + done);
  }
}

/// @brief Masses of all rows of a head, zero.
template <class State>
HeadMass zero_mass(const State& state, int slot, int head) {
  const HeadRows& rows = state.table.rows(slot, head);
  const std::int64_t recent = state.table.lengths(slot).tail_length + state.sequence(slot).chunk.size();
  return {std::vector<float>(static_cast<std::size_t>(rows.num_full)), std::vector<float>(static_cast<std::size_t>(rows.num_compressed)),
          std::vector<float>(static_cast<std::size_t>(recent))};
}

/// @brief Calls use(position, mass of its row) for every position of a head that is not dropped.
template <class State, class Use>
void for_each_mass(const State& state, int slot, int head, HeadMass& mass, Use&& use) {
  const RowRuns& runs = state.runs(slot, head);
  for (std::size_t run = 0; run < runs.runs().size(); ++run) {
    const RowRun& rows = runs.runs()[run];
    if (rows.state == RowState::dropped) continue;
    for (std::int32_t position = rows.first_position; position < runs.end_of(run); ++position) {
      use(position, mass.of(rows.state)[static_cast<std::size_t>(rows.first_row + position - rows.first_position)]);
    }
  }
  for (std::size_t row = 0; row < mass.recent.size(); ++row) use(runs.num_positions() + static_cast<std::int64_t>(row), mass.recent[row]);
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
