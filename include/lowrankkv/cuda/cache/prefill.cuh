// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache/prefill.cuh  What prefill(), ingest() and finish_prompt() do: a prompt is cut into chunks, which are packed, attended to and stored one after the other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "lowrankkv/cuda/attention/attend.cuh"
#include "lowrankkv/cuda/compress/compress.cuh"
#include "lowrankkv/cuda/scores/pre_rope_scores.cuh"
#include "lowrankkv/cuda/store/pack_rows.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr std::int64_t kQueriesAtOnce = 256;  ///< of a prompt: the partial states of more would be large

/// @brief Some tokens of a prompt. Outputs without data are not wanted; queries may be of its last tokens alone.
struct PromptTokens {
  KeyView key;
  ValueView value;
  QueryView query;
  DeviceOutput out;  ///< with the rows of `key`
  bool attends = false;

  std::int64_t count() const { return key.num_tokens; }
  /// @brief Tokens [first, first + count).
  PromptTokens part(std::int64_t first, std::int64_t count) const {
    const std::int64_t offset = key.num_tokens - query.num_tokens, begin = (std::max)(first, offset), end = (std::max)(begin, first + count);
    PromptTokens some{key.tokens(first, count), value.tokens(first, count), {}, out, attends};
    if (end > begin) some.query = query.tokens(begin - offset, end - begin);
    if (out.data != nullptr) some.out.data += first * out.token_stride;
    if (out.lse != nullptr) some.out.lse += first * out.lse_stride;
    return some;
  }
};

/// @brief The calls of a cache that are about prompts.
template <class Basis, class Updater, class TokenPolicy, class Quantizer, class EpochPolicy>
class PromptCalls : public FlushCalls<Basis, Updater, TokenPolicy, Quantizer, EpochPolicy> {
 public:  // CompressedKVCache inherits it privately
  using Base = FlushCalls<Basis, Updater, TokenPolicy, Quantizer, EpochPolicy>;
  using Base::Base;
  using Base::config_;
  using Base::layer_;
  using Base::policies_;
  using Base::prompts_;
  using Base::sequences_;
  using typename Base::Rows;
  using typename Base::Rule;

  /// Raises unless a prompt's tokens fit their sequence. Returns the slot.
  int check_prompt(SequenceId seq, const KeyView& key, const ValueView& value) const {
    const int slot = sequences_.find(seq);
    this->check_views(key, value, 1, key.num_tokens);
    const std::int64_t tokens = this->tokens_of(slot), most = sequences_.max_tokens(slot);
    if (key.num_tokens > most - tokens) ::lowrankkv::detail::fail<CapacityError>("max_tokens: ", most, ", sequence has ", tokens, ", given ", key.num_tokens);
    return slot;
  }
  /// Raises unless there are queries of a prompt's last tokens to choose by: of all of them where chunks end inside the call.
  void check_query_window(int slot, const QueryView& window, std::int64_t tokens) const {
    using ::lowrankkv::detail::fail;
    if (window.num_tokens > 0) this->check_query(window, window.num_tokens);
    if (window.num_tokens > tokens) fail<ShapeError>("q_window: ", window.num_tokens, " queries, ", tokens, " tokens");
    const std::int64_t wanted = Base::scoring_window(policies_);
    const bool all = Rows::keeps_masses || (wanted > 0 && prompts_.of(slot).rows() + tokens > chunk_limit());
    const std::int64_t needed = all ? tokens : (std::min)(tokens, wanted);
    if (window.num_tokens < needed) fail<ShapeError>("q_window: prompt rows are chosen by the attention of ", needed, " queries, given ", window.num_tokens);
  }

