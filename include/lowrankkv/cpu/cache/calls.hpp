// SPDX-License-Identifier: Apache-2.0
/// @file cpu/cache/calls.hpp  What the calls of CompressedKVCache do on the Cpu backend. The class
/// documents them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/core/attention_scores.hpp"
#include "lowrankkv/core/calls.hpp"
#include "lowrankkv/core/memory_usage.hpp"
#include "lowrankkv/core/page_allocator.hpp"
#include "lowrankkv/core/sequence_table.hpp"
#include "lowrankkv/core/statistics.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cpu/accumulated_scores.hpp"
#include "lowrankkv/cpu/cache/checks.hpp"
#include "lowrankkv/cpu/cache/flush.hpp"
#include "lowrankkv/cpu/cache/prefill.hpp"
#include "lowrankkv/cpu/layer.hpp"
#include "lowrankkv/cpu/thread_pool.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief In place of a stream: calls of the Cpu backend return when their work is done.
struct NoStream {};

/// @brief The calls of a cache, over its layer. A call's checks come before it changes anything.
template <class Layer>
struct Calls {
  using PolicySet = typename Layer::PolicySet;
  using Shared = std::shared_ptr<Executor>;

  // What a cache is made of.

  /// Fills in defaults. Raises if the configuration, the basis or a policy is invalid.
  static CacheConfig checked(CacheConfig config, const LayerBasis& basis, const PolicySet& policies,
                             const PagePool* pool) {
    ::lowrankkv::detail::validate(config);
    const auto validate_policy =  // a policy's validate() is optional
        []<class Policy>(const Policy& policy) {
          if constexpr (requires { Impl<Policy, Cpu>::validate(policy); })
            Impl<Policy, Cpu>::validate(policy);
        };
    validate_policy(policies.updater);
    validate_policy(policies.token_policy);
    validate_policy(policies.quantizer);
    if constexpr (Layer::TokenImpl::compresses) {
      Layer::BasisImpl::validate(policies.basis, basis, config.shape);
      ::lowrankkv::detail::check_storable(basis, config.epoch_type);
      if constexpr (requires { Layer::UpdaterImpl::validate_basis(policies.updater, basis); })
        Layer::UpdaterImpl::validate_basis(policies.updater, basis);
    }
    check_groups(config, policies);
    ::lowrankkv::detail::complete_tail(config, Layer::TokenImpl::recent(policies.token_policy));
    ::lowrankkv::detail::adopt_page_bytes(config, pool);
    return config;
  }
  static Layer* make(const CacheConfig& config, LayerBasis&& basis, const PolicySet& policies,
                     std::shared_ptr<PagePool>&& pool, Shared&& threads) {
    const CacheConfig settings = checked(config, basis, policies, pool.get());
    return new Layer(settings, makes_maps ? own_maps(config, policies) : std::move(basis), policies,
                     std::move(pool), std::move(threads));
  }
  static void destroy(Layer* layer) { delete layer; }
  static void check(const CacheConfig& config, const LayerBasis& basis, const PolicySet& policies) {
    static_cast<void>(checked(config, basis, policies, nullptr));
  }
  static PoolSize pool_size(std::span<const CacheConfig> configs, std::span<const LayerBasis> bases,
                            const PolicySet& policies) {
    ::lowrankkv::detail::check_layer_configs(configs, bases.size());
    const auto sizes = [&](std::size_t layer, std::size_t page_bytes) {
      CacheConfig config = ::lowrankkv::detail::config_of(configs, layer);
      if (page_bytes != 0) config.page_bytes = page_bytes;
      static_cast<void>(checked(config, bases[layer], policies, nullptr));
      const LayerBasis own = own_maps(config, policies);
      return Layer::sizes(config, makes_maps ? own : bases[layer], policies.basis,
                          policies.token_policy, policies.quantizer);
    };
    PoolSize size;
    for (std::size_t layer = 0; layer < bases.size(); ++layer)
      size.page_bytes = (std::max)(size.page_bytes, sizes(layer, 0).page_bytes);
    for (std::size_t layer = 0; layer < bases.size(); ++layer)
      size.num_pages += sizes(layer, size.page_bytes).num_pages;
    return size;
  }
  static Shared make_shared(std::span<const CacheConfig> configs, std::span<const LayerBasis>,
                            const PolicySet&) {
    return std::make_shared<ThreadPool>(configs.front().num_threads);
  }
  static std::size_t bytes_of(const Shared&) { return 0; }
  static ::lowrankkv::detail::SequenceTable& sequences(Layer& layer) { return layer.sequences; }
  static const ::lowrankkv::detail::SequenceTable& sequences(const Layer& layer) {
    return layer.sequences;
  }
  static const CacheConfig& config(const Layer& layer) { return layer.config; }
  static PagePool& pool(const Layer& layer) { return *layer.pool; }

