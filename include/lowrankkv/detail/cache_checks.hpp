// SPDX-License-Identifier: Apache-2.0
/// @file detail/cache_checks.hpp  What CompressedKVCache checks before it changes anything, and the walk over prompt chunks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>

#include "lowrankkv/compressed_kv_cache.hpp"

// One macro, undefined below: the template head of every member here.
#define LOWRANKKV_CACHE_MEMBER template <class Be, class Ba, class Up, class To, class Qu, class Ep>
#define LOWRANKKV_CACHE CompressedKVCache<Be, Ba, Up, To, Qu, Ep>

LOWRANKKV_NAMESPACE_BEGIN

LOWRANKKV_CACHE_MEMBER
CacheConfig& LOWRANKKV_CACHE::checked(CacheConfig& config, const LayerBasis& basis, const PolicySet& policies, const Pool* pool) {
  using TokenImpl = Impl<To, Be>;
  detail::validate(config);
  if constexpr (TokenImpl::compresses) Impl<Ba, Be>::validate(policies.basis, basis, config.shape);
  const int recent = TokenImpl::recent(policies.token_policy);
  if (recent < 0) detail::fail<CapacityError>("recent: at least 0, given ", recent);
  if (config.tail_capacity == 0) config.tail_capacity = recent + 2 * config.flush_interval;
  if (config.tail_capacity <= recent + config.flush_interval) {
    detail::fail<CapacityError>("tail_capacity: ", config.tail_capacity, ", must exceed recent + flush_interval = ", recent + config.flush_interval);
  }
  if (pool != nullptr) {
    if (config.page_bytes != 0 && config.page_bytes != pool->page_bytes()) {
      detail::fail<ShapeError>("page_bytes: cache ", config.page_bytes, ", pool ", pool->page_bytes());
    }
    config.page_bytes = pool->page_bytes();
  }
  return config;
}

LOWRANKKV_CACHE_MEMBER
int LOWRANKKV_CACHE::idle_slot(SequenceId seq) const {
  const int slot = sequences_.find(seq);
  const std::int64_t pending = layer_.sequence(slot).chunk.size();
  if (pending > 0) detail::fail<StateError>("sequence ", seq, ": ", pending, " prompt tokens are unfinished, 0 allowed here; call finish_prompt");
  return slot;
}

LOWRANKKV_CACHE_MEMBER
std::int64_t LOWRANKKV_CACHE::pages_for_rows(int slot, std::int64_t added, Phase phase) const {
  const std::int64_t rows = layer_.table.lengths(slot).tail_length + layer_.sequence(slot).chunk.size() + added - layer_.recent();
  return rows <= 0 ? 0 : pages_to_compress(layer_, slot, rows, phase) + shared_pages(layer_, slot);
}

LOWRANKKV_CACHE_MEMBER
void LOWRANKKV_CACHE::commit_chunk(int slot) {
  const std::int64_t rows = layer_.table.lengths(slot).tail_length + layer_.sequence(slot).chunk.size() - layer_.recent();
  compress_rows(layer_, slot, (std::max)(std::int64_t{0}, rows), Phase::prefill);
}

LOWRANKKV_CACHE_MEMBER
void LOWRANKKV_CACHE::check_prompt(int slot, const KeyView& key, const ValueView& value) const {
  const std::int64_t n = key.num_tokens;
  detail::check_rows("key", key, n, layer_.num_kv_heads(), layer_.head_dim());
  detail::check_rows("value", value, n, layer_.num_kv_heads(), layer_.head_dim());
  const std::int64_t have = layer_.table.lengths(slot).num_tokens;
  if (n < 0 || have + n > layer_.config.max_tokens) {
    detail::fail<CapacityError>("max_tokens: ", layer_.config.max_tokens, ", sequence has ", have, ", given ", n);
  }
  check_stored_values(key, value);
  layer_.pool->allocator().require(pages_for_rows(slot, n, Phase::prefill));
}

LOWRANKKV_CACHE_MEMBER
void LOWRANKKV_CACHE::check_stored_values(const KeyView& key, const ValueView& value) const {
  if (!layer_.config.check_finite) return;
  row_.resize(static_cast<std::size_t>(layer_.head_dim()));
  const float limit = max_finite(layer_.config.full_type);
  cpu::check_finite("key", key, limit, row_.data());
  cpu::check_finite("value", value, limit, row_.data());
}

LOWRANKKV_CACHE_MEMBER
void LOWRANKKV_CACHE::check_query(const QueryView& query, std::int64_t tokens) const {
  detail::check_rows("query", query, tokens, layer_.config.shape.num_qo_heads, layer_.head_dim());
  if (!layer_.config.check_finite) return;
  row_.resize(static_cast<std::size_t>(layer_.head_dim()));
  cpu::check_finite("query", query, (std::numeric_limits<float>::max)(), row_.data());
}

