// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache/prefill.cuh  PromptCalls: prefill(), ingest() and finish_prompt(). A prompt is
/// divided into chunks, which are packed, attended to and stored one after the other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "lowrankkv/core/calls.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cuda/attention/attend.cuh"
#include "lowrankkv/cuda/cache/calls.hpp"
#include "lowrankkv/cuda/cache/checks.cuh"
#include "lowrankkv/cuda/compress/compress.cuh"
#include "lowrankkv/cuda/compress/flushed_rows.cuh"
#include "lowrankkv/cuda/layer/layer.cuh"
#include "lowrankkv/cuda/runtime/device_scope.hpp"
#include "lowrankkv/cuda/scores/pre_rope_scores.cuh"
#include "lowrankkv/cuda/store/pack_rows.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Prompt queries per attention step. More would need large partial states.
inline constexpr std::int64_t kQueriesAtOnce = 256;

/// @brief Some tokens of a prompt. Outputs without data are not written. Queries may cover only the
/// last tokens.
struct PromptTokens {
  KeyView key;
  ValueView value;
  QueryView query;
  DeviceOutput out;      ///< rows as those of `key`
  bool attends = false;  ///< the queries attend to the prompt

  std::int64_t count() const { return key.num_tokens; }
  /// @brief Tokens [first, first + count).
  PromptTokens part(std::int64_t first, std::int64_t count) const {
    const std::int64_t offset = key.num_tokens - query.num_tokens;
    const std::int64_t begin = (std::max)(first, offset), end = (std::max)(begin, first + count);
    PromptTokens some{key.tokens(first, count), value.tokens(first, count), {}, out, attends};
    if (end > begin) some.query = query.tokens(begin - offset, end - begin);
    if (out.data != nullptr) some.out.data += first * out.token_stride;
    if (out.lse != nullptr) some.out.lse += first * out.lse_stride;
    return some;
  }
};

