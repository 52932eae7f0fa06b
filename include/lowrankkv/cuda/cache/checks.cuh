// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache/checks.cuh  The checks of CompressedKVCache<Cuda, ...> calls, made before a
/// call changes anything.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cuda/layer/layer.cuh"
#include "lowrankkv/cuda/runtime/device.cuh"
#include "lowrankkv/cuda/runtime/device_scope.hpp"
#include "lowrankkv/cuda/scores/attention_scores.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Refuses a call during capture: its decisions on the host would not be replayed.
/// @throws StateError
inline void refuse_capture(const char* call, cudaStream_t stream) {
  if (!capturing(stream)) return;
  ::lowrankkv::detail::fail<StateError>(
      call,
      ": the stream is capturing a graph; only append, attend, attend_partial and accumulate can "
      "be captured");
}

/// @brief The slot of a sequence. @throws StateError if its prompt is unfinished, SequenceError if
/// it does not exist
template <class Layer>
int idle_slot(const Layer& layer, SequenceId seq) {
  const int slot = layer.sequences.find(seq);
  if (layer.prompts.of(slot).open) {
    ::lowrankkv::detail::fail<StateError>(
        "sequence ", seq, ": its prompt of ", layer.tokens_of(slot),
        " tokens so far continues, a complete one is expected; call finish_prompt");
  }
  return slot;
}
/// @brief idle_slot() of several sequences, without duplicates.
template <class Layer>
std::vector<int> idle_slots(const Layer& layer, std::span<const SequenceId> seqs) {
  std::vector<int> slots;
  std::vector<bool> named(static_cast<std::size_t>(layer.config.max_sequences));
  for (const SequenceId seq : seqs) {
    const int slot = idle_slot(layer, seq);
    if (named[static_cast<std::size_t>(slot)]) continue;
    named[static_cast<std::size_t>(slot)] = true;
    slots.push_back(slot);
  }
  return slots;
}

/// @brief Checks that no sequence is named twice. @throws SequenceError
inline void check_distinct(const char* call, std::span<const SequenceId> seqs) {
  if (seqs.size() > 32) {  // many steps of many sequences: not every pair
    std::vector<SequenceId> sorted(seqs.begin(), seqs.end());
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end()) return;
  }
  for (std::size_t i = 0; i < seqs.size(); ++i) {
    const auto here = seqs.begin() + static_cast<std::ptrdiff_t>(i);
    if (std::find(seqs.begin(), here, seqs[i]) == here) continue;
    ::lowrankkv::detail::fail<SequenceError>(call, ": sequence ", seqs[i], " stands at place ", i,
                                             " and before");
  }
}

/// @brief Checks that the views have m keys and values for each of `sequences` sequences.
template <class Layer>
void check_views(const Layer& layer, const KeyView& key, const ValueView& value,
                 std::int64_t sequences, std::int64_t m) {
  const CacheShape& shape = layer.config.shape;
  ::lowrankkv::detail::check_keys_and_values(key, value, sequences, m, shape.num_kv_heads,
                                             shape.head_dim);
}
/// @brief Checks the shape of queries of `tokens` tokens; they must not be paged.
template <class Layer>
void check_query(const Layer& layer, const QueryView& query, std::int64_t tokens) {
  const CacheShape& shape = layer.config.shape;
  ::lowrankkv::detail::check_rows("query", query, tokens, shape.num_qo_heads, shape.head_dim);
  if (query.pages.used()) {
    ::lowrankkv::detail::fail<ShapeError>("query: in pages of ", query.pages.page_tokens,
                                          " tokens, 0 expected on this backend");
  }
}
/// @brief Checks the shape of a log-sum-exp of `tokens` tokens.
template <class Layer>
void check_lse(const Layer& layer, const LseView& lse, std::int64_t tokens) {
  const int heads = layer.config.shape.num_qo_heads;
  ::lowrankkv::detail::check_equal("num_heads", "cache", heads, "lse", lse.num_heads);
  ::lowrankkv::detail::check_equal("num_tokens", "expected", tokens, "lse", lse.num_tokens);
}
/// @brief Checks the shapes of queries, outputs and, if it has data, log-sum-exp of `tokens`
/// tokens.
template <class Layer>
void check_queries(const Layer& layer, const QueryView& query, const OutputView& out,
                   const LseView& lse, std::int64_t tokens) {
  const CacheShape& shape = layer.config.shape;
  check_query(layer, query, tokens);
  ::lowrankkv::detail::check_rows("out", out, tokens, shape.num_qo_heads, shape.head_dim);
  if (lse.data != nullptr) check_lse(layer, lse, tokens);
}

/// @brief Checks the shapes of a prompt's rows, and that they fit the sequence. Returns the slot.
/// @throws ShapeError, CapacityError
template <class Layer>
int check_prompt(const Layer& layer, SequenceId seq, const KeyView& key, const ValueView& value) {
  const int slot = layer.sequences.find(seq);
  check_views(layer, key, value, 1, key.num_tokens);
  const std::int64_t tokens = layer.tokens_of(slot), most = layer.sequences.max_tokens(slot);
  if (key.num_tokens > most - tokens) {
    ::lowrankkv::detail::fail<CapacityError>("max_tokens: ", most, ", sequence has ", tokens,
                                             ", given ", key.num_tokens);
  }
  return slot;
}
/// @brief Checks that there are enough queries to score prompt rows by: of the last tokens of the
/// prompt, or of all tokens if a chunk ends inside the call or rows accumulate scores.
/// @throws ShapeError
template <class Layer>
void check_query_window(const Layer& layer, int slot, const QueryView& window,
                        std::int64_t tokens) {
  using ::lowrankkv::detail::fail;
  if (window.num_tokens > 0) check_query(layer, window, window.num_tokens);
  if (window.num_tokens > tokens) {
    fail<ShapeError>("q_window: ", window.num_tokens, " queries, ", tokens, " tokens");
  }
  const std::int64_t wanted = layer.scoring_window();
  const bool ends_inside = layer.prompts.of(slot).rows() + tokens > layer.chunk_limit();
  const bool all = Layer::Rows::accumulates_scores || (wanted > 0 && ends_inside);
  const std::int64_t needed = all ? tokens : (std::min)(tokens, wanted);
  if (window.num_tokens < needed) {
    fail<ShapeError>("q_window: prompt rows are chosen by the attention of ", needed,
                     " queries, given ", window.num_tokens);
  }
}