  /// Takes what has come of a prompt. Chunks that are complete are stored; what is left waits, if the prompt goes on. Raises, before anything changes, unless the pool has the pages for all that has
  /// come, and there is memory to work in.
  void take_prompt(int slot, const PromptTokens& tokens, Prompt prompt, cudaStream_t stream) {
    reserve(slot, tokens, prompt, check_pages(slot, prompts_.of(slot).rows() + tokens.count()), stream);
    for (std::int64_t done = 0; done < tokens.count();) {
      OpenPrompt& waiting = prompts_.of(slot);
      const std::int64_t count = (std::min)(tokens.count() - done, chunk_limit() - waiting.rows()), rows = waiting.rows() + count;
      const bool ends = rows == chunk_limit() || (prompt == Prompt::complete && done + count == tokens.count());
      const PromptTokens part = tokens.part(done, count);
      if (ends && waiting.rows() == 0) {
        take_chunk(slot, part, stream);
      } else {
        take_part(slot, part, ends, stream);
      }
      done += count;
    }
    if (prompt == Prompt::continues) {
      prompts_.begin(slot).open = true;
    } else {
      finish(slot, stream);
    }
  }
  /// What is left of a prompt is its last chunk.
  void finish(int slot, cudaStream_t stream) {
    const OpenPrompt& waiting = prompts_.of(slot);
    if (waiting.rows() > 0) store_part(slot, pack_part(slot, stream), stream);
    prompts_.end(slot);
  }
  /// Raises unless the pool has the pages for so many more rows of a prompt, those that wait included. Returns how many rows lists will have.
  HeadRows check_pages(int slot, std::int64_t rows) const {
    PageDemand demand;
    std::int64_t tail = layer_.sequence(slot).tail_length, left = rows, leaving = 0;  // of a chunk
    const SequenceRows after = this->demand_rows(slot, Phase::prefill, demand, [&] {
      while (left > 0 && leaving == 0) {
        const std::int64_t count = (std::min)(left, chunk_limit());
        leaving = (std::max)(std::int64_t{0}, tail + count - recent_rows(policies_.token_policy));
        tail += count - leaving;
        left -= count;
      }
      const std::int64_t together = (std::min)(leaving, step_of(leaving));
      leaving -= together;
      return together;
    });
    layer_.pool().allocator().require(demand.total());
    const HeadRows& now = layer_.sequence(slot).rows;
    return {(std::max)(now.num_full, after.rows.num_full), (std::max)(now.num_compressed, after.rows.num_compressed)};
  }

 private:
  /// Rows of a chunk that leave at a time, of so many: scores and masses choose among all of them.
  std::int64_t step_of(std::int64_t leaving) const { return Base::sketches && !Rows::by_scores && !Rows::keeps_masses ? config_.flush_interval : leaving; }
  std::int64_t chunk_limit() const { return config_.prefill_chunk > 0 ? config_.prefill_chunk : std::int64_t{1} << 40; }

  /// Queries of a chunk that are kept while it waits.
  std::int64_t kept_queries() const { return Rows::keeps_masses ? most_waiting() : std::int64_t{Base::scoring_window(policies_)}; }
  /// Rows of a chunk that can wait.
  std::int64_t most_waiting() const { return (std::min)(chunk_limit(), config_.max_tokens); }

  /// All the memory that a call works in: nothing is allocated once it has begun. @param after  rows that lists will have
  void reserve(int slot, const PromptTokens& tokens, Prompt prompt, const HeadRows& after, cudaStream_t stream) {
    const std::int64_t before = prompts_.of(slot).rows(), chunk = (std::min)(chunk_limit(), before + tokens.count());
    if (chunk == 0) return;
    const std::int64_t tail = (std::max)(layer_.sequence(slot).tail_length, recent_rows(policies_.token_policy)), window = Base::scoring_window(policies_);
    const bool waits = before > 0 || (prompt == Prompt::continues && (before + tokens.count()) % chunk_limit() != 0);
    std::int64_t rows = tail + chunk;
    if (waits) {
      OpenPrompt& waiting = prompts_.begin(slot);
      waiting.reserve(config_.shape, chunk, tokens.query.num_tokens, kept_queries(), most_waiting(), Rows::keeps_masses, stream);
      rows = tail + waiting.room(config_.shape);  // as much as will be asked for before more has to wait
    }
    const int columns = static_cast<int>((std::min)(window, chunk)) * config_.shape.group_size();
    const CompressScratch scratch = compress_scratch(layer_, rows, columns, this->lists_of(1, Phase::prefill), rows, rows_in(after, layer_.tables().weighed), this->ever_pinned(), Rows::by_scores);
    if (!tokens.attends) return;
    layer_.workspace().prompt_step(after, static_cast<int>((std::min)(tokens.count(), kQueriesAtOnce)), layer_.packed_tiles(rows), scratch.packed);
    if (Rows::keeps_masses) layer_.workspace().prompt_lse(chunk);
  }

