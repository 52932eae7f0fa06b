// SPDX-License-Identifier: Apache-2.0
/// @file detail/cache_base.hpp  CacheBase, the private base of CompressedKVCache: its layer and
/// sequences, and all checks that run before a call changes anything.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lowrankkv/concepts/basis.hpp"
#include "lowrankkv/concepts/quantizer.hpp"
#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/concepts/updater.hpp"
#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/calls.hpp"
#include "lowrankkv/core/page_allocator.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cpu/backend.hpp"
#include "lowrankkv/detail/sequence_table.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace detail {

/// The state of a cache and its checks. CompressedKVCache is the public interface.
template <class Be, class Ba, class Up, class To, class Qu, class Ep>
class CacheBase : DiagnoseBasis<Ba, Be>,
                  DiagnoseUpdater<Up, Be>,
                  DiagnoseTokenPolicy<To, Be>,
                  DiagnoseQuantizer<Qu, Be> {
 public:  // CompressedKVCache inherits it privately
  static constexpr bool usable =
      BasisFor<Ba, Be> && UpdaterFor<Up, Be> && TokenPolicyFor<To, Be> && QuantizerFor<Qu, Be>;
  static constexpr bool compresses = [] {
    if constexpr (TokenPolicyFor<To, Be>)
      return Impl<To, Be>::compresses;
    else
      return true;
  }();
  // A cache with a diagnosed policy has no layer, so that the diagnosis above is the only error.
  using Layer = typename LayerOf<usable, Be, Ba, Up, To, Qu, Ep>::type;
  static constexpr bool accumulates_scores = [] {
    if constexpr (TokenPolicyFor<To, Be>)
      return wants(Impl<To, Be>::evidence, Evidence::accumulated);
    else
      return false;
  }();
  using PolicySet = Policies<Ba, Up, To, Qu>;
  using Pool = typename Be::Pool;

  CacheBase(CacheConfig config, LayerBasis basis, const PolicySet& policies,
            std::shared_ptr<Pool> pool, std::shared_ptr<typename Be::Executor> threads)
      : layer_(checked(config, basis, policies, pool.get()), std::move(basis), policies.basis,
               policies.updater, policies.token_policy, policies.quantizer, std::move(pool),
               std::move(threads)),
        sequences_(layer_.config) {}

  /// Fills in defaults. Raises if the configuration, the basis or a policy is invalid.
  static CacheConfig& checked(CacheConfig& config, const LayerBasis& basis,
                              const PolicySet& policies, const Pool* pool) {
    using TokenImpl = Impl<To, Be>;
    detail::validate(config);
    const auto validate_policy =  // a policy's validate() is optional
        []<class Policy>(const Policy& policy) {
          if constexpr (requires { Impl<Policy, Be>::validate(policy); })
            Impl<Policy, Be>::validate(policy);
        };
    validate_policy(policies.updater);
    validate_policy(policies.token_policy);
    validate_policy(policies.quantizer);
    if constexpr (TokenImpl::compresses) {
      Impl<Ba, Be>::validate(policies.basis, basis, config.shape);
      check_storable(basis, config.epoch_type);
    }
    complete_tail(config, TokenImpl::recent(policies.token_policy));
    adopt_page_bytes(config, pool);
    return config;
  }

  /// The slot of a sequence. Raises StateError if its prompt is unfinished.
  int idle_slot(SequenceId seq) const {
    const int slot = sequences_.find(seq);
    if (layer_.sequence(slot).prompt_open) {
      fail<StateError>("sequence ", seq, ": its prompt of ", layer_.table.lengths(slot).num_tokens,
                       " tokens so far continues, a complete one is expected; call finish_prompt");
    }
    return slot;
  }

  std::int64_t position_of(int slot, std::int64_t token) const {
    const std::int64_t tokens = layer_.table.lengths(slot).num_tokens;
    if (token < 0 || token > tokens)
      fail<ShapeError>("position: token ", token, ", sequence has ", tokens, " tokens");
    return layer_.sequence(slot).shifts.position(token);
  }
  void check_shift(int slot, std::int64_t first, std::int64_t delta) const {
    detail::check_shift(layer_.sequence(slot).shifts, layer_.stores_pre_rope(),
                        layer_.table.lengths(slot).num_tokens, first, delta,
                        PositionShifts::kLimit);
  }
  void check_division(int slot, std::int64_t first, std::int64_t count,
                      std::int64_t divisor) const {
    detail::check_division(layer_.sequence(slot).shifts, layer_.stores_pre_rope(),
                           layer_.table.lengths(slot).num_tokens, first, count, divisor);
  }

  bool flush_due(int slot) const {
    return layer_.table.lengths(slot).tail_length >
           std::int64_t{layer_.recent()} + layer_.config.flush_interval;
  }
  void flush(int slot) {
    while (flush_due(slot))
      compress_rows(layer_, slot, layer_.config.flush_interval, Phase::decode);
  }
  /// Adds to `demand` an upper bound of the pages needed until, after `added` more rows, only the
  /// recent window is at full rank.
  void demand_rows(int slot, std::int64_t added, Phase phase, PageDemand& demand) const {
    const std::int64_t rows = layer_.table.lengths(slot).tail_length +
                              layer_.sequence(slot).chunk.size() + added - layer_.recent();
    if (rows > 0) demand_compress(layer_, slot, rows, phase, demand);
  }

  void commit_chunk(int slot) {
    const std::int64_t rows = layer_.table.lengths(slot).tail_length +
                              layer_.sequence(slot).chunk.size() - layer_.recent();
    compress_rows(layer_, slot, (std::max)(std::int64_t{0}, rows), Phase::prefill);
  }

  void check_prompt(int slot, const KeyView& key, const ValueView& value) const {
    const std::int64_t n = key.num_tokens;
    check_keys_and_values(key, value, 1, n, layer_.num_kv_heads(), layer_.head_dim());
    const std::int64_t have = layer_.table.lengths(slot).num_tokens;
    if (n > sequences_.max_tokens(slot) - have) {
      fail<CapacityError>("max_tokens: ", sequences_.max_tokens(slot), ", sequence has ", have,
                          ", given ", n);
    }
    check_stored_values(key, value);
    PageDemand demand;
    demand_rows(slot, n, Phase::prefill, demand);
    layer_.pool->allocator().require(demand.total());
  }

  void check_stored_values(const KeyView& key, const ValueView& value) const {
    cpu::check_tables("key", key.pages, key.num_tokens);
    cpu::check_tables("value", value.pages, value.num_tokens);
    if (!layer_.config.check_finite) return;
    row_.resize(static_cast<std::size_t>(layer_.head_dim()));
    float limit = max_finite(layer_.config.full_type);
    if (layer_.config.full_row_bits == 8)
      limit = (std::min)(limit, 128.0F * max_finite(DType::f16));  // 128 steps, each an f16
    cpu::check_finite("key", key, limit, row_.data());
    cpu::check_finite("value", value, limit, row_.data());
  }

  void check_query(const QueryView& query, std::int64_t tokens) const {
    check_rows("query", query, tokens, layer_.config.shape.num_qo_heads, layer_.head_dim());
    if (!layer_.config.check_finite) return;
    row_.resize(static_cast<std::size_t>(layer_.head_dim()));
    cpu::check_finite("query", query, (std::numeric_limits<float>::max)(), row_.data());
  }

  void check_query_window(int slot, const QueryView& window, std::int64_t tokens) const {
    if (window.num_tokens > 0) check_query(window, window.num_tokens);
    if (window.num_tokens > tokens)
      fail<ShapeError>("q_window: ", window.num_tokens, " queries, ", tokens, " tokens");
    const std::int64_t chunk = layer_.config.prefill_chunk;
    const bool ends_inside = chunk > 0 && layer_.sequence(slot).chunk.size() + tokens > chunk;
    const std::int64_t wanted = layer_.scoring_window();
    const bool all = accumulates_scores || (wanted > 0 && ends_inside);
    const std::int64_t needed = all ? tokens : (std::min)(tokens, wanted);
    if (window.num_tokens < needed) {
      fail<ShapeError>("q_window: prompt rows are chosen by the attention of ", needed,
                       " queries, given ", window.num_tokens);
    }
  }

  void check_lse(const LseView& lse, std::int64_t tokens) const {
    if (lse.data == nullptr) return;
    check_equal("num_heads", "cache", layer_.config.shape.num_qo_heads, "lse", lse.num_heads);
    check_equal("num_tokens", "expected", tokens, "lse", lse.num_tokens);
  }

  void check_score_view(std::span<const SequenceId> seqs, const ScoreView& accumulated) const {
    if (accumulated.data == nullptr) return;
    check_equal("num_sequences", "call", static_cast<std::int64_t>(seqs.size()), "attention scores",
                accumulated.num_sequences);
    check_equal("num_heads", "cache", layer_.num_kv_heads(), "attention scores",
                accumulated.num_heads);
    for (const SequenceId seq : seqs) {
      const std::int64_t tokens = layer_.table.lengths(idle_slot(seq)).num_tokens;
      if (accumulated.num_positions < tokens)
        fail<ShapeError>("attention scores: ", accumulated.num_positions, " positions, sequence ",
                         seq, " has ", tokens, " tokens");
    }
  }

  /// Checks the argument of accumulate(): scores are finite and not negative. Other values would
  /// keep a row forever, or always drop it.
  void check_accumulated_values(const ScoreView& accumulated) const {
    for (std::int64_t i = 0; i < accumulated.num_sequences; ++i) {
      for (int head = 0; head < accumulated.num_heads; ++head) {
        for (std::int64_t position = 0; position < accumulated.num_positions; ++position) {
          const float value = accumulated.row(i, head)[position];
          if (!(value >= 0.0F && value <= 1e30F))
            fail<ValueError>("attention scores: position ", position, " of head ", head, " is ",
                             value, ", 0 to 1e30 expected");
        }
      }
    }
  }

  LseView scratch_lse(std::vector<float>& memory, std::int64_t tokens) const {
    memory.resize(static_cast<std::size_t>(tokens) *
                  static_cast<std::size_t>(layer_.config.shape.num_qo_heads));
    return {memory.data(), tokens, layer_.config.shape.num_qo_heads};
  }

  /// Attends with one piece of a prompt, and accumulates the scores of the rows that it reads.
  void attend_piece(int slot, const QueryView& query, const OutputView& out, const LseView& lse,
                    std::int64_t own_row) {
    std::vector<float> scratch;
    const LseView sums =
        accumulates_scores && lse.data == nullptr ? scratch_lse(scratch, query.num_tokens) : lse;
    const typename Layer::Block block{
        query, out, sums, layer_.config.shape.group_size(), layer_.config.scale(), own_row};
    layer_.attend(
        1, [&](std::int64_t) { return slot; },
        [&](std::int64_t) -> const typename Layer::Block& { return block; }, true);
    if constexpr (accumulates_scores)
      layer_.accumulated_attention(
          slot, block, true, [&](int head) -> auto& { return layer_.accumulated(slot, head); });
  }

  /// Writes the attention that the rows of a slot receive from a block, by position, to entry
  /// `index` of `accumulated`.
  template <class Block>
  void write_scores(int slot, const Block& block, const ScoreView& accumulated,
                    std::int64_t index) {
    std::vector<cpu::HeadScores> received;
    for (int head = 0; head < layer_.num_kv_heads(); ++head)
      received.push_back(zero_scores(layer_, slot, head));
    layer_.accumulated_attention(
        slot, block,
        false, [&](int head) -> auto& { return received[static_cast<std::size_t>(head)]; });
    for (int head = 0; head < layer_.num_kv_heads(); ++head) {
      float* target = accumulated.row(index, head);
      std::fill(target, target + accumulated.num_positions, 0.0F);
      for_each_score(layer_, slot, head, received[static_cast<std::size_t>(head)],
                     [&](std::int64_t position, float value) { target[position] = value; });
    }
  }

  /// Adds entry `index` of `accumulated` to the accumulated scores of a slot's rows.
  void add_score(int slot, const ScoreView& accumulated, std::int64_t index) {
    for (int head = 0; head < layer_.num_kv_heads(); ++head) {
      const float* source = accumulated.row(index, head);
      for_each_score(layer_, slot, head, layer_.accumulated(slot, head),
                     [&](std::int64_t position, float& value) { value += source[position]; });
    }
  }

  /// Checks the arguments of append(). @return tokens per sequence
  int check_append(std::span<const SequenceId> seqs, const KeyView& key, const ValueView& value,
                   std::int64_t tail_capacity) const {
    const std::int64_t count = static_cast<std::int64_t>(seqs.size());
    if (count == 0 || key.num_tokens % count != 0)
      fail<ShapeError>("append: ", key.num_tokens, " tokens for ", count, " sequences");
    const std::int64_t m = key.num_tokens / count;
    check_keys_and_values(key, value, count, m, layer_.num_kv_heads(), layer_.head_dim());
    for (std::size_t i = 0; i < seqs.size(); ++i) {
      const int slot = idle_slot(seqs[i]);
      const SequenceLengths& now = layer_.table.lengths(slot);
      for (std::size_t j = 0; j < i; ++j) {
        if (seqs[j] == seqs[i])
          fail<SequenceError>("append: sequence ", seqs[i], " stands at places ", j, " and ", i);
      }
      if (m > tail_capacity - now.tail_length) {
        fail<CapacityError>("tail_capacity: ", tail_capacity, ", sequence ", seqs[i], " has ",
                            now.tail_length, " rows in its tail, given ", m, "; call maintain");
      }
      if (m > sequences_.max_tokens(slot) - now.num_tokens) {
        fail<CapacityError>("max_tokens: ", sequences_.max_tokens(slot), ", sequence ", seqs[i],
                            " has ", now.num_tokens, ", given ", m);
      }
    }
    check_stored_values(key, value);
    return static_cast<int>(m);
  }

  /// Checks queries of the last appended tokens of some sequences. @return queries per sequence
  std::int64_t check_step(std::span<const SequenceId> seqs, const QueryView& query) const {
    const std::int64_t count = static_cast<std::int64_t>(seqs.size());
    if (count == 0 || query.num_tokens % count != 0 || query.num_tokens == 0) {
      fail<ShapeError>("attend: ", query.num_tokens, " query tokens for ", count, " sequences");
    }
    const std::int64_t m = query.num_tokens / count;
    check_query(query, query.num_tokens);
    for (const SequenceId seq : seqs) {
      const int tail = layer_.table.lengths(idle_slot(seq)).tail_length;
      if (m > tail)
        fail<ShapeError>("attend: ", m, " query tokens, sequence ", seq, " has ", tail,
                         " tokens in its tail");
    }
    return m;
  }
  std::int64_t check_attend(std::span<const SequenceId> seqs, const QueryView& query,
                            const OutputView& out, const LseView& lse) const {
    const std::int64_t m = check_step(seqs, query);
    check_rows("out", out, query.num_tokens, layer_.config.shape.num_qo_heads, layer_.head_dim());
    check_lse(lse, query.num_tokens);
    return m;
  }

  std::int64_t check_certify(std::span<const SequenceId> seqs, const QueryView& query,
                             const LseView& lse, const CertificateView& out) const {
    if (!layer_.config.keep_residuals)
      fail<StateError>("certify: keep_residuals is ", layer_.config.keep_residuals,
                       ", 1 is needed: norms of residuals are kept as rows are stored");
    const std::int64_t m = check_step(seqs, query);
    if (lse.data == nullptr)
      fail<ShapeError>("lse: null pointer with num_tokens ", query.num_tokens);
    check_lse(lse, query.num_tokens);
    for (std::int64_t token = 0; layer_.config.check_finite && token < lse.num_tokens; ++token) {
      for (int head = 0; head < lse.num_heads; ++head) {
        const float value = lse.at(token, head);
        if (!std::isfinite(value))
          fail<ValueError>("lse: token ", token, ", head ", head, " is ", value,
                           ", finite expected");
      }
    }
    check_equal("num_tokens", "expected", query.num_tokens, "certificates",
                out.data == nullptr ? 0 : out.num_tokens);
    check_equal("num_heads", "cache", layer_.config.shape.num_qo_heads, "certificates",
                out.num_heads);
    return m;
  }

  /// Splits a prompt into pieces that end where chunks end. Each piece is stored and attended to.
  /// A chunk is compressed when it is complete, or when the prompt is.
  template <class Function>
  void for_each_piece(int slot, const KeyView& key, const ValueView& value, Prompt prompt,
                      Function&& attend_piece) {
    const std::int64_t limit =
        layer_.config.prefill_chunk > 0 ? layer_.config.prefill_chunk : std::int64_t{1} << 40;
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

  Layer layer_;
  SequenceTable sequences_;
  mutable std::vector<float> row_;
};

}  // namespace detail
LOWRANKKV_NAMESPACE_END