namespace detail {

/// How many of a chunk's `flushed` rows are compressed at a time: all, if prompt scores or
/// accumulated scores choose among them; flush_interval rows for sketches without such a choice.
template <class Layer>
std::int64_t flushed_at_once(const Layer& layer, std::int64_t flushed) {
  using Rows = typename Layer::Rows;
  return Layer::sketches && !Rows::by_scores && !Rows::accumulates_scores
             ? layer.config.flush_interval
             : flushed;
}
/// The most rows of a chunk that can be staged.
template <class Layer>
std::int64_t most_waiting(const Layer& layer) {
  return (std::min)(layer.chunk_limit(), layer.config.max_tokens);
}
/// Queries of a chunk that are kept while it is staged.
template <class Layer>
std::int64_t kept_queries(const Layer& layer) {
  return Layer::Rows::accumulates_scores ? most_waiting(layer)
                                         : std::int64_t{layer.scoring_window()};
}

/// Reserves all the memory that a call works in, so that nothing is allocated once it has begun.
/// May allocate, which waits.
/// @param after  the most rows that lists will have
template <class Layer>
void reserve_prompt(Layer& layer, int slot, const PromptTokens& tokens, Prompt prompt,
                    const HeadRows& after, cudaStream_t stream) {
  constexpr bool accumulates_scores = Layer::Rows::accumulates_scores;
  const CacheShape& shape = layer.config.shape;
  const std::int64_t before = layer.prompts.of(slot).rows(), limit = layer.chunk_limit();
  const std::int64_t chunk = (std::min)(limit, before + tokens.count());
  if (chunk == 0) return;
  const std::int64_t recent = recent_rows(layer.policies.token_policy);
  const std::int64_t tail =
      (std::max)(std::int64_t{layer.state.sequence(slot).tail_length}, recent);
  const std::int64_t window = layer.scoring_window();
  const bool goes_on = prompt == Prompt::continues && (before + tokens.count()) % limit != 0;
  std::int64_t rows = tail + chunk;
  if (before > 0 || goes_on) {
    OpenPrompt& waiting = layer.prompts.begin(slot);
    waiting.reserve(shape, chunk, tokens.query.num_tokens, kept_queries(layer), most_waiting(layer),
                    accumulates_scores, stream);
    rows = tail + waiting.room(shape);  // enough until the staging buffers grow again
  }
  const int columns = static_cast<int>((std::min)(window, chunk)) * shape.group_size();
  const std::int64_t scored = rows_in(after, layer.state.tables().scored);
  const CompressScratch scratch = prompt_scratch(layer, rows, columns, scored);
  if (!tokens.attends) return;
  const int at_once = static_cast<int>((std::min)(tokens.count(), kQueriesAtOnce));
  layer.state.workspace().prompt_step(after, at_once, layer.state.packed_tiles(rows),
                                      scratch.packed);
  if (accumulates_scores) layer.state.workspace().prompt_lse(chunk);
}

/// The queries that score a chunk of n tokens, packed behind its sequence's tail.
template <class Layer>
ScoreQueries score_queries(const Layer& layer, int slot, const QueryView& window, std::int64_t n) {
  const CacheConfig& config = layer.config;
  const std::int64_t rows = layer.state.sequence(slot).tail_length + n;
  const std::int64_t count = (std::min)(window.num_tokens, std::int64_t{layer.scoring_window()});
  if (count == 0) return {};
  return {device_rows(window.tokens(window.num_tokens - count, count)),
          static_cast<std::int32_t>(count), config.shape.group_size(),
          static_cast<std::int32_t>(rows), config.scale() * 1.44269504F};
}

/// Packs prompt rows into plain tiles behind the rows of the sequence's tail. Returns the scratch
/// memory that holds them.
template <class Layer>
CompressScratch pack_chunk(const Layer& layer, int slot, const KeyView& key, const ValueView& value,
                           int columns, cudaStream_t stream) {
  const HostSequence& now = layer.state.sequence(slot);
  const std::int64_t tail = now.tail_length, rows = tail + key.num_tokens;
  const std::int64_t scored = now.num_rows(layer.state.tables().scored);
  const CompressScratch scratch = prompt_scratch(layer, rows, columns, scored);
  const dim3 pieces(static_cast<unsigned>((rows + kStoreRows - 1) / kStoreRows),
                    static_cast<unsigned>(layer.config.shape.num_kv_heads));
  const std::size_t bytes = pack_rows_bytes(layer.config.shape.head_dim);
  with_rows(key, value, [&](auto keys, auto values) {
    launch_kernel(pack_rows_kernel<decltype(keys)>, pieces, kStoreThreads, bytes,
                  "pack_rows_kernel", stream, layer.state.tables(), slot, keys, values,
                  static_cast<int>(tail), key.num_tokens, scratch.packed,
                  static_cast<int>(layer.state.packed_tiles(rows)), layer.value_limit());
  });
  return scratch;
}
/// Packs the staged rows.
template <class Layer>
CompressScratch pack_waiting(const Layer& layer, int slot, cudaStream_t stream) {
  const OpenPrompt& waiting = layer.prompts.of(slot);
  const CacheConfig& config = layer.config;
  const ScoreQueries queries =
      score_queries(layer, slot, waiting.queries(config.shape), waiting.rows());
  return pack_chunk(layer, slot, waiting.keys(config.shape, config.full_type),
                    waiting.values(config.shape, config.full_type), queries.columns(), stream);
}

/// Enqueues the attention of queries of a packed chunk; the queries are those of its tokens from
/// `first_token` on. If compressed rows are kept by accumulated score, adds what they receive.
template <class Layer>
void attend_chunk(Layer& layer, int slot, const QueryView& query, std::int64_t first_token,
                  const CompressScratch& scratch, const DeviceOutput& out, cudaStream_t stream) {
  using Rows = typename Layer::Rows;
  auto& state = layer.state;
  const HostSequence& now = state.sequence(slot);
  const std::int64_t n = query.num_tokens, at_once = (std::min)(n, kQueriesAtOnce);
  const std::int32_t tiles = state.packed_tiles(scratch.rows);
  const Batch batch{1, {slot}};
  for (std::int64_t first = 0; first < n; first += at_once) {
    const int m = static_cast<int>((std::min)(n - first, at_once));
    AttentionStep step = state.workspace().prompt_step(now.rows, m, tiles, scratch.packed);
    step.prompt_first = static_cast<std::int32_t>(now.tail_length + first_token + first);
    attend_step<Layer::kForm, Rows::accumulates_scores, Layer::scale_groups, Layer::joins,
                Layer::Rule::adapts, true>(state, step, batch, device_rows(query), out, first, 0,
                                           state.workspace().coded_splits(now.rows.num_compressed),
                                           now.rows.num_full, stream);
    if constexpr (Rows::accumulates_scores && Rows::compresses) {
      const MeasuredQueries queries =
          measured_queries(state, query, out.lse, out.lse_stride, step.m, first);
      measure_compressed_scores<Layer::coded_groups>(state, step, batch, queries, {}, 0,
                                                     now.rows.num_compressed, stream);
    }
  }
}
/// Adds the attention that full rows, the tail's rows and a packed chunk's rows receive from the
/// chunk's queries to their accumulated scores.
template <class Layer>
void accumulate_rows(const Layer& layer, int slot, const MeasuredQueries& queries,
                     const CompressScratch& scratch, cudaStream_t stream) {
  const HostSequence& now = layer.state.sequence(slot);
  const Batch batch{1, {slot}};
  const auto& tables = layer.state.tables();
  RowSource source{scratch.packed, layer.state.packed_tiles(scratch.rows), 0, tables.full.bytes};
  if (tables.rotary.pre_rope()) {
    const std::int32_t position = static_cast<std::int32_t>(now.first_tail());
    source = enqueue_rotation(tables, source, slot, position, scratch.rotated, stream);
  }
  const PromptScores prompt{source.packed,   source.tiles, source.tile_bytes,
                            now.tail_length, scratch.rows, scratch.accumulated_scores};
  measure_scores(layer.state, batch, queries, prompt, {}, 0, now.rows.num_full, stream);
}

/// Makes rows [flushed, flushed + kept) of a packed chunk the tail.
template <class Layer>
void renew_tail(const Layer& layer, int slot, const RowSource& source,
                const CompressScratch& scratch, int flushed, int kept, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((std::max)(1, (kept + kRenewRows - 1) / kRenewRows)),
                  static_cast<unsigned>(layer.config.shape.num_kv_heads));
  renew_tail_kernel<><<<grid, 256, 0, stream>>>(layer.state.tables(), slot, source, flushed, kept);
  check(cudaGetLastError(), "renew_tail_kernel");
  if constexpr (Layer::Rows::accumulates_scores) {
    renew_scores(layer.state, slot, scratch, flushed, kept, stream);
  }
}
/// Stores the rows of a packed chunk: all but the last `recent` leave full rank, and these become
/// the tail.
template <class Layer>
void store_chunk(Layer& layer, int slot, std::int64_t n, const CompressScratch& scratch,
                 const ScoreQueries& queries, cudaStream_t stream) {
  HostSequence& now = layer.state.sequence(slot);
  const std::int64_t rows = now.tail_length + n, recent = recent_rows(layer.policies.token_policy);
  const std::int64_t flushed = (std::max)(std::int64_t{0}, rows - recent);
  const RowSource source{scratch.packed, layer.state.packed_tiles(rows)};
  const std::int64_t tokens = now.num_tokens, step = flushed_at_once(layer, flushed);
  for (std::int64_t done = 0; done < flushed; done += step) {
    const std::int64_t count = (std::min)(step, flushed - done);
    const RowSource next{source.packed, source.tiles, static_cast<std::int32_t>(done)};
    Compression<Layer>::run(layer, std::span<const int>(&slot, 1), count, next, scratch,
                            Phase::prefill, queries, stream);
    now.num_tokens += count;  // moves first_tail(), the position of the next rows
  }
  const int kept = static_cast<int>(rows - flushed);
  renew_tail(layer, slot, source, scratch, static_cast<int>(flushed), kept, stream);
  now.tail_length = kept;
  now.num_tokens = tokens + n;
  // Release pages that the lists might have taken but did not.
  if (counts_vary(layer, Phase::prefill)) layer.state.release_and_upload(slot, stream);
}
/// Stores the staged rows, which have been packed, and clears them for the next chunk.
template <class Layer>
void store_waiting(Layer& layer, int slot, const CompressScratch& scratch, cudaStream_t stream) {
  OpenPrompt& waiting = layer.prompts.of(slot);
  const QueryView query = waiting.queries(layer.config.shape);
  if constexpr (Layer::Rows::accumulates_scores) {
    const int heads = layer.config.shape.num_qo_heads, n = static_cast<int>(waiting.rows());
    accumulate_rows(layer, slot, measured_queries(layer.state, query, waiting.lse(), heads, n, 0),
                    scratch, stream);
  }
  const ScoreQueries queries = score_queries(layer, slot, query, waiting.rows());
  store_chunk(layer, slot, waiting.rows(), scratch, queries, stream);
  waiting.clear();
}