  /// A chunk that has come at once.
  void take_chunk(int slot, const PromptTokens& tokens, cudaStream_t stream) {
    const ScoreQueries queries = score_queries(slot, tokens.query, tokens.count());
    const CompressScratch scratch = pack(slot, tokens.key, tokens.value, queries.columns(), stream);
    if (tokens.attends) {
      DeviceOutput out = tokens.out;
      if (Rows::keeps_masses && out.lse == nullptr) {
        out.lse = layer_.workspace().prompt_lse(tokens.count());
        out.lse_stride = config_.shape.num_qo_heads;
      }
      attend_rows(slot, tokens.query, 0, scratch, out, stream);
      if constexpr (Rows::keeps_masses) weigh_rows(slot, mass_queries(layer_, tokens.query, out.lse, out.lse_stride, static_cast<int>(tokens.count()), 0), scratch, stream);
    }
    store_prompt(slot, tokens.count(), scratch, queries, stream);
  }
  /// A part of a chunk that comes in several calls.
  void take_part(int slot, const PromptTokens& tokens, bool ends, cudaStream_t stream) {
    OpenPrompt& waiting = prompts_.of(slot);
    const std::int64_t before = waiting.rows();
    waiting.add_rows(layer_.tables(), tokens.key, tokens.value, this->limit(), stream);
    waiting.add_queries(tokens.query, kept_queries(), stream);
    if (!tokens.attends && !ends) return;
    const CompressScratch scratch = pack_part(slot, stream);
    if (tokens.attends) {
      DeviceOutput out = tokens.out;
      if constexpr (Rows::keeps_masses) {
        out.lse = waiting.lse() + before * config_.shape.num_qo_heads;
        out.lse_stride = config_.shape.num_qo_heads;
      }
      attend_rows(slot, tokens.query, before, scratch, out, stream);
      if (out.lse != tokens.out.lse && tokens.out.lse != nullptr) {
        const std::size_t width = sizeof(float) * static_cast<std::size_t>(config_.shape.num_qo_heads), pitch = tokens.count() == 1 ? width : sizeof(float) * static_cast<std::size_t>(tokens.out.lse_stride);
        check(cudaMemcpy2DAsync(tokens.out.lse, pitch, out.lse, width, width, static_cast<std::size_t>(tokens.count()), cudaMemcpyDeviceToDevice, stream), "lse");
      }
    }
    if (ends) store_part(slot, scratch, stream);
  }
  /// Packs the rows that wait.
  CompressScratch pack_part(int slot, cudaStream_t stream) const {
    const OpenPrompt& waiting = prompts_.of(slot);
    return pack(slot, waiting.keys(config_.shape, config_.full_type), waiting.values(config_.shape, config_.full_type), score_queries(slot, waiting.queries(config_.shape), waiting.rows()).columns(), stream);
  }
  /// Stores them; the next chunk begins.
  void store_part(int slot, const CompressScratch& scratch, cudaStream_t stream) {
    OpenPrompt& waiting = prompts_.of(slot);
    const QueryView query = waiting.queries(config_.shape);
    if constexpr (Rows::keeps_masses) weigh_rows(slot, mass_queries(layer_, query, waiting.lse(), config_.shape.num_qo_heads, static_cast<int>(waiting.rows()), 0), scratch, stream);
    store_prompt(slot, waiting.rows(), scratch, score_queries(slot, query, waiting.rows()), stream);
    waiting.clear();
  }

