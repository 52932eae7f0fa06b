// SPDX-License-Identifier: Apache-2.0
/// @file cpu/layer.hpp  One attention layer on the CPU: sizes, storage, and the steps that
/// CompressedKVCache calls.
///
/// Nothing here checks arguments or capacities: the cache checks them before it changes anything.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lowrankkv/core/calls.hpp"
#include "lowrankkv/core/sequence_table.hpp"
#include "lowrankkv/cpu/attend.hpp"
#include "lowrankkv/cpu/accumulated_scores.hpp"
#include "lowrankkv/cpu/compress.hpp"
#include "lowrankkv/cpu/layer_state.hpp"
#include "lowrankkv/cpu/remove_tokens.hpp"
#include "lowrankkv/cpu/residuals.hpp"
#include "lowrankkv/cpu/saved_frame.hpp"
#include "lowrankkv/cpu/sequence_ops.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Sizes of a layer's lists and page tables, from its configuration.
template <class Quantizer>
struct LayerSizes {
  std::size_t page_bytes = 0;
  std::vector<RowLayout<FullRows>> full;                      ///< per KV head
  std::vector<RowLayout<Quantizer>> compressed;               ///< per KV head
  std::int32_t max_full_pages = 0, max_compressed_pages = 0;  ///< per sequence and head
  std::int64_t num_pages = 0;  ///< most pages that all sequences at full length can need
};

/// @brief KV heads a thread from which on splits of a head do not run apart: the threads are busy
/// without.
inline constexpr int kHeadsPerThread = 4;

/// @brief The CPU backend's layer.
template <class BasisPolicy, class Updater, class TokenPolicy, class Quantizer, class EpochPolicy>
class Layer : public LayerState<BasisPolicy, Updater, TokenPolicy, Quantizer, EpochPolicy> {
 public:
  using State = LayerState<BasisPolicy, Updater, TokenPolicy, Quantizer, EpochPolicy>;
  using PolicySet = Policies<BasisPolicy, Updater, TokenPolicy, Quantizer>;

  static LayerSizes<Quantizer> sizes(const CacheConfig& config, const LayerBasis& basis,
                                     [[maybe_unused]] const BasisPolicy& of_basis,
                                     const TokenPolicy& token_policy, const Quantizer& quantizer) {
    LayerSizes<Quantizer> result;
    const int dim = config.shape.head_dim;
    const FullRows plain{config.full_type, config.full_row_bits};
    result.page_bytes = config.page_bytes != 0
                            ? config.page_bytes
                            : 16 * 2 * static_cast<std::size_t>(dim) * size_of(config.full_type);
    if constexpr (State::TokenImpl::compresses && groups_rows<Quantizer, Cpu>()) {
      if (config.page_bytes == 0)
        result.page_bytes = whole_groups(quantizer, basis, result.page_bytes);
    }
    RowBounds most;  // most rows of one head over the life of a sequence
    for (const Phase phase : {Phase::prefill, Phase::decode}) {
      const RowBounds bounds =
          State::TokenImpl::bounds(token_policy, {0, 0, config.max_tokens, phase});
      most = {(std::max)(most.full, bounds.full), (std::max)(most.compressed, bounds.compressed)};
    }
    const int heads = config.shape.num_kv_heads;
    for (int head = 0; head < heads; ++head)
      result.full.push_back(make_row_layout(plain, dim, dim, {}, {}, result.page_bytes));
    if constexpr (State::TokenImpl::compresses) {
      for (const HeadBasis& maps : basis.heads) {
        result.compressed.push_back(make_row_layout(
            quantizer, maps.key_rank, State::joins ? 0 : maps.value_rank, maps.key_bits,
            State::joins ? std::span<const std::uint8_t>() : maps.value_bits, result.page_bytes));
      }
      if constexpr (State::joins) {
        for (int head = 0; head < heads;
             head += State::BasisImpl::heads_per_group(of_basis, heads)) {
          const HeadBasis& maps = basis.heads[static_cast<std::size_t>(head)];
          result.compressed.push_back(make_row_layout(quantizer, 0, maps.value_rank, {},
                                                      maps.value_bits, result.page_bytes));
        }
      }
    } else {
      result.compressed.resize(static_cast<std::size_t>(heads));
      for (auto& layout : result.compressed) layout.rows_per_page = 1;  // these lists stay empty
    }
    const auto pages = [&](std::int64_t rows, const auto& layouts, std::int32_t& most_pages) {
      for (const auto& layout : layouts) {
        const auto count =
            static_cast<std::int32_t>((rows + layout.rows_per_page - 1) / layout.rows_per_page);
        most_pages = (std::max)(most_pages, count);
        result.num_pages += std::int64_t{config.max_sequences} * count;
      }
    };
    pages(most.full, result.full, result.max_full_pages);
    // Outliers are a share of the rows seen. A sequence that is truncated where outliers are dense,
    // and then continued, can hold more than that share.
    if (wants(State::TokenImpl::evidence, Evidence::residuals))
      result.max_full_pages = 2 * result.max_full_pages + 8;
    pages(most.compressed, result.compressed, result.max_compressed_pages);
    return result;
  }

