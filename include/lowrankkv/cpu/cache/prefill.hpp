// SPDX-License-Identifier: Apache-2.0
/// @file cpu/cache/prefill.hpp  The steps of prefill(), ingest() and finish_prompt(): a prompt is
/// divided into chunks, which are attended to and compressed one after the other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/core/calls.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cpu/cache/checks.hpp"
#include "lowrankkv/cpu/cache/flush.hpp"
#include "lowrankkv/cpu/layer.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Checks that a prompt's keys and values fit the cache and the sequence.
/// @return pages that storing them may take
/// @throws ShapeError, CapacityError, ValueError
template <class Layer>
std::int64_t check_prompt(const Layer& layer, int slot, const KeyView& key,
                          const ValueView& value) {
  const std::int64_t n = key.num_tokens;
  ::lowrankkv::detail::check_keys_and_values(key, value, 1, n, layer.num_kv_heads(),
                                             layer.head_dim());
  const std::int64_t have = layer.table.lengths(slot).num_tokens;
  const std::int64_t most = layer.sequences.max_tokens(slot);
  if (n > most - have) {
    ::lowrankkv::detail::fail<CapacityError>("max_tokens: ", most, ", sequence has ", have,
                                             ", given ", n);
  }
  check_stored_values(layer, key, value);
  PageDemand demand;
  demand_rows(layer, slot, n, Phase::prefill, demand);
  layer.pool->allocator().require(demand.total());
  return demand.total();
}

/// @brief Compresses all rows of the tail and the chunk but the last `recent`, and but those that
/// begin a group of rows without ending it.
template <class Layer>
void commit_chunk(Layer& layer, int slot) {
  const std::int64_t rows =
      layer.table.lengths(slot).tail_length + layer.sequence(slot).chunk.size() - layer.recent();
  compress_rows(layer, slot, whole_groups(layer, slot, (std::max)(std::int64_t{0}, rows)),
                Phase::prefill);
}

/// @brief Memory for the log-sum-exp of `tokens` tokens.
template <class Layer>
LseView scratch_lse(const Layer& layer, std::vector<float>& memory, std::int64_t tokens) {
  const int heads = layer.config.shape.num_qo_heads;
  memory.resize(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(heads));
  return {memory.data(), tokens, heads};
}

/// @brief Attends with one piece of a prompt, and accumulates the scores of the rows that it reads.
/// @param own_row  the chunk's row of the first query
template <class Layer>
void attend_piece(Layer& layer, int slot, const QueryView& query, const OutputView& out,
                  const LseView& lse, std::int64_t own_row) {
  std::vector<float> scratch;
  const LseView sums = Layer::accumulates_scores && lse.data == nullptr
                           ? scratch_lse(layer, scratch, query.num_tokens)
                           : lse;
  const QueryBlock block{query,  out, sums, layer.config.shape.group_size(), layer.config.scale(),
                         own_row};
  layer.attend(
      1, [&](std::int64_t) { return slot; },
      [&](std::int64_t) -> const QueryBlock& { return block; }, true);
  if constexpr (Layer::accumulates_scores) {
    layer.accumulated_attention(
        slot, block, true, [&](int head) -> auto& { return layer.accumulated(slot, head); });
  }
}

/// @brief Splits a prompt into pieces that end where chunks end. Each piece is stored and attended
/// to. A chunk is compressed when it is complete, or when the prompt is.
/// @param attend  called with the first token of a piece, its number of tokens, and the chunk's row
/// of its first token
template <class Layer, class Attend>
void for_each_piece(Layer& layer, int slot, const KeyView& key, const ValueView& value,
                    Prompt prompt, Attend&& attend) {
  const std::int64_t limit =
      layer.config.prefill_chunk > 0 ? layer.config.prefill_chunk : std::int64_t{1} << 40;
  const auto& chunk = layer.sequence(slot).chunk;
  for (std::int64_t done = 0; done < key.num_tokens;) {
    const std::int64_t own_row = chunk.size();
    const std::int64_t count = (std::min)(key.num_tokens - done, limit - own_row);
    layer.extend_chunk(slot, key.tokens(done, count), value.tokens(done, count));
    attend(done, count, own_row);
    done += count;
    if (chunk.size() == limit) commit_chunk(layer, slot);
  }
  if (prompt == Prompt::complete && !chunk.empty()) commit_chunk(layer, slot);
  layer.sequence(slot).prompt_open = prompt == Prompt::continues;
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