LOWRANKKV_CACHE_MEMBER
void LOWRANKKV_CACHE::check_query_window(int slot, const QueryView& window, std::int64_t tokens) const {
  const PromptSelection selection = Impl<Up, Be>::prompt_selection(layer_.updater);
  const bool selects = Impl<Up, Be>::adapts && selection.share < 1.0F && selection.window > 0;
  if (window.num_tokens > 0) check_query(window, window.num_tokens);
  if (window.num_tokens > tokens) detail::fail<ShapeError>("q_window: ", window.num_tokens, " queries, ", tokens, " tokens");
  if (!selects) return;
  const std::int64_t chunk = layer_.config.prefill_chunk;
  const bool ends_inside = chunk > 0 && layer_.sequence(slot).chunk.size() + tokens > chunk;
  const std::int64_t needed = ends_inside ? tokens : (std::min)(tokens, std::int64_t{selection.window});
  if (window.num_tokens < needed) {
    detail::fail<ShapeError>("q_window: the updater selects prompt rows by the scores of ", needed, " queries, given ", window.num_tokens);
  }
}

LOWRANKKV_CACHE_MEMBER
void LOWRANKKV_CACHE::check_lse(const LseView& lse, std::int64_t tokens) const {
  if (lse.data == nullptr) return;
  detail::check_equal("num_heads", "cache", layer_.config.shape.num_qo_heads, "lse", lse.num_heads);
  detail::check_equal("num_tokens", "expected", tokens, "lse", lse.num_tokens);
}

LOWRANKKV_CACHE_MEMBER
int LOWRANKKV_CACHE::check_append(std::span<const SequenceId> seqs, const KeyView& key, const ValueView& value, std::int64_t tail_capacity) const {
  const std::int64_t count = static_cast<std::int64_t>(seqs.size());
  if (count == 0 || key.num_tokens % count != 0) detail::fail<ShapeError>("append: ", key.num_tokens, " tokens for ", count, " sequences");
  detail::check_rows("key", key, key.num_tokens, layer_.num_kv_heads(), layer_.head_dim());
  detail::check_rows("value", value, key.num_tokens, layer_.num_kv_heads(), layer_.head_dim());
  const std::int64_t m = key.num_tokens / count;
  for (std::size_t i = 0; i < seqs.size(); ++i) {
    const SequenceLengths& now = layer_.table.lengths(idle_slot(seqs[i]));
    for (std::size_t j = 0; j < i; ++j) {
      if (seqs[j] == seqs[i]) detail::fail<SequenceError>("append: sequence ", seqs[i], " stands at places ", j, " and ", i);
    }
    if (now.tail_length + m > tail_capacity) {
      detail::fail<CapacityError>("tail_capacity: ", tail_capacity, ", sequence ", seqs[i], " has ", now.tail_length, " rows in its tail, given ", m,
                                  "; call maintain");
    }
    if (now.num_tokens + m > layer_.config.max_tokens) {
      detail::fail<CapacityError>("max_tokens: ", layer_.config.max_tokens, ", sequence ", seqs[i], " has ", now.num_tokens, ", given ", m);
    }
  }
  check_stored_values(key, value);
  return static_cast<int>(m);
}

LOWRANKKV_CACHE_MEMBER
std::int64_t LOWRANKKV_CACHE::check_attend(std::span<const SequenceId> seqs, const QueryView& query, const OutputView& out, const LseView& lse) const {
  const std::int64_t count = static_cast<std::int64_t>(seqs.size());
  if (count == 0 || query.num_tokens % count != 0 || query.num_tokens == 0) {
    detail::fail<ShapeError>("attend: ", query.num_tokens, " query tokens for ", count, " sequences");
  }
  const std::int64_t m = query.num_tokens / count;
  check_query(query, query.num_tokens);
  detail::check_rows("out", out, query.num_tokens, layer_.config.shape.num_qo_heads, layer_.head_dim());
  check_lse(lse, query.num_tokens);
  for (const SequenceId seq : seqs) {
    const int tail = layer_.table.lengths(idle_slot(seq)).tail_length;
    if (m > tail) detail::fail<ShapeError>("attend: ", m, " query tokens, sequence ", seq, " has ", tail, " tokens in its tail");
  }
  return m;
}

/// Cuts a prompt into pieces that end where chunks end; every piece is stored, attended to, and compressed with its chunk.
LOWRANKKV_CACHE_MEMBER
template <class Function>
void LOWRANKKV_CACHE::for_each_piece(int slot, const KeyView& key, const ValueView& value, Prompt prompt, Function&& attend_piece) {
  const std::int64_t limit = layer_.config.prefill_chunk > 0 ? layer_.config.prefill_chunk : std::int64_t{1} << 40;
  const auto& chunk = layer_.sequence(slot).chunk;
  for (std::int64_t done = 0; done < key.num_tokens;) {
    const std::int64_t own_row = chunk.size();
    const std::int64_t count = (std::min)(key.num_tokens - done, limit - own_row);
    layer_.extend_chunk(slot, key.tokens(done, count), value.tokens(done, count));
    attend_piece(done, count, own_row);
    done += count;
    if (chunk.size() == limit) commit_chunk(slot);
  }
  if (prompt == Prompt::complete && !chunk.empty()) commit_chunk(slot);
}

LOWRANKKV_NAMESPACE_END

#undef LOWRANKKV_CACHE_MEMBER
#undef LOWRANKKV_CACHE