  Layer(const CacheConfig& settings, LayerBasis&& basis, const PolicySet& policies,
        std::shared_ptr<PagePool>&& pages, std::shared_ptr<Executor>&& workers)
      : sequences(settings), row_(static_cast<std::size_t>(settings.shape.head_dim)) {
    const LayerSizes<Quantizer> layout =
        sizes(settings, basis, policies.basis, policies.token_policy, policies.quantizer);
    this->config = settings;
    this->basis_policy = policies.basis;
    this->updater = policies.updater;
    this->token_policy = policies.token_policy;
    this->quantizer = policies.quantizer;
    this->calibrated = std::move(basis);
    const std::int64_t num_pages = settings.num_pages != 0 ? settings.num_pages : layout.num_pages;
    this->pool =
        pages ? std::move(pages) : std::make_shared<PagePool>(layout.page_bytes, num_pages);
    this->threads =
        workers ? std::move(workers) : std::make_shared<ThreadPool>(settings.num_threads);
    const int heads = settings.shape.num_kv_heads;
    // Room for the calibrated segment, and for the one more of a merge in progress.
    this->table = DescriptorTable(
        settings.max_sequences, State::TokenImpl::compresses ? this->num_lists() : heads,
        layout.max_full_pages, layout.max_compressed_pages, EpochPolicy::max_epochs + 2);
    this->changes = PageUndo(this->pool.get());
    this->full = PagedRows<FullRows>(RowList::full, layout.full, this->pool.get(), &this->changes,
                                     &this->table);
    this->compressed = PagedRows<Quantizer>(RowList::compressed, layout.compressed,
                                            this->pool.get(), &this->changes, &this->table);
    this->tail = TailRows(settings.max_sequences, heads, settings.tail_capacity,
                          settings.shape.head_dim, settings.full_type);
    this->epochs = EpochStore(settings.epoch_type);
    if (State::TokenImpl::compresses)
      this->epochs.add(this->calibrated.heads,
                       fold_maps(static_cast<const State&>(*this), this->calibrated.heads),
                       settings.shape.head_dim);
    this->slots.resize(static_cast<std::size_t>(settings.max_sequences));
    int widest = settings.shape.head_dim;
    for (const HeadBasis& head : this->calibrated.heads)
      widest = (std::max)(widest, head.value_rank);
    if (this->stores_pre_rope()) this->rotary = RotaryTable(settings.rope, settings.shape.head_dim);
    for (int thread = 0; thread < this->threads->num_threads(); ++thread) {
      this->workspaces.emplace_back(settings.shape.head_dim, widest, settings.shape.group_size(),
                                    this->stores_pre_rope());
    }
    const int splits = splits_of(settings.max_tokens);
    if (splits > 1 && heads < kHeadsPerThread * this->threads->num_threads() &&
        this->threads->num_threads() > 1) {
      // A list's parts and those of the next one share a split: a place more for every list.
      head_parts_ = splits + EpochPolicy::max_epochs + 3;
      part_states_.resize(static_cast<std::size_t>(heads) * static_cast<std::size_t>(head_parts_) *
                          static_cast<std::size_t>(part_size()));
    }
  }
  Layer(const Layer&) = delete;  // the row lists point into this object
  Layer& operator=(const Layer&) = delete;
  /// Returns the pages to the pool, which may be shared and then outlives the layer.
  ~Layer() {
    for (int slot = 0; slot < this->config.max_sequences; ++slot) {
      if (this->sequence(slot).used) clear_slot(static_cast<State&>(*this), slot);
    }
  }