/// @brief The number of tokens for each of `count` sequences, 0 for none.
/// @param tokens_are, count_is  what they are called
/// @throws ShapeError unless all get equally many
inline int tokens_of_each(const char* call, std::int64_t tokens, const char* tokens_are,
                          std::int64_t count, const char* count_is) {
  if (count == 0 ? tokens != 0 : tokens % count != 0) {
    ::lowrankkv::detail::fail<ShapeError>(call, ": ", tokens, " ", tokens_are, " for ", count, " ",
                                          count_is);
  }
  return count == 0 ? 0 : static_cast<int>(tokens / count);
}
/// @brief Checks that attention can be asked for m query tokens of a sequence. @throws ShapeError
template <class Layer>
void check_query_tokens(const char* call, const Layer& layer, std::int64_t m) {
  const int most = layer.config.max_query_tokens;
  if (m <= most) return;
  ::lowrankkv::detail::fail<ShapeError>(call, ": ", m,
                                        " query tokens a sequence, max_query_tokens ", most);
}

/// @brief Checks the views of append(). Returns the number of tokens per sequence.
/// @throws ShapeError
template <class Layer>
int check_tokens(const Layer& layer, std::span<const SequenceId> seqs, const KeyView& key,
                 const ValueView& value) {
  const std::int64_t count = static_cast<std::int64_t>(seqs.size());
  const int m = tokens_of_each("append", key.num_tokens, "tokens", count, "sequences");
  check_views(layer, key, value, count, m);
  return m;
}
/// @brief Checks that m more tokens fit each sequence and its tail.
/// @throws CapacityError, SequenceError
template <class Layer>
void check_advance(const Layer& layer, std::span<const SequenceId> seqs, int m,
                   std::int64_t tail_capacity) {
  using ::lowrankkv::detail::fail;
  check_distinct("append", seqs);
  for (const SequenceId seq : seqs) {
    const int slot = idle_slot(layer, seq);
    const HostSequence& now = layer.state.sequence(slot);
    if (m > tail_capacity - now.tail_length) {
      fail<CapacityError>("tail_capacity: ", tail_capacity, ", sequence ", seq, " has ",
                          now.tail_length, " rows in its tail, given ", m, "; call maintain");
    }
    const std::int64_t most = layer.sequences.max_tokens(slot);
    if (m > most - now.num_tokens) {
      fail<CapacityError>("max_tokens: ", most, ", sequence ", seq, " has ", now.num_tokens,
                          ", given ", m);
    }
  }
}

/// @brief Checks that the view of received attention has all sequences and enough positions: those
/// of the longest sequence; during capture, those that replays can reach. @throws ShapeError
template <class Layer>
void check_scores(const Layer& layer, std::span<const SequenceId> seqs,
                  const ScoreView& accumulated, bool captured) {
  check_score_view(layer.config, accumulated, static_cast<std::int64_t>(seqs.size()), captured);
  for (const SequenceId seq : seqs) {
    const std::int64_t tokens = layer.state.sequence(idle_slot(layer, seq)).num_tokens;
    if (accumulated.num_positions >= tokens) continue;
    ::lowrankkv::detail::fail<ShapeError>("attention scores: ", accumulated.num_positions,
                                          " positions, sequence ", seq, " has ", tokens, " tokens");
  }
}

/// @brief Raises what certify() raises. Returns the number of query tokens per sequence.
template <class Layer>
int check_certify(const Layer& layer, std::span<const SequenceId> seqs, const QueryView& query,
                  const LseView& lse, const CertificateView& out) {
  using ::lowrankkv::detail::check_equal;
  using ::lowrankkv::detail::fail;
  const CacheConfig& config = layer.config;
  if (!config.keep_residuals) {
    fail<StateError>("certify: keep_residuals is ", config.keep_residuals,
                     ", 1 is needed: norms of residuals are kept as rows are stored");
  }
  const std::int64_t count = static_cast<std::int64_t>(seqs.size()), tokens = query.num_tokens;
  if (count == 0 || tokens == 0 || tokens % count != 0) {
    fail<ShapeError>("certify: ", tokens, " query tokens for ", count, " sequences");
  }
  check_query(layer, query, tokens);
  if (lse.data == nullptr) fail<ShapeError>("lse: null pointer with num_tokens ", tokens);
  check_lse(layer, lse, tokens);
  check_equal("num_tokens", "expected", tokens, "certificates",
              out.data == nullptr ? 0 : out.num_tokens);
  check_equal("num_heads", "cache", config.shape.num_qo_heads, "certificates", out.num_heads);
  const std::int64_t m = tokens / count;
  check_query_tokens("certify", layer, m);
  for (const SequenceId seq : seqs) {
    const int tail = layer.state.sequence(idle_slot(layer, seq)).tail_length;
    if (m <= tail) continue;
    fail<ShapeError>("certify: ", m, " query tokens, sequence ", seq, " has ", tail,
                     " tokens in its tail");
  }
  return static_cast<int>(m);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