  // Sequences.

  static void create(Layer& layer, SequenceId seq, NoStream) {
    auto fresh = new_sequence(layer);
    open_slot(layer, layer.sequences.add(seq), std::move(fresh));
  }
  static void fork(Layer& layer, SequenceId source, SequenceId target, NoStream) {
    const int from = idle_slot(layer, source);
    auto copy = copy_sequence(layer, from);
    fork_slot(layer, from, layer.sequences.add_copy(from, target), std::move(copy));
  }
  static void erase(Layer& layer, SequenceId seq, NoStream) {
    clear_slot(layer, layer.sequences.find(seq));
    layer.sequences.remove(seq);
  }
  static std::int64_t num_tokens(const Layer& layer, SequenceId seq) {
    return layer.table.lengths(layer.sequences.find(seq)).num_tokens;
  }
  static int tail_length(const Layer& layer, SequenceId seq) {
    return layer.table.lengths(layer.sequences.find(seq)).tail_length;
  }

  // Prompts.

  static void prefill(Layer& layer, SequenceId seq, const QueryView& query, const KeyView& key,
                      const ValueView& value, const OutputView& out, const LseView& lse,
                      Prompt prompt, NoStream) {
    const int slot = layer.sequences.find(seq);
    const std::int64_t pages = check_prompt(layer, slot, key, value);
    check_query(layer, query, key.num_tokens);
    ::lowrankkv::detail::check_rows("out", out, key.num_tokens, layer.config.shape.num_qo_heads,
                                    layer.head_dim());
    check_lse(layer, lse, key.num_tokens);
    Operation operation(layer, pages);
    operation.will_change(slot);
    for_each_piece(layer, slot, key, value, prompt,
                   [&](std::int64_t first, std::int64_t count, std::int64_t own_row) {
                     layer.sequence(slot).chunk.add_queries(query.tokens(first, count));
                     attend_piece(layer, slot, query.tokens(first, count), out.tokens(first, count),
                                  lse.tokens(first, count), own_row);
                   });
    operation.commit();
  }
  static void ingest(Layer& layer, SequenceId seq, const KeyView& key, const ValueView& value,
                     const QueryView& q_window, Prompt prompt, NoStream) {
    const int slot = layer.sequences.find(seq);
    const std::int64_t pages = check_prompt(layer, slot, key, value);
    check_query_window(layer, slot, q_window, key.num_tokens);
    Operation operation(layer, pages);
    operation.will_change(slot);
    const std::int64_t offset = key.num_tokens - q_window.num_tokens;
    for_each_piece(layer, slot, key, value, prompt,
                   [&](std::int64_t first, std::int64_t count, std::int64_t own_row) {
                     const std::int64_t begin = (std::max)(first, offset);
                     if (first + count > begin) {
                       layer.sequence(slot).chunk.add_queries(
                           q_window.tokens(begin - offset, first + count - begin));
                     }
                     if constexpr (Layer::accumulates_scores) {
                       // Needs normalised attention: attend, and discard the outputs.
                       const int heads = q_window.num_heads, dim = q_window.head_dim;
                       std::vector<float> out(static_cast<std::size_t>(count) *
                                              static_cast<std::size_t>(heads * dim));
                       attend_piece(layer, slot, q_window.tokens(first, count),
                                    {out.data(), count, heads, dim}, {}, own_row);
                     }
                   });
    operation.commit();
  }
  static void finish_prompt(Layer& layer, SequenceId seq, NoStream) {
    const int slot = layer.sequences.find(seq);
    PageDemand demand;
    demand_rows(layer, slot, 0, Phase::prefill, demand);
    // Other sequences may have taken pages since the last call.
    Operation operation(layer, demand.total());
    operation.will_change(slot);
    if (!layer.sequence(slot).chunk.empty()) commit_chunk(layer, slot);
    layer.sequence(slot).prompt_open = false;
    operation.commit();
  }