/// Attends to and stores a chunk that comes in one call.
template <class Layer>
void take_chunk(Layer& layer, int slot, const PromptTokens& tokens, cudaStream_t stream) {
  const ScoreQueries queries = score_queries(layer, slot, tokens.query, tokens.count());
  const CompressScratch scratch =
      pack_chunk(layer, slot, tokens.key, tokens.value, queries.columns(), stream);
  if (tokens.attends) {
    DeviceOutput out = tokens.out;
    if (Layer::Rows::accumulates_scores && out.lse == nullptr) {
      out.lse = layer.state.workspace().prompt_lse(tokens.count());
      out.lse_stride = layer.config.shape.num_qo_heads;
    }
    attend_chunk(layer, slot, tokens.query, 0, scratch, out, stream);
    if constexpr (Layer::Rows::accumulates_scores) {
      const int n = static_cast<int>(tokens.count());
      const MeasuredQueries all =
          measured_queries(layer.state, tokens.query, out.lse, out.lse_stride, n, 0);
      accumulate_rows(layer, slot, all, scratch, stream);
    }
  }
  store_chunk(layer, slot, tokens.count(), scratch, queries, stream);
}
/// Copies the log-sum-exp of some tokens to the caller's output.
inline void copy_lse(const DeviceOutput& from, const DeviceOutput& to, std::int64_t tokens,
                     int heads, cudaStream_t stream) {
  const std::size_t width = sizeof(float) * static_cast<std::size_t>(heads);
  const std::size_t pitch =
      tokens == 1 ? width : sizeof(float) * static_cast<std::size_t>(to.lse_stride);
  check(cudaMemcpy2DAsync(to.lse, pitch, from.lse, width, width, static_cast<std::size_t>(tokens),
                          cudaMemcpyDeviceToDevice, stream),
        "lse");
}
/// Stages a part of a chunk that comes in several calls. Attends, if wanted; stores the chunk if
/// this part ends it.
template <class Layer>
void take_part(Layer& layer, int slot, const PromptTokens& tokens, bool ends, cudaStream_t stream) {
  OpenPrompt& waiting = layer.prompts.of(slot);
  const int heads = layer.config.shape.num_qo_heads;
  const std::int64_t before = waiting.rows();
  waiting.add_rows(layer.state.tables(), tokens.key, tokens.value, layer.value_limit(), stream);
  waiting.add_queries(tokens.query, kept_queries(layer), stream);
  if (!tokens.attends && !ends) return;
  const CompressScratch scratch = pack_waiting(layer, slot, stream);
  if (tokens.attends) {
    DeviceOutput out = tokens.out;
    if constexpr (Layer::Rows::accumulates_scores) {
      out.lse = waiting.lse() + before * heads;
      out.lse_stride = heads;
    }
    attend_chunk(layer, slot, tokens.query, before, scratch, out, stream);
    const bool copies = out.lse != tokens.out.lse && tokens.out.lse != nullptr;
    if (copies) copy_lse(out, tokens.out, tokens.count(), heads, stream);
  }
  if (ends) store_waiting(layer, slot, scratch, stream);
}

}  // namespace detail