  /// @brief Appends `count` rows of both views, from row `first` on, to the tail, rounded to its
  /// type.
  ///
  /// Cannot fail: the caller has called reserve_recent().
  void append_tail(int slot, const KeyView& key, const ValueView& value, std::int64_t first,
                   int count) {
    SequenceLengths& lengths = this->table.lengths(slot);
    float* row = this->workspaces[0].row.data();
    for (int token = 0; token < count; ++token) {
      for (int head = 0; head < this->num_kv_heads(); ++head) {
        load_row(key, first + token, head, row);
        this->tail.write(slot, head, Part::key, lengths.tail_length + token, row);
        load_row(value, first + token, head, row);
        this->tail.write(slot, head, Part::value, lengths.tail_length + token, row);
      }
    }
    lengths.tail_length += count;
    lengths.num_tokens += count;
    this->add_recent_scores(slot, count);
  }

  /// @brief Makes room for `count` more accumulated scores of recent rows.
  void reserve_recent(int slot, std::int64_t count) {
    for (HeadScores& accumulated : this->sequence(slot).accumulated)
      accumulated.recent.reserve(accumulated.recent.size() + static_cast<std::size_t>(count));
  }
  /// @brief Adds prompt rows to the unfinished chunk.
  void extend_chunk(int slot, const KeyView& key, const ValueView& value) {
    this->sequence(slot).chunk.add(key, value, this->workspaces[0].row.data());
    this->table.lengths(slot).num_tokens += key.num_tokens;
    this->add_recent_scores(slot, key.num_tokens);
  }

  /// @brief Attention of the queries of `count` blocks; block i belongs to slot_of(i). Sequences,
  /// heads and pieces of query tokens run in parallel.
  template <class Slots, class Blocks>
  void attend(std::int64_t count, Slots&& slot_of, Blocks&& block_of, bool prompt) {
    const int per_task = tokens_per_task(prompt);
    const std::int64_t tokens = count > 0 ? block_of(0).query.num_tokens : 0;
    const std::int64_t pieces = (tokens + per_task - 1) / per_task;
    const std::int64_t heads = this->num_kv_heads();
    if (count == 1 && tokens == 1 && !prompt && attend_splits_apart(slot_of(0), block_of(0)))
      return;
    this->threads->run(count * heads * pieces, [&](std::int64_t task, int thread) {
      // Later pieces see more rows. Start with them, so that all threads finish at about one time.
      const std::int64_t piece = pieces - 1 - task / (count * heads);
      const std::int64_t index = task / heads % count;
      const StoredHead<Quantizer> stored =
          stored_head(slot_of(index), static_cast<int>(task % heads), prompt);
      const std::int64_t first = piece * per_task;
      attend_block(stored, block_of(index), first,
                   static_cast<int>((std::min)(std::int64_t{per_task}, tokens - first)),
                   this->workspaces[static_cast<std::size_t>(thread)]);
    });
  }