  // Decode steps.

  static void append(Layer& layer, std::span<const SequenceId> seqs, const KeyView& key,
                     const ValueView& value, NoStream) {
    const int m = check_append(layer, seqs, key, value, layer.config.tail_capacity);
    for (const SequenceId seq : seqs) layer.reserve_recent(layer.sequences.find(seq), m);
    for (std::size_t i = 0; i < seqs.size(); ++i) {
      layer.append_tail(layer.sequences.find(seqs[i]), key, value, static_cast<std::int64_t>(i) * m,
                        m);
    }
  }
  static void maintain(Layer& layer, std::span<const SequenceId> seqs, NoStream stream) {
    try_maintain(layer, seqs, stream).commit();
  }
  static Operation<Layer> try_maintain(Layer& layer, std::span<const SequenceId> seqs,
                                       NoStream = {}) {
    Operation operation(layer, pages_to_maintain(layer, seqs));
    for (const SequenceId seq : seqs) {
      const int slot = layer.sequences.find(seq);
      if (!flush_due(layer, slot)) continue;
      operation.will_change(slot);
      flush(layer, slot);
    }
    return operation;
  }
  static std::int64_t pages_to_maintain(const Layer& layer, std::span<const SequenceId> seqs) {
    PageDemand demand;
    for (const SequenceId seq : seqs) {
      const int slot = idle_slot(layer, seq);
      if (flush_due(layer, slot)) demand_rows(layer, slot, 0, Phase::decode, demand);
    }
    return demand.total();
  }
  static void append_maintained(Layer& layer, std::span<const SequenceId> seqs, const KeyView& key,
                                const ValueView& value, NoStream) {
    const int m = check_append(layer, seqs, key, value, std::int64_t{1} << 40);
    PageDemand demand;
    for (const SequenceId seq : seqs)
      demand_rows(layer, layer.sequences.find(seq), m, Phase::decode, demand);
    layer.pool->allocator().require(demand.total());
    const auto flushes = [&](int slot) { return flush_due(layer, slot, m); };
    // First the sequences that are flushed, because that can fail.
    std::int64_t pages = 0;
    for (const SequenceId seq : seqs) {
      const int slot = layer.sequences.find(seq);
      if (flushes(slot)) pages = demand.total();
      layer.reserve_recent(slot, (std::min)(m, layer.config.tail_capacity));
    }
    std::vector<bool> done(seqs.size());
    Operation operation(layer, pages);
    for (std::size_t i = 0; i < seqs.size(); ++i) {
      const int slot = layer.sequences.find(seqs[i]);
      if (!flushes(slot)) continue;
      operation.will_change(slot);
      append_and_flush(layer, slot, key, value, static_cast<std::int64_t>(i) * m, m);
      done[i] = true;
    }
    operation.commit();
    for (std::size_t i = 0; i < seqs.size(); ++i) {
      if (done[i]) continue;
      layer.append_tail(layer.sequences.find(seqs[i]), key, value, static_cast<std::int64_t>(i) * m,
                        m);
    }
  }

