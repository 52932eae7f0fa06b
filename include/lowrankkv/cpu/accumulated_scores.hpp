// SPDX-License-Identifier: Apache-2.0
/// @file cpu/accumulated_scores.hpp  The attention that each stored row gets from a block of
/// queries, which H2O accumulates.
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

/// target[t] += sum over rows i of exp(logit_it - lse_i) for the first visible(i) tokens of a tile.
template <class Visible>
void absorb_scores(const QueryRows& query, const float* logits, int count, const float* lse,
                   Visible&& visible, float* target) {
  for (int row = 0; row < query.rows; ++row) {
    const float shift = lse[row] - (query.bias != nullptr ? query.bias[row] : 0.0F);
    const int seen = (std::clamp)(visible(row), 0, count);
    for (int token = 0; token < seen; ++token)
      target[token] += std::exp(logits[row * kTile + token] - shift);
  }
}

}  // namespace detail

/// @brief Adds to `accumulated`, for every row of one KV head, its softmax weights under query
/// tokens [first_token, first_token + num_tokens) of `block`, summed over these tokens and the
/// group's heads. block.lse holds the queries' log-sum-exp. Cost: the logits once more, about half
/// of attend_block.
template <class Quantizer>
void scores_of_block(const StoredHead<Quantizer>& stored, const QueryBlock& block,
                     std::int64_t first_token, int num_tokens, AttentionWorkspace& work,
                     HeadScores& accumulated) {
  const int group = block.group_size;
  const QueryRows query =
      detail::load_queries(block, stored.head, stored.head_dim, first_token, num_tokens, work);
  std::vector<float> lse(static_cast<std::size_t>(query.rows));
  for (int row = 0; row < query.rows; ++row) {
    lse[static_cast<std::size_t>(row)] =
        block.lse.at(first_token + row / group, stored.head * group + row % group);
  }
  KeyReader<Quantizer> keys(stored, work);
  float* logits = work.logits.data();
  const auto of_tile = [&](const float* tile, int count, auto&& visible, float* target) {
    tile_logits(query, tile, count, logits);
    detail::absorb_scores(query, logits, count, lse.data(), visible, target);
  };
  const std::int32_t num_full = stored.full->size(stored.slot, stored.head);
  for (std::int32_t done = 0; done < num_full; done += kTile) {
    const int count = (std::min)(kTile, num_full - done);
    of_tile(
        keys.full(done, count), count, [count](int) { return count; },
        accumulated.full.data() + done);
  }
  for (const Segment& segment : stored.segments) {
    if (segment.num_rows == 0) continue;
    const QueryRows opened = keys.open(stored.epochs->head(segment.epoch, stored.head), query, 0);
    for (std::int32_t done = 0; done < segment.num_rows; done += kTile) {
      const int count = (std::min)(kTile, segment.num_rows - done);
      keys.logits(opened, segment.first_row + done, count, logits);
      detail::absorb_scores(
          opened, logits, count, lse.data(), [count](int) { return count; },
          accumulated.compressed.data() + segment.first_row + done);
    }
  }
  const bool prompt = stored.chunk != nullptr;
  const auto seen = [&](int row, int done, int count) {
    return static_cast<int>((std::clamp)(block.own_row + first_token + row / group + 1 - done,
                                         std::int64_t{0}, std::int64_t{count}));
  };
  for (int done = 0; done < stored.tail_length; done += kTile) {
    const int count = (std::min)(kTile, stored.tail_length - done);
    of_tile(
        keys.tail(done, count), count,
        [&](int row) { return prompt ? count : seen(row, done, count); },
        accumulated.recent.data() + done);
  }
  if (!prompt) return;
  for (int done = 0; done < static_cast<int>(stored.chunk->size()); done += kTile) {
    const int count = (std::min)(kTile, static_cast<int>(stored.chunk->size()) - done);
    of_tile(
        keys.chunk(done, count), count, [&](int row) { return seen(row, done, count); },
        accumulated.recent.data() + stored.tail_length + done);
  }
}

/// @brief Scores of all rows of a head, zero.
template <class State>
HeadScores zero_scores(const State& state, int slot, int head) {
  const HeadRows& rows = state.table.rows(slot, head);
  const std::int64_t recent =
      state.table.lengths(slot).tail_length + state.sequence(slot).chunk.size();
  return {std::vector<float>(static_cast<std::size_t>(rows.num_full)),
          std::vector<float>(static_cast<std::size_t>(rows.num_compressed)),
          std::vector<float>(static_cast<std::size_t>(recent))};
}

/// @brief Calls use(position, score of its row) for every position of a head that is not dropped.
template <class State, class Use>
void for_each_score(const State& state, int slot, int head, HeadScores& accumulated, Use&& use) {
  const RowRuns& runs = state.runs(slot, head);
  for (std::size_t run = 0; run < runs.runs().size(); ++run) {
    const RowRun& rows = runs.runs()[run];
    if (rows.state == RowState::dropped) continue;
    for (std::int32_t position = rows.first_position; position < runs.end_of(run); ++position) {
      use(position, accumulated.of(rows.state)[static_cast<std::size_t>(rows.first_row + position -
                                                                        rows.first_position)]);
    }
  }
  for (std::size_t row = 0; row < accumulated.recent.size(); ++row)
    use(runs.num_positions() + static_cast<std::int64_t>(row), accumulated.recent[row]);
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