  /// @brief Adds to out(head), the HeadScores of a head, the attention that each stored row of a
  /// sequence gets from a block with known lse, summed over the block's queries and the heads of a
  /// group. Heads run in parallel.
  template <class Out>
  void accumulated_attention(int slot, const QueryBlock& block, bool prompt, Out&& out) {
    const int per_task = tokens_per_task(prompt);
    this->threads->run(this->num_kv_heads(), [&](std::int64_t head, int thread) {
      const StoredHead<Quantizer> stored = stored_head(slot, static_cast<int>(head), prompt);
      for (std::int64_t first = 0; first < block.query.num_tokens; first += per_task) {
        const int tokens =
            static_cast<int>((std::min)(std::int64_t{per_task}, block.query.num_tokens - first));
        scores_of_block(stored, block, first, tokens,
                        this->workspaces[static_cast<std::size_t>(thread)],
                        out(static_cast<int>(head)));
      }
    });
  }

  /// @brief Bounds on what compression changed in the outputs of a block with known lse. Heads run
  /// in parallel.
  void certify(int slot, const QueryBlock& block, const CertificateView& out) {
    const int per_task = tokens_per_task(false);
    this->threads->run(this->num_kv_heads(), [&](std::int64_t index, int thread) {
      const int head = static_cast<int>(index);
      AttentionWorkspace& work = this->workspaces[static_cast<std::size_t>(thread)];
      const StoredHead<Quantizer> stored = stored_head(slot, head, false);
      double largest = static_cast<double>(this->residuals(slot, head).largest_value);
      for (int row = 0; row < stored.tail_length; ++row) {
        this->tail.read(slot, head, Part::value, row, work.row.data());
        largest = (std::max)(largest, norm_of(work.row.data(), this->head_dim()));
      }
      for (std::int64_t first = 0; first < block.query.num_tokens; first += per_task) {
        const int tokens =
            static_cast<int>((std::min)(std::int64_t{per_task}, block.query.num_tokens - first));
        certify_block(stored, block, first, tokens, this->residuals(slot, head), largest, work,
                      out);
      }
    });
  }

  /// @brief Bytes of reserved capacity that no sequence uses, besides the pool's free pages.
  std::size_t reserved_bytes() const {
    std::size_t tails = this->tail.bytes();
    for (int slot = 0; slot < this->config.max_sequences; ++slot) {
      tails -= static_cast<std::size_t>(this->table.lengths(slot).tail_length) *
               this->tail.token_bytes();
    }
    std::size_t work = 4 * part_states_.size();
    for (const AttentionWorkspace& workspace : this->workspaces) work += workspace.bytes();
    return tails + work + this->table.bytes() + this->rotary.bytes();
  }
  /// @brief Bytes of the calibrated maps as stored, and of the f32 copy that updaters start from.
  std::size_t shared_bytes() const {
    if (!State::TokenImpl::compresses) return 0;
    std::size_t bytes = this->epochs.bytes(0);
    for (const HeadBasis& head : this->calibrated.heads) bytes += head.bytes();
    return bytes;
  }

  /// @brief Room for one row of head_dim numbers, for checks.
  float* scratch_row() const { return row_.data(); }

  ::lowrankkv::detail::SequenceTable sequences;  ///< maps the engine's ids to slots