  /// Packs rows of a prompt behind those that are still in its sequence's tail. Returns where.
  CompressScratch pack(int slot, const KeyView& key, const ValueView& value, int columns, cudaStream_t stream) const {
    const std::int64_t tail = layer_.sequence(slot).tail_length, rows = tail + key.num_tokens;
    const CompressScratch scratch = compress_scratch(layer_, rows, columns, this->lists_of(1, Phase::prefill), rows, layer_.sequence(slot).num_rows(layer_.tables().weighed), this->ever_pinned(), Rows::by_scores);
    const dim3 pieces(static_cast<unsigned>((rows + kStoreRows - 1) / kStoreRows), static_cast<unsigned>(config_.shape.num_kv_heads));
    with_rows(key, value, [&](auto keys, auto values) {
      detail::launch_kernel(pack_rows_kernel<decltype(keys)>, pieces, kStoreThreads, pack_rows_bytes(config_.shape.head_dim), "pack_rows_kernel", stream, layer_.tables(), slot, keys, values, static_cast<int>(tail),
                            key.num_tokens, scratch.packed, static_cast<int>(layer_.packed_tiles(rows)), this->limit());
    });
    return scratch;
  }
  /// Attention of queries of a packed chunk, of its tokens from `first` on; where compressed rows are kept by it, what they receive.
  void attend_rows(int slot, const QueryView& query, std::int64_t first_token, const CompressScratch& scratch, const DeviceOutput& out, cudaStream_t stream) {
    const HostSequence& now = layer_.sequence(slot);
    const std::int64_t n = query.num_tokens;
    const std::int32_t tiles = layer_.packed_tiles(scratch.rows);
    const int at_once = static_cast<int>((std::min)(n, kQueriesAtOnce));
    const Batch batch{1, {slot}};
    for (std::int64_t first = 0; first < n; first += at_once) {
      AttentionStep step = layer_.workspace().prompt_step(now.rows, static_cast<int>((std::min)(n - first, std::int64_t{at_once})), tiles, scratch.packed);
      step.prompt_first = static_cast<std::int32_t>(now.tail_length + first_token + first);
      attend_step<Base::kForm, Rows::keeps_masses, Base::scale_groups, Base::joins, Rule::adapts>(layer_, step, batch, device_rows(query), out, first, 0, layer_.workspace().coded_splits(now.rows.num_compressed), now.rows.num_full, stream);
      if constexpr (Rows::keeps_masses && Rows::compresses) {
        measure_compressed_masses<Base::coded_groups>(layer_, step, batch, mass_queries(layer_, query, out.lse, out.lse_stride, step.m, first), {}, 0, now.rows.num_compressed, stream);
      }
    }
  }
  /// What full rows, those of the tail and of a packed chunk receive from the queries of its tokens.
  void weigh_rows(int slot, const MassQueries& queries, const CompressScratch& scratch, cudaStream_t stream) const {
    const HostSequence& now = layer_.sequence(slot);
    const Batch batch{1, {slot}};
    const LayerEdit& tables = layer_.tables();
    RowSource source{scratch.packed, layer_.packed_tiles(scratch.rows), 0, tables.full.bytes};
    if (tables.rotary.turns()) source = enqueue_turned(tables, source, slot, static_cast<std::int32_t>(now.first_tail()), scratch.turned, stream);
    measure_masses(layer_, batch, queries, {source.packed, source.tiles, source.tile_bytes, now.tail_length, scratch.rows, scratch.masses}, {}, 0, now.rows.num_full, stream);
  }
  /// The rows of a packed chunk leave full rank, but for the last `recent`, which become the tail.
  void store_prompt(int slot, std::int64_t n, const CompressScratch& scratch, const ScoreQueries& queries, cudaStream_t stream) {
    HostSequence& now = layer_.sequence(slot);
    const std::int64_t rows = now.tail_length + n, leaving = (std::max)(std::int64_t{0}, rows - recent_rows(policies_.token_policy));
    const RowSource source{scratch.packed, layer_.packed_tiles(rows)};
    const std::int64_t tokens = now.num_tokens, step = step_of(leaving);
    for (std::int64_t done = 0; done < leaving; done += step) {
      const std::int64_t count = (std::min)(step, leaving - done);
      this->compress(std::span(&slot, 1), count, {source.packed, source.tiles, static_cast<std::int32_t>(done)}, scratch, Phase::prefill, queries, stream);
      now.num_tokens += count;  // those after them stand behind
    }
    const int kept = static_cast<int>(rows - leaving);
    renew_tail_kernel<><<<dim3(static_cast<unsigned>((std::max)(1, (kept + kRenewRows - 1) / kRenewRows)), static_cast<unsigned>(config_.shape.num_kv_heads)), 256, 0, stream>>>(layer_.tables(), slot, source, static_cast<int>(leaving), kept);
    check(cudaGetLastError(), "renew_tail_kernel");
    if constexpr (Rows::keeps_masses) renew_masses(layer_, slot, scratch, static_cast<int>(leaving), kept, stream);
    now.tail_length = kept;
    now.num_tokens = tokens + n;
    if (this->counts_vary(Phase::prefill)) layer_.settle(slot, stream);  // pages that lists might have taken
  }
  /// What scores a chunk of n tokens, packed behind its sequence's tail.
  ScoreQueries score_queries(int slot, const QueryView& window, std::int64_t n) const {
    const std::int64_t rows = layer_.sequence(slot).tail_length + n, count = (std::min)(window.num_tokens, std::int64_t{Base::scoring_window(policies_)});
    if (count == 0) return {};
    return {device_rows(window.tokens(window.num_tokens - count, count)), static_cast<std::int32_t>(count), config_.shape.group_size(), static_cast<std::int32_t>(rows), config_.scale() * 1.44269504F};
  }
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