  static void attend(Layer& layer, std::span<const SequenceId> seqs, const QueryView& query,
                     const OutputView& out, const LseView& lse, NoStream) {
    attend_blocks(layer, seqs, check_attend(layer, seqs, query, out, lse), query, out, lse);
  }
  static void attend_scored(Layer& layer, std::span<const SequenceId> seqs, const QueryView& query,
                            const OutputView& out, const LseView& lse, const ScoreView& accumulated,
                            NoStream) {
    const std::int64_t m = check_attend(layer, seqs, query, out, lse);
    check_score_view(layer, seqs, accumulated);
    std::vector<float> scratch;
    const LseView sums = accumulated.data != nullptr && lse.data == nullptr
                             ? scratch_lse(layer, scratch, query.num_tokens)
                             : lse;
    attend_blocks(layer, seqs, m, query, out, sums);
    for (std::int64_t i = 0; accumulated.data != nullptr && i < accumulated.num_sequences; ++i) {
      write_scores(layer, slot_at(layer, seqs, i), block_at(layer, seqs, m, query, out, sums, i),
                   accumulated, i);
    }
  }
  static void accumulate(Layer& layer, std::span<const SequenceId> seqs,
                         const ScoreView& accumulated, NoStream) {
    check_score_view(layer, seqs, accumulated);
    if (accumulated.data != nullptr) check_accumulated_values(accumulated);
    for (std::int64_t i = 0; accumulated.data != nullptr && i < accumulated.num_sequences; ++i) {
      const int slot = idle_slot(layer, seqs[static_cast<std::size_t>(i)]);
      for (int head = 0; head < layer.num_kv_heads(); ++head) {
        const float* source = accumulated.row(i, head);
        for_each_score(layer, slot, head, layer.accumulated(slot, head),
                       [&](std::int64_t position, float& value) { value += source[position]; });
      }
    }
  }
  static void certify(Layer& layer, std::span<const SequenceId> seqs, const QueryView& query,
                      const LseView& lse, const CertificateView& out, const Certificate& allowed,
                      std::uint32_t* exceeding, NoStream) {
    const std::int64_t m = check_certify(layer, seqs, query, lse, out);
    for (std::size_t i = 0; i < seqs.size(); ++i) {
      const std::int64_t first = static_cast<std::int64_t>(i) * m;
      const QueryBlock block{query.tokens(first, m), {},
                             lse.tokens(first, m),   layer.config.shape.group_size(),
                             layer.config.scale(),   0};
      layer.certify(layer.sequences.find(seqs[i]), block,
                    {out.data + first * out.num_heads, m, out.num_heads});
    }
    if (exceeding == nullptr) return;
    *exceeding += static_cast<std::uint32_t>(std::count_if(
        out.data, out.data + out.num_tokens * out.num_heads, [&](const Certificate& found) {
          return !(found.logit <= allowed.logit && found.softmax <= allowed.softmax &&
                   found.output <= allowed.output);
        }));
  }

  // Changes of a sequence's tokens and positions.

