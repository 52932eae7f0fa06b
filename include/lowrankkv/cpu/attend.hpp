// SPDX-License-Identifier: Apache-2.0
/// @file cpu/attend.hpp  Attention of query rows over everything a sequence stores: full rows,
/// segments, tail, prompt chunk.
///
/// out = softmax(scale q [K_full; decode(C)]^T) [V_full; decode(C)], computed in coefficient space
/// (OjaKV A.3): each query is projected once per segment, q~ = q query_down; logits are q~ c_k; and
/// output_up expands sum p c_v once. With centred maps a segment adds q mean_k to its logits and
/// (sum p) mean_v to its output. Pre-RoPE keys are up-projected and rotated instead
/// (cpu/stored_head.hpp).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cpu/attention_block.hpp"
#include "lowrankkv/cpu/stored_head.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Queries of one call and what they see. Token t sees all stored rows and, of the tail (or
/// of the chunk during prefill), the rows up to and including its own row.
struct QueryBlock {
  QueryView query;  ///< [num_tokens, num_qo_heads, head_dim]
  OutputView out;
  LseView lse;
  int group_size = 1;
  float scale = 1.0F;
  std::int64_t own_row = 0;  ///< row of the first query token in the tail (or chunk)
};

namespace detail {

/// The rows of a block's queries, multiplied by the softmax scale.
inline QueryRows load_queries(const QueryBlock& block, int head, int head_dim,
                              std::int64_t first_token, int num_tokens, AttentionWorkspace& work) {
  const int group = block.group_size;
  const int width = padded(head_dim);
  for (int row = 0; row < num_tokens * group; ++row) {
    float* target = work.query.data() + row * width;
    load_row(block.query, first_token + row / group, head * group + row % group, target);
    for (int channel = 0; channel < head_dim; ++channel) target[channel] *= block.scale;
  }
  return {work.query.data(), width, num_tokens * group, head_dim, width, nullptr};
}

/// Attends to one segment: projects the queries, attends over coefficients, expands, and merges
/// into state 0.
template <class Quantizer>
void attend_segment(const StoredHead<Quantizer>& stored, const Segment& segment,
                    const QueryRows& full_query, KeyReader<Quantizer>& keys,
                    AttentionWorkspace& work) {
  const EpochHead& maps = stored.epochs->head(segment.epoch, stored.head);
  const int value_rank = maps.rank(Part::value);
  const int value_stride = padded(value_rank);
  const PartialState state = work.state(0);
  PartialState part = work.state(1);
  part.stride = value_stride;
  part.reset(full_query.rows);

  const QueryRows query = keys.open(maps, full_query, value_stride);
  float* logits = work.logits.data();
  for (std::int32_t done = 0; done < segment.num_rows; done += simd::kBlockRows) {
    const int count = (std::min)(simd::kBlockRows, segment.num_rows - done);
    keys.block_logits(query, segment.first_row + done, count, logits);
    absorb_logits(
        query, count, [count](int) { return count; }, logits, part);
    add_values(*stored.compressed, stored.slot, stored.value_list, query, segment.first_row + done,
               count, logits, work, part);
  }

  const int width = padded(stored.head_dim);
  maps.load_decoder(Part::value, work.map.data(), width, work.row.data());
  product(full_query.rows, width, value_rank, part.accumulator, part.stride, work.map.data(), width,
          work.expanded.data(), width);
  if (!maps.value_mean.empty()) {
    maps.value_mean.load(work.row.data(), width);
    for (int row = 0; row < full_query.rows; ++row) {
      for (int channel = 0; channel < stored.head_dim; ++channel) {
        work.expanded[static_cast<std::size_t>(row * width + channel)] +=
            part.sum[row] * work.row[static_cast<std::size_t>(channel)];
      }
    }
  }
  part.accumulator = work.expanded.data();
  part.stride = width;
  merge_states(full_query.rows, width, state, part);
}

}  // namespace detail

/// @brief Attention of one KV head's queries: tokens [first_token, first_token + num_tokens) of
/// `block`. num_tokens times the group size must be at most work.max_rows(). Writes out and, if
/// wanted, lse (natural logarithm). Allocates nothing. Cost: 2 (head_dim or rank) products per
/// stored row, query row and K or V.
template <class Quantizer>
void attend_block(const StoredHead<Quantizer>& stored, const QueryBlock& block,
                  std::int64_t first_token, int num_tokens, AttentionWorkspace& work) {
  const int group = block.group_size;
  const int rows = num_tokens * group;
  const int width = padded(stored.head_dim);
  const QueryRows query =
      detail::load_queries(block, stored.head, stored.head_dim, first_token, num_tokens, work);
  const PartialState state = work.state(0);
  state.reset(rows);

  KeyReader<Quantizer> keys(stored, work);
  float* logits = work.logits.data();
  const std::int32_t num_full = stored.full->size(stored.slot, stored.head);
  for (std::int32_t done = 0; done < num_full; done += simd::kBlockRows) {
    const int count = (std::min)(simd::kBlockRows, num_full - done);
    keys.full_logits(query, done, count, logits);
    absorb_logits(
        query, count, [count](int) { return count; }, logits, state);
    add_values(*stored.full, stored.slot, stored.head, query, done, count, logits, work, state);
  }
  for (const Segment& segment : stored.segments) {
    if (segment.num_rows > 0) detail::attend_segment(stored, segment, query, keys, work);
  }
  const bool prompt = stored.chunk != nullptr;
  const auto own_row = [&](int row) { return block.own_row + first_token + row / group; };
  const auto seen = [&](int row, std::int64_t done, int count) {
    return static_cast<int>((std::min)(own_row(row) + 1 - done, std::int64_t{count}));
  };
  for (int done = 0; done < stored.tail_length; done += simd::kBlockRows) {
    const int count = (std::min)(simd::kBlockRows, stored.tail_length - done);
    if (!prompt && seen(rows - 1, done, count) <= 0) break;  // the last query sees most
    keys.tail_logits(query, done, count, logits);
    absorb_logits(
        query, count, [&](int row) { return prompt ? count : seen(row, done, count); }, logits,
        state);
    for (int tile = 0; tile < count; tile += kTile) {
      const int length = (std::min)(kTile, count - tile);
      stored.tail->load_values(stored.slot, stored.head, done + tile, length, work.values.data(),
                               width);
      absorb_values(query, work.values.data(), length, width, logits + tile, state);
    }
  }
  if (prompt) {
    const std::int64_t last = own_row(rows - 1);
    for (std::int64_t done = 0; done <= last; done += simd::kBlockRows) {
      const int count =
          static_cast<int>((std::min)(std::int64_t{simd::kBlockRows}, last + 1 - done));
      keys.chunk_logits(query, done, count, logits);
      absorb_logits(
          query, count, [&](int row) { return seen(row, done, count); }, logits, state);
      absorb_values(query, stored.chunk->values(stored.head, done), count,
                    stored.chunk->value_stride(), logits, state);
    }
  }
  for (int row = 0; row < rows; ++row) {
    const std::int64_t token = first_token + row / group;
    const int head = stored.head * group + row % group;
    float* target = block.out.row(token, head);
    for (int channel = 0; channel < stored.head_dim; ++channel)
      target[channel] = state.accumulator[row * state.stride + channel] / state.sum[row];
    if (block.lse.data != nullptr)
      block.lse.at(token, head) = state.max[row] + std::log(state.sum[row]);
  }
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