/// @brief What more prompt rows, staged ones included, need.
struct PromptDemand {
  std::int64_t pages = 0;
  HeadRows after;  ///< the most rows that lists will have
};
/// @brief What `rows` more prompt rows need.
template <class Layer>
PromptDemand prompt_demand(const Layer& layer, int slot, std::int64_t rows) {
  PageDemand demand;
  const HostSequence& sequence = layer.state.sequence(slot);
  std::int64_t tail = sequence.tail_length, left = rows, flushed = 0;  // flushed: of a chunk
  const SequenceRows after = demand_rows(layer, slot, Phase::prefill, demand, [&] {
    while (left > 0 && flushed == 0) {
      const std::int64_t count = (std::min)(left, layer.chunk_limit());
      flushed =
          (std::max)(std::int64_t{0}, tail + count - recent_rows(layer.policies.token_policy));
      tail += count - flushed;
      left -= count;
    }
    const std::int64_t together = (std::min)(flushed, detail::flushed_at_once(layer, flushed));
    flushed -= together;
    return together;
  });
  const HeadRows& now = sequence.rows;
  return {demand.total(),
          {(std::max)(now.num_full, after.rows.num_full),
           (std::max)(now.num_compressed, after.rows.num_compressed)}};
}

/// @brief Stores the staged rows of a prompt as its last chunk, and ends the prompt.
template <class Layer>
void end_prompt(Layer& layer, int slot, cudaStream_t stream) {
  if (layer.prompts.of(slot).rows() > 0) {
    const CompressScratch scratch = detail::pack_waiting(layer, slot, stream);
    detail::store_waiting(layer, slot, scratch, stream);
  }
  layer.prompts.end(slot);
}

