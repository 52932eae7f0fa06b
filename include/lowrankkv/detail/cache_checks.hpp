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
  const auto validate_policy = []<class Policy>(const Policy& policy) {  // optional: a policy's own parameters
    if constexpr (requires { Impl<Policy, Be>::validate(policy); }) Impl<Policy, Be>::validate(policy);
  };
  validate_policy(policies.updater);
  validate_policy(policies.token_policy);
  validate_policy(policies.quantizer);
  if constexpr (TokenImpl::compresses) {
    Impl<Ba, Be>::validate(policies.basis, basis, config.shape);
    detail::check_storable(basis, config.epoch_type);
  }
  const int recent = TokenImpl::recent(policies.token_policy);
  constexpr int limit = 1 << 24;
  if (recent < 0 || recent > limit) detail::fail<CapacityError>("recent: 0 to ", limit, ", given ", recent);
  if (config.flush_interval > limit) detail::fail<CapacityError>("flush_interval: 1 to ", limit, ", given ", config.flush_interval);
  const std::int64_t full_rows = TokenImpl::max_full_rows(policies.token_policy, config.max_tokens);
  if (full_rows < 0 || full_rows > config.max_tokens) {
    detail::fail<CapacityError>("token policy: max_full_rows ", full_rows, ", max_tokens ", config.max_tokens);
  }
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
  if (layer_.sequence(slot).prompt_open) {
    detail::fail<StateError>("sequence ", seq, ": its prompt of ", layer_.table.lengths(slot).num_tokens, " tokens so far continues, a complete one is expected; call finish_prompt");
  }
  return slot;
}

LOWRANKKV_CACHE_MEMBER
void LOWRANKKV_CACHE::demand_rows(int slot, std::int64_t added, Phase phase, PageDemand& demand) const {
  const std::int64_t rows = layer_.table.lengths(slot).tail_length + layer_.sequence(slot).chunk.size() + added - layer_.recent();
  if (rows > 0) demand_compress(layer_, slot, rows, phase, demand);
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
  if (n > layer_.config.max_tokens - have) {
    detail::fail<CapacityError>("max_tokens: ", layer_.config.max_tokens, ", sequence has ", have, ", given ", n);
  }
  check_stored_values(key, value);
  PageDemand demand;
  demand_rows(slot, n, Phase::prefill, demand);
  layer_.pool->allocator().require(demand.total());
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
    if (m > tail_capacity - now.tail_length) {
      detail::fail<CapacityError>("tail_capacity: ", tail_capacity, ", sequence ", seqs[i], " has ", now.tail_length, " rows in its tail, given ", m,
                                  "; call maintain");
    }
    if (m > layer_.config.max_tokens - now.num_tokens) {
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
  layer_.sequence(slot).prompt_open = prompt == Prompt::continues;
}

LOWRANKKV_NAMESPACE_END

#undef LOWRANKKV_CACHE_MEMBER
#undef LOWRANKKV_CACHE
