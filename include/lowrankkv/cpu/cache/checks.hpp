// SPDX-License-Identifier: Apache-2.0
/// @file cpu/cache/checks.hpp  The checks of CompressedKVCache<Cpu, ...> calls, made before a call
/// changes anything.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cpu/convert.hpp"
#include "lowrankkv/cpu/layer.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief The slot of a sequence. @throws StateError if its prompt is unfinished, SequenceError if
/// it does not exist
template <class Layer>
int idle_slot(const Layer& layer, SequenceId seq) {
  const int slot = layer.sequences.find(seq);
  if (layer.sequence(slot).prompt_open) {
    ::lowrankkv::detail::fail<StateError>(
        "sequence ", seq, ": its prompt of ", layer.table.lengths(slot).num_tokens,
        " tokens so far continues, a complete one is expected; call finish_prompt");
  }
  return slot;
}

/// @brief Checks that keys and values can be stored: page tables, and with config.check_finite
/// their values. @throws ShapeError, ValueError
template <class Layer>
void check_stored_values(const Layer& layer, const KeyView& key, const ValueView& value) {
  check_tables("key", key.pages, key.num_tokens);
  check_tables("value", value.pages, value.num_tokens);
  if (!layer.config.check_finite) return;
  float limit = max_finite(layer.config.full_type);
  if (layer.config.full_row_bits == 8)
    limit = (std::min)(limit, 128.0F * max_finite(DType::f16));  // 128 steps, each an f16
  float* row = layer.scratch_row();
  check_finite("key", key, limit, row);
  check_finite("value", value, limit, row);
}

/// @brief Checks queries of `tokens` tokens. @throws ShapeError, ValueError
template <class Layer>
void check_query(const Layer& layer, const QueryView& query, std::int64_t tokens) {
  ::lowrankkv::detail::check_rows("query", query, tokens, layer.config.shape.num_qo_heads,
                                  layer.head_dim());
  if (!layer.config.check_finite) return;
  check_finite("query", query, (std::numeric_limits<float>::max)(), layer.scratch_row());
}

/// @brief Checks that there are enough queries to score prompt rows by. @throws ShapeError
template <class Layer>
void check_query_window(const Layer& layer, int slot, const QueryView& window,
                        std::int64_t tokens) {
  using ::lowrankkv::detail::fail;
  if (window.num_tokens > 0) check_query(layer, window, window.num_tokens);
  if (window.num_tokens > tokens)
    fail<ShapeError>("q_window: ", window.num_tokens, " queries, ", tokens, " tokens");
  const std::int64_t chunk = layer.config.prefill_chunk;
  const bool ends_inside = chunk > 0 && layer.sequence(slot).chunk.size() + tokens > chunk;
  const std::int64_t wanted = layer.scoring_window();
  const bool all = Layer::accumulates_scores || (wanted > 0 && ends_inside);
  const std::int64_t needed = all ? tokens : (std::min)(tokens, wanted);
  if (window.num_tokens < needed) {
    fail<ShapeError>("q_window: prompt rows are chosen by the attention of ", needed,
                     " queries, given ", window.num_tokens);
  }
}

/// @brief Checks the shape of a log-sum-exp of `tokens` tokens, if it has data. @throws ShapeError
template <class Layer>
void check_lse(const Layer& layer, const LseView& lse, std::int64_t tokens) {
  if (lse.data == nullptr) return;
  ::lowrankkv::detail::check_equal("num_heads", "cache", layer.config.shape.num_qo_heads, "lse",
                                   lse.num_heads);
  ::lowrankkv::detail::check_equal("num_tokens", "expected", tokens, "lse", lse.num_tokens);
}

/// @brief Checks that a view of attention scores has all sequences and enough positions.
/// @throws ShapeError
template <class Layer>
void check_score_view(const Layer& layer, std::span<const SequenceId> seqs,
                      const ScoreView& accumulated) {
  if (accumulated.data == nullptr) return;
  ::lowrankkv::detail::check_equal("num_sequences", "call", static_cast<std::int64_t>(seqs.size()),
                                   "attention scores", accumulated.num_sequences);
  ::lowrankkv::detail::check_equal("num_heads", "cache", layer.num_kv_heads(), "attention scores",
                                   accumulated.num_heads);
  for (const SequenceId seq : seqs) {
    const std::int64_t tokens = layer.table.lengths(idle_slot(layer, seq)).num_tokens;
    if (accumulated.num_positions >= tokens) continue;
    ::lowrankkv::detail::fail<ShapeError>("attention scores: ", accumulated.num_positions,
                                          " positions, sequence ", seq, " has ", tokens, " tokens");
  }
}

/// @brief Checks the argument of accumulate(): scores are finite and not negative. Other values
/// would keep a row forever, or always drop it. @throws ValueError
inline void check_accumulated_values(const ScoreView& accumulated) {
  for (std::int64_t i = 0; i < accumulated.num_sequences; ++i) {
    for (int head = 0; head < accumulated.num_heads; ++head) {
      for (std::int64_t position = 0; position < accumulated.num_positions; ++position) {
        const float value = accumulated.row(i, head)[position];
        if (value >= 0.0F && value <= 1e30F) continue;
        ::lowrankkv::detail::fail<ValueError>("attention scores: position ", position, " of head ",
                                              head, " is ", value, ", 0 to 1e30 expected");
      }
    }
  }
}