/// @brief Takes the next tokens of a prompt. Complete chunks are stored; the remaining rows are
/// staged if the prompt continues, else stored. Raises before anything changes if the pool lacks
/// the pages for all rows so far, or if working memory cannot be allocated.
template <class Layer>
void take_prompt(Layer& layer, SequenceId seq, const PromptTokens& tokens, Prompt prompt,
                 cudaStream_t stream) {
  const int slot = layer.sequences.find(seq);
  const std::int64_t all = tokens.count();
  const PromptDemand demand = prompt_demand(layer, slot, layer.prompts.of(slot).rows() + all);
  const HeldPages held(layer.state.pool().allocator(), demand.pages);
  detail::reserve_prompt(layer, slot, tokens, prompt, demand.after, stream);
  ::lowrankkv::detail::ChangedSequences changed(layer.sequences, {&seq, 1});
  for (std::int64_t done = 0; done < all;) {
    const std::int64_t before = layer.prompts.of(slot).rows();
    const std::int64_t count = (std::min)(all - done, layer.chunk_limit() - before);
    const bool last = prompt == Prompt::complete && done + count == all;
    const bool ends = before + count == layer.chunk_limit() || last;
    const PromptTokens part = tokens.part(done, count);
    if (ends && before == 0) {
      detail::take_chunk(layer, slot, part, stream);
    } else {
      detail::take_part(layer, slot, part, ends, stream);
    }
    done += count;
  }
  if (prompt == Prompt::continues) {
    layer.prompts.begin(slot).open = true;
  } else {
    end_prompt(layer, slot, stream);
  }
  changed.done();
}

template <class Layer>
void PromptCalls<Layer>::prefill(Layer& layer, SequenceId seq, const QueryView& query,
                                 const KeyView& key, const ValueView& value, const OutputView& out,
                                 const LseView& lse, Prompt prompt, cudaStream_t stream) {
  const DeviceScope on("prefill", layer.state.device(), stream);
  refuse_capture("prefill", stream);
  const int slot = check_prompt(layer, seq, key, value);
  check_queries(layer, query, out, lse, key.num_tokens);
  const DeviceOutput target{out.data, out.token_stride, out.head_stride, lse.data,
                            lse.token_stride};
  take_prompt(layer, seq, {key, value, query, target, true}, prompt, stream);
}
template <class Layer>
void PromptCalls<Layer>::ingest(Layer& layer, SequenceId seq, const KeyView& key,
                                const ValueView& value, const QueryView& q_window, Prompt prompt,
                                cudaStream_t stream) {
  const DeviceScope on("ingest", layer.state.device(), stream);
  refuse_capture("ingest", stream);
  const int slot = check_prompt(layer, seq, key, value);
  check_query_window(layer, slot, q_window, key.num_tokens);
  constexpr bool attends = Layer::Rows::accumulates_scores;  // needs normalised weights
  take_prompt(layer, seq, {key, value, q_window, {}, attends}, prompt, stream);
}
template <class Layer>
void PromptCalls<Layer>::finish_prompt(Layer& layer, SequenceId seq, cudaStream_t stream) {
  const DeviceScope on("finish_prompt", layer.state.device(), stream);
  refuse_capture("finish_prompt", stream);
  const int slot = layer.sequences.find(seq);
  const PromptDemand demand = prompt_demand(layer, slot, layer.prompts.of(slot).rows());
  const HeldPages held(layer.state.pool().allocator(), demand.pages);
  ::lowrankkv::detail::ChangedSequences changed(layer.sequences, {&seq, 1});
  end_prompt(layer, slot, stream);
  changed.done();
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