  static std::int64_t rollback_limit(const Layer& layer, SequenceId seq) {
    return layer.first_tail_position(idle_slot(layer, seq));
  }
  /// What a call on some layer computes before it changes positions. commit() cannot fail.
  struct Moved {
    PositionShifts& shifts;
    PositionShifts moved;
    void commit() noexcept { shifts = std::move(moved); }
  };
  static void check_truncate(const Layer& layer, SequenceId seq, std::int64_t length) {
    const std::int64_t tokens = layer.table.lengths(idle_slot(layer, seq)).num_tokens;
    if (length >= 0 && length <= tokens) return;
    ::lowrankkv::detail::fail<ShapeError>("truncate: length ", length, ", sequence has ", tokens,
                                          " tokens");
  }
  static TruncateResult truncate(Layer& layer, SequenceId seq, std::int64_t length, NoStream) {
    check_truncate(layer, seq, length);
    const int slot = layer.sequences.find(seq);
    // Nothing below allocates.
    SequenceLengths& now = layer.table.lengths(slot);
    const std::int64_t first_tail = layer.first_tail_position(slot);
    if (length < now.num_tokens) layer.sequence(slot).shifts.truncate(length);
    if (length < first_tail) {
      truncate_stored(layer, slot, length);
      return TruncateResult::inexact;
    }
    now.tail_length = static_cast<std::int32_t>(length - first_tail);
    now.num_tokens = length;
    for (auto& accumulated : layer.sequence(slot).accumulated)
      accumulated.recent.resize(static_cast<std::size_t>(now.tail_length));
    return TruncateResult::exact;
  }
  static std::int64_t pages_to_remove(const Layer& layer, SequenceId seq, std::int64_t first,
                                      std::int64_t count) {
    const int slot = idle_slot(layer, seq);
    ::lowrankkv::detail::check_removal(layer.sequence(slot).shifts,
                                       layer.table.lengths(slot).num_tokens, first, count,
                                       PositionShifts::kLimit);
    PageDemand demand;
    demand_removal(layer, slot, first, count, demand);
    return demand.total();
  }
  static void remove(Layer& layer, SequenceId seq, std::int64_t first, std::int64_t count,
                     NoStream stream) {
    try_remove(layer, seq, first, count, stream).commit();
  }
  static Operation<Layer> try_remove(Layer& layer, SequenceId seq, std::int64_t first,
                                     std::int64_t count, NoStream = {}) {
    Operation operation(layer, pages_to_remove(layer, seq, first, count));
    const int slot = layer.sequences.find(seq);
    operation.will_change(slot);
    remove_tokens(layer, slot, first, count);
    return operation;
  }
  static const PositionShifts& position_shifts(const Layer& layer, SequenceId seq) {
    return layer.sequence(layer.sequences.find(seq)).shifts;
  }
  static void check_shift(const Layer& layer, SequenceId seq, std::int64_t first,
                          std::int64_t delta) {
    const int slot = idle_slot(layer, seq);
    ::lowrankkv::detail::check_shift(layer.sequence(slot).shifts, layer.stores_pre_rope(),
                                     layer.table.lengths(slot).num_tokens, first, delta,
                                     PositionShifts::kLimit);
  }
  static void shift_positions(Layer& layer, SequenceId seq, std::int64_t first, std::int64_t delta,
                              NoStream stream) {
    try_shift(layer, seq, first, delta, stream).commit();
  }
  static Moved try_shift(Layer& layer, SequenceId seq, std::int64_t first, std::int64_t delta,
                         NoStream = {}) {
    check_shift(layer, seq, first, delta);
    PositionShifts& shifts = layer.sequence(layer.sequences.find(seq)).shifts;
    Moved result{shifts, shifts};
    result.moved.add(first, delta);
    return result;
  }
  static void check_division(const Layer& layer, SequenceId seq, std::int64_t first,
                             std::int64_t count, std::int64_t divisor) {
    const int slot = idle_slot(layer, seq);
    ::lowrankkv::detail::check_division(layer.sequence(slot).shifts, layer.stores_pre_rope(),
                                        layer.table.lengths(slot).num_tokens, first, count,
                                        divisor);
  }
  static void divide_positions(Layer& layer, SequenceId seq, std::int64_t first, std::int64_t count,
                               std::int64_t divisor, NoStream stream) {
    try_divide(layer, seq, first, count, divisor, stream).commit();
  }
  static Moved try_divide(Layer& layer, SequenceId seq, std::int64_t first, std::int64_t count,
                          std::int64_t divisor, NoStream = {}) {
    check_division(layer, seq, first, count, divisor);
    PositionShifts& shifts = layer.sequence(layer.sequences.find(seq)).shifts;
    Moved result{shifts, shifts};
    result.moved.divide(first, count, divisor);
    return result;
  }

  // What is stored.