 private:
  /// Numbers of the state of a part, of one query token.
  std::ptrdiff_t part_size() const {
    return std::ptrdiff_t{this->config.shape.group_size()} * (this->workspaces[0].width() + 2);
  }
  /// The state of a part of a head (HeadAttention), of one query token. Parts in order differ in
  /// their split or list, and neither falls.
  PartialState part_state(std::int64_t head, int list, int split, int stride) {
    const int group = this->config.shape.group_size();
    float* values = part_states_.data() + (head * head_parts_ + list + split) * part_size();
    return {values, values + group, values + 2 * group, stride};
  }
  /// Attention of one token of one sequence, with the splits of a head on several threads: where
  /// heads alone leave threads idle. It computes what attend_block() does, in its order.
  /// @return false, and nothing is done, if heads have one split, or are enough
  bool attend_splits_apart(int slot, const QueryBlock& block) {
    const std::int64_t heads = this->num_kv_heads();
    if (part_states_.empty()) return false;
    int splits = 1;
    for (int head = 0; head < heads; ++head)
      splits = (std::max)(splits, num_splits(stored_head(slot, head, false)));
    if (splits == 1) return false;
    const auto of_head = [&](std::int64_t head, int thread, auto&& use) {
      const StoredHead<Quantizer> stored = stored_head(slot, static_cast<int>(head), false);
      use(HeadAttention<Quantizer>(stored, block, 0, 1,
                                   this->workspaces[static_cast<std::size_t>(thread)]));
    };
    // Last the recent rows: they are few.
    this->threads->run(heads * (splits + 1), [&](std::int64_t task, int thread) {
      const std::int64_t head = task % heads;
      of_head(head, thread, [&](HeadAttention<Quantizer>&& attention) {
        const int split = static_cast<int>(task / heads);
        attention.compute_split(split, [&](int list, int of_split) {
          return part_state(head, list, of_split, attention.width_of(list));
        });
      });
    });
    this->threads->run(heads, [&](std::int64_t head, int thread) {
      of_head(head, thread, [&](HeadAttention<Quantizer>&& attention) {
        attention.merge([&](int list, int split, const PartialState&) {
          return part_state(head, list, split, attention.width_of(list));
        });
      });
    });
    return true;
  }
  /// Whether pre-RoPE keys are rotated in folded form: while decoding, in groups of one head. This
  /// depends only on the configuration and the phase. The two forms round differently, and results
  /// must not depend on how a stream was split into calls.
  bool folds(bool prompt) const {
    return this->stores_pre_rope() && this->config.shape.group_size() == 1 && !prompt;
  }
  int tokens_per_task(bool prompt) const {
    return folds(prompt) ? 1 : (std::max)(1, kQueryRows / this->config.shape.group_size());
  }
  StoredHead<Quantizer> stored_head(int slot, int head, bool prompt) {
    return {.full = &this->full,
            .compressed = &this->compressed,
            .epochs = &this->epochs,
            .tail = &this->tail,
            .chunk = prompt ? &this->sequence(slot).chunk : nullptr,
            .segments = this->used_segments(slot, head),
            .slot = slot,
            .head = head,
            .value_list = State::TokenImpl::compresses ? this->value_list(head) : head,
            .head_dim = this->head_dim(),
            .tail_length = this->table.lengths(slot).tail_length,
            .first_tail_token = this->first_tail_position(slot),
            .rotary = this->stores_pre_rope() ? &this->rotary : nullptr,
            .folds = folds(prompt),
            .runs = &this->runs(slot, head),
            .shifts = &this->sequence(slot).shifts};
  }
  /// The fewest bytes from `least` on that hold a whole number of groups of rows of every head.
  static std::size_t whole_groups(const Quantizer& quantizer, const LayerBasis& basis,
                                  std::size_t least) {
    std::size_t bytes = 0;
    for (const HeadBasis& maps : basis.heads) {
      const RowLayout<Quantizer> one =
          make_row_layout(quantizer, maps.key_rank, State::joins ? 0 : maps.value_rank,
                          maps.key_bits, maps.value_bits, std::size_t{1} << 30);
      const int group = rows_together<Cpu>(quantizer);
      int rows = group;
      while (one.page_bytes(rows) < least) rows += group;
      bytes = (std::max)(bytes, one.page_bytes(rows));
    }
    return (std::max)(bytes, least);
  }
  void add_recent_scores(int slot, std::int64_t rows) {
    if (!State::accumulates_scores) return;
    for (int head = 0; head < this->num_kv_heads(); ++head) {
      std::vector<float>& recent = this->accumulated(slot, head).recent;
      recent.resize(recent.size() + static_cast<std::size_t>(rows), 0.0F);
    }
  }

  mutable std::vector<float> row_;
  // Where splits run apart: room for the states of parts of a head; otherwise none.
  int head_parts_ = 0;
  std::vector<float> part_states_;
};

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