/// @brief Checks the arguments of append(). @return tokens per sequence
/// @throws ShapeError, SequenceError, CapacityError, ValueError
template <class Layer>
int check_append(const Layer& layer, std::span<const SequenceId> seqs, const KeyView& key,
                 const ValueView& value, std::int64_t tail_capacity) {
  using ::lowrankkv::detail::fail;
  const std::int64_t count = static_cast<std::int64_t>(seqs.size());
  if (count == 0 ? key.num_tokens != 0 : key.num_tokens % count != 0)
    fail<ShapeError>("append: ", key.num_tokens, " tokens for ", count, " sequences");
  const std::int64_t m = count == 0 ? 0 : key.num_tokens / count;
  ::lowrankkv::detail::check_keys_and_values(key, value, count, m, layer.num_kv_heads(),
                                             layer.head_dim());
  for (std::size_t i = 0; i < seqs.size(); ++i) {
    const int slot = idle_slot(layer, seqs[i]);
    const SequenceLengths& now = layer.table.lengths(slot);
    for (std::size_t j = 0; j < i; ++j) {
      if (seqs[j] == seqs[i])
        fail<SequenceError>("append: sequence ", seqs[i], " stands at places ", j, " and ", i);
    }
    if (m > tail_capacity - now.tail_length) {
      fail<CapacityError>("tail_capacity: ", tail_capacity, ", sequence ", seqs[i], " has ",
                          now.tail_length, " rows in its tail, given ", m, "; call maintain");
    }
    const std::int64_t most = layer.sequences.max_tokens(slot);
    if (m > most - now.num_tokens) {
      fail<CapacityError>("max_tokens: ", most, ", sequence ", seqs[i], " has ", now.num_tokens,
                          ", given ", m);
    }
  }
  check_stored_values(layer, key, value);
  return static_cast<int>(m);
}

/// @brief Checks queries of the last appended tokens of some sequences. No tokens and no sequences
/// are fine. @return queries per sequence  @throws ShapeError, ValueError
template <class Layer>
std::int64_t check_step(const Layer& layer, std::span<const SequenceId> seqs,
                        const QueryView& query) {
  using ::lowrankkv::detail::fail;
  const std::int64_t count = static_cast<std::int64_t>(seqs.size());
  if (count == 0 ? query.num_tokens != 0 : query.num_tokens % count != 0)
    fail<ShapeError>("attend: ", query.num_tokens, " query tokens for ", count, " sequences");
  const std::int64_t m = count == 0 ? 0 : query.num_tokens / count;
  check_query(layer, query, query.num_tokens);
  for (const SequenceId seq : seqs) {
    const int tail = layer.table.lengths(idle_slot(layer, seq)).tail_length;
    if (m <= tail) continue;
    fail<ShapeError>("attend: ", m, " query tokens, sequence ", seq, " has ", tail,
                     " tokens in its tail");
  }
  return m;
}

/// @brief Checks the arguments of attend(). @return queries per sequence
template <class Layer>
std::int64_t check_attend(const Layer& layer, std::span<const SequenceId> seqs,
                          const QueryView& query, const OutputView& out, const LseView& lse) {
  const std::int64_t m = check_step(layer, seqs, query);
  ::lowrankkv::detail::check_rows("out", out, query.num_tokens, layer.config.shape.num_qo_heads,
                                  layer.head_dim());
  check_lse(layer, lse, query.num_tokens);
  return m;
}

/// @brief Checks the arguments of certify(). @return queries per sequence
/// @throws StateError without keep_residuals, ShapeError, ValueError
template <class Layer>
std::int64_t check_certify(const Layer& layer, std::span<const SequenceId> seqs,
                           const QueryView& query, const LseView& lse, const CertificateView& out) {
  using ::lowrankkv::detail::check_equal;
  using ::lowrankkv::detail::fail;
  if (!layer.config.keep_residuals) {
    fail<StateError>("certify: keep_residuals is ", layer.config.keep_residuals,
                     ", 1 is needed: norms of residuals are kept as rows are stored");
  }
  if (seqs.empty() || query.num_tokens == 0) {
    fail<ShapeError>("certify: ", query.num_tokens, " query tokens for ", seqs.size(),
                     " sequences");
  }
  const std::int64_t m = check_step(layer, seqs, query);
  if (lse.data == nullptr) fail<ShapeError>("lse: null pointer with num_tokens ", query.num_tokens);
  check_lse(layer, lse, query.num_tokens);
  for (std::int64_t token = 0; layer.config.check_finite && token < lse.num_tokens; ++token) {
    for (int head = 0; head < lse.num_heads; ++head) {
      const float value = lse.at(token, head);
      if (std::isfinite(value)) continue;
      fail<ValueError>("lse: token ", token, ", head ", head, " is ", value, ", finite expected");
    }
  }
  check_equal("num_tokens", "expected", query.num_tokens, "certificates",
              out.data == nullptr ? 0 : out.num_tokens);
  check_equal("num_heads", "cache", layer.config.shape.num_qo_heads, "certificates", out.num_heads);
  return m;
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