  static std::size_t save_bytes(const Layer& layer, SequenceId seq) {
    return save_sequence(layer, idle_slot(layer, seq), {}, true);
  }
  static std::size_t save(const Layer& layer, SequenceId seq, std::span<std::byte> buffer,
                          NoStream) {
    return save_sequence(layer, idle_slot(layer, seq), buffer, false);
  }
  static void load(Layer& layer, SequenceId seq, std::span<const std::byte> saved, NoStream) {
    OpenedSequence opened = open_saved(layer, saved);
    auto sequence = read_sequence(layer, opened.in, opened.version);
    auto fresh = new_sequence(layer);
    Operation operation(layer, pages_of(layer, sequence));
    ::lowrankkv::detail::AddedSequence added(layer.sequences, seq);
    operation.will_change(added.slot());
    open_slot(layer, added.slot(), std::move(fresh));
    store_sequence(layer, added.slot(), std::move(sequence));
    operation.commit();
    added.keep();
  }
  static void reconstruct(const Layer& layer, SequenceId seq, std::int64_t first,
                          const KeyTargetView& key, const ValueTargetView& value, NoStream) {
    const int slot = layer.sequences.find(seq);
    ::lowrankkv::detail::check_rows("key", key, key.num_tokens, layer.num_kv_heads(),
                                    layer.head_dim());
    ::lowrankkv::detail::check_rows("value", value, key.num_tokens, layer.num_kv_heads(),
                                    layer.head_dim());
    check_tables("key", key.pages, key.num_tokens);
    check_tables("value", value.pages, key.num_tokens);
    const std::int64_t tokens = layer.table.lengths(slot).num_tokens;
    if (first < 0 || first > tokens || key.num_tokens > tokens - first) {
      ::lowrankkv::detail::fail<ShapeError>("reconstruct: ", key.num_tokens,
                                            " tokens from position ", first, ", sequence has ",
                                            tokens, " tokens");
    }
    for (int head = 0; head < layer.num_kv_heads(); ++head)
      reconstruct_head(layer, slot, head, first, key.num_tokens, key, value);
  }
  static void row_states(const Layer& layer, SequenceId seq, int kv_head, std::int64_t first,
                         std::span<RowState> states, NoStream) {
    const int slot = layer.sequences.find(seq);
    const std::int64_t count = static_cast<std::int64_t>(states.size());
    if (kv_head < 0 || kv_head >= layer.num_kv_heads()) {
      ::lowrankkv::detail::fail<ShapeError>("row_states: kv_head ", kv_head, ", num_kv_heads ",
                                            layer.num_kv_heads());
    }
    const std::int64_t tokens = layer.table.lengths(slot).num_tokens;
    if (first < 0 || first > tokens || count > tokens - first) {
      ::lowrankkv::detail::fail<ShapeError>("row_states: ", count, " positions from ", first,
                                            " on, sequence has ", tokens, " tokens");
    }
    const RowRuns& runs = layer.runs(slot, kv_head);
    for (std::int64_t i = 0; i < count; ++i) {
      states[static_cast<std::size_t>(i)] =
          first + i < runs.num_positions() ? runs.find(first + i).state : RowState::full;
    }
  }
  static MemoryUsage memory(const Layer& layer, SequenceId seq) {
    return slot_memory(layer, layer.sequences.find(seq));
  }
  static MemoryUsage memory(const Layer& layer) {
    MemoryUsage usage;
    layer.sequences.for_each([&](SequenceId, int slot) { usage += slot_memory(layer, slot); });
    usage.shared_bytes = layer.shared_bytes();
    usage.reserved_bytes = layer.reserved_bytes() + layer.pool->idle_bytes();
    return usage;
  }
  static int tokens_per_page(const Layer& layer, int kv_head) {
    return Layer::TokenImpl::compresses ? layer.compressed.layout(kv_head).rows_per_page
                                        : layer.full.layout(kv_head).rows_per_page;
  }
  static std::size_t bytes_for(const Layer& layer, std::int64_t tokens) {
    const int lists = Layer::TokenImpl::compresses ? layer.num_lists() : layer.num_kv_heads();
    std::size_t pages = 0;
    for (int list = 0; list < lists; ++list) {
      const std::int64_t per_page = tokens_per_page(layer, list);
      pages += static_cast<std::size_t>((tokens + per_page - 1) / per_page);
    }
    return pages * layer.pool->page_bytes();
  }
  static CacheStatistics statistics(const Layer& layer) { return layer.statistics; }

 private:
  /// Raises unless rows that are coded in groups leave the tail in whole groups, and nothing is
  /// kept of single rows.
  static void check_groups([[maybe_unused]] const CacheConfig& config,
                           [[maybe_unused]] const PolicySet& policies) {
    if constexpr (Layer::TokenImpl::compresses &&
                  groups_rows<typename Layer::QuantizerPolicy, Cpu>()) {
      using ::lowrankkv::detail::fail;
      const int together = rows_together<Cpu>(policies.quantizer);
      if (config.flush_interval % together != 0)
        fail<ValueError>("flush_interval: ", config.flush_interval,
                         ", this quantizer codes rows in groups of ", together,
                         " and needs a multiple");
      if (config.keep_residuals)
        fail<ValueError>("keep_residuals: ", config.keep_residuals,
                         ", 0 expected: this quantizer codes rows in groups of ", together,
                         ", and may code a stored row again");
    }
  }
  static constexpr bool makes_maps =
      Layer::TokenImpl::compresses && has_own_maps<typename Layer::OfBasis, Cpu>();
  /// The maps that the basis policy makes itself; none if it is given its maps.
  static LayerBasis own_maps(const CacheConfig& config,
                             [[maybe_unused]] const PolicySet& policies) {
    if constexpr (makes_maps)
      return Layer::BasisImpl::own_maps(policies.basis, config.shape);
    else
      return {};
  }
  /// Appends m rows of both views, from row `first` on, and flushes as often as needed.
  static void append_and_flush(Layer& layer, int slot, const KeyView& key, const ValueView& value,
                               std::int64_t first, int m) {
    for (int done = 0; done < m;) {
      flush(layer, slot);
      const int room = layer.config.tail_capacity - layer.table.lengths(slot).tail_length;
      const int count = (std::min)(room, m - done);
      layer.append_tail(slot, key, value, first + done, count);
      done += count;
    }
    flush(layer, slot);
  }
  static int slot_at(const Layer& layer, std::span<const SequenceId> seqs, std::int64_t i) {
    return layer.sequences.find(seqs[static_cast<std::size_t>(i)]);
  }
  /// The queries of the last m tokens of sequence i of a call.
  static QueryBlock block_at(const Layer& layer, std::span<const SequenceId> seqs, std::int64_t m,
                             const QueryView& query, const OutputView& out, const LseView& lse,
                             std::int64_t i) {
    return {query.tokens(i * m, m), out.tokens(i * m, m),
            lse.tokens(i * m, m),   layer.config.shape.group_size(),
            layer.config.scale(),   layer.table.lengths(slot_at(layer, seqs, i)).tail_length - m};
  }
  static void attend_blocks(Layer& layer, std::span<const SequenceId> seqs, std::int64_t m,
                            const QueryView& query, const OutputView& out, const LseView& lse) {
    layer.attend(
        static_cast<std::int64_t>(seqs.size()),
        [&](std::int64_t i) { return slot_at(layer, seqs, i); },
        [&](std::int64_t i) { return block_at(layer, seqs, m, query, out, lse, i); }, false);
  }
  /// Writes the attention that the rows of a slot receive from a block, by position, to entry
  /// `index` of `accumulated`.
  static void write_scores(Layer& layer, int slot, const QueryBlock& block,
                           const ScoreView& accumulated, std::int64_t index) {
    std::vector<HeadScores> received;
    for (int head = 0; head < layer.num_kv_heads(); ++head)
      received.push_back(zero_scores(layer, slot, head));
    layer.accumulated_attention(
        slot, block,
        false, [&](int head) -> auto& { return received[static_cast<std::size_t>(head)]; });
    for (int head = 0; head < layer.num_kv_heads(); ++head) {
      float* target = accumulated.row(index, head);
      std::fill(target, target + accumulated.num_positions, 0.0F);
      for_each_score(layer, slot, head, received[static_cast<std::size_t>(head)],
                     [&](std::int64_t position, float value) { target[position] = value; });
    }
  }
};

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
