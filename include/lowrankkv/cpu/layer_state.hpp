// SPDX-License-Identifier: Apache-2.0
/// @file cpu/layer_state.hpp  All state that the CPU backend stores for one attention layer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/concepts/basis.hpp"
#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/concepts/updater.hpp"
#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/position_shifts.hpp"
#include "lowrankkv/core/row_runs.hpp"
#include "lowrankkv/core/statistics.hpp"
#include "lowrankkv/cpu/attention_block.hpp"
#include "lowrankkv/cpu/epoch_store.hpp"
#include "lowrankkv/cpu/operation.hpp"
#include "lowrankkv/cpu/paged_rows.hpp"
#include "lowrankkv/cpu/quantizer/full_rows.hpp"
#include "lowrankkv/cpu/rotary_table.hpp"
#include "lowrankkv/cpu/tail_rows.hpp"
#include "lowrankkv/cpu/thread_pool.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief The updater's state and working bases of one (sequence, KV head).
template <class UpdaterState>
struct HeadAdaptation {
  UpdaterState key_state, value_state;
  /// Working bases [head_dim, rank] in epoch_type. Empty: the current epoch's bases.
  StoredMatrix key_basis, value_basis;
};

/// @brief Accumulated attention scores of the rows of one head, by list. Kept only for policies
/// that ask for them.
struct HeadScores {
  std::vector<float> full, compressed, recent;  ///< recent: the tail, then the prompt chunk

  std::vector<float>& of(RowState state) { return state == RowState::full ? full : compressed; }
  std::size_t bytes() const { return 4 * (full.size() + compressed.size() + recent.size()); }
};

/// @brief Keeps the elements whose `keep` is true, in their order.
template <class T>
void keep_only(std::vector<T>& values, const std::vector<bool>& keep) {
  std::size_t kept = 0;
  for (std::size_t row = 0; row < keep.size(); ++row) {
    if (keep[row]) values[kept++] = values[row];
  }
  values.resize(kept);
}

/// @brief Norms of what storing lost of the rows of one list, rounded up.
struct RowResiduals {
  std::vector<Half> key, value;  ///< per row: ||k - k^||, ||v - v^||

  std::vector<Half>& of(Part part) { return part == Part::key ? key : value; }
  void resize(std::size_t rows) {
    key.resize(rows);
    value.resize(rows);
  }
  void retain(const std::vector<bool>& keep) {
    keep_only(key, keep);
    keep_only(value, keep);
  }
  std::size_t bytes() const { return sizeof(Half) * (key.size() + value.size()); }
};

/// @brief The residuals of both lists of one head. Kept on request (config.keep_residuals).
struct HeadResiduals {
  RowResiduals full, compressed;  ///< full: empty unless full rows are stored in 8 bits
  float largest_value = 0.0F;     ///< at least the norm of every value that has left the tail

  RowResiduals& of(RowState state) { return state == RowState::full ? full : compressed; }
  std::size_t bytes() const { return full.bytes() + compressed.bytes() + sizeof(float); }
};

/// @brief One sequence of a layer, without its prompt chunk.
template <class UpdaterState>
struct SequenceState {
  bool used = false;
  std::int32_t epoch = 0;  ///< epoch under which new rows are written
  std::int64_t rows_since_publication = 0;
  /// Index of the segment whose rows a merge is moving to its successor, from its end on; -1: none.
  std::int32_t merging = -1;
  bool prompt_open = false;                              ///< the prompt goes on in a later call
  std::vector<HeadAdaptation<UpdaterState>> adaptation;  ///< per KV head
  std::vector<RowRuns> runs;             ///< per KV head: the positions that have left the tail
  std::vector<HeadScores> accumulated;   ///< per KV head
  std::vector<HeadResiduals> residuals;  ///< per KV head
  PositionShifts shifts;                 ///< rotary positions that differ from the token's index
};

/// @brief One sequence of a layer.
template <class UpdaterState>
struct Slot : SequenceState<UpdaterState> {
  using State = SequenceState<UpdaterState>;
  PromptChunk chunk;  ///< rows of an unfinished prefill
};

/// @brief The stored state of one layer. Plain data: the steps of the algorithm are in
/// cpu/layer.hpp and what it includes.
template <class BasisPolicy, class Updater, class TokenPolicy, class Quantizer, class EpochPolicy>
struct LayerState {
  using UpdaterImpl = Impl<Updater, Cpu>;
  using TokenImpl = Impl<TokenPolicy, Cpu>;
  using BasisImpl = Impl<BasisPolicy, Cpu>;
  using Sequence = Slot<typename UpdaterImpl::State>;
  using OfBasis = BasisPolicy;
  using UpdaterPolicy = Updater;
  using QuantizerPolicy = Quantizer;
  using Epochs = EpochPolicy;
  using Codec = Impl<Quantizer, Cpu>;
  static constexpr bool joins = joins_values<BasisPolicy, Cpu>();
  static constexpr bool accumulates_scores = wants(TokenImpl::evidence, Evidence::accumulated);

  CacheConfig config;
  BasisPolicy basis_policy;
  Updater updater;
  TokenPolicy token_policy;
  Quantizer quantizer;
  /// In f32: updaters start from it, and every epoch uses its means and metrics.
  LayerBasis calibrated;
  std::shared_ptr<PagePool> pool;
  std::shared_ptr<Executor> threads;

  DescriptorTable table;
  PagedRows<FullRows> full;
  PagedRows<Quantizer> compressed;
  TailRows tail;
  EpochStore epochs;
  RotaryTable rotary;  ///< empty unless keys are stored pre-RoPE
  std::vector<Sequence> slots;
  std::vector<AttentionWorkspace> workspaces;  ///< one per thread
  PageUndo changes;                            ///< pages that the operation in progress changes
  LayerBackup<Sequence> backup;                ///< sequences before the operation in progress
  CacheStatistics statistics;

  int num_kv_heads() const { return config.shape.num_kv_heads; }
  int head_dim() const { return config.shape.head_dim; }
  /// Whether the residuals of a list's rows are kept: with keep_residuals, those of compressed
  /// rows, and those of full rows if they are stored in 8 bits.
  bool keeps_residuals(RowState list) const {
    return config.keep_residuals &&
           (list == RowState::compressed || (list == RowState::full && config.full_row_bits != 0));
  }
  bool stores_pre_rope() const { return config.rope.keys == Rope::pre; }
  int recent() const { return TokenImpl::recent(token_policy); }
  /// Heads that share the fate of their tokens because one row of value coefficients serves them
  /// all. Usually 1.
  int heads_per_group() const {
    if constexpr (joins)
      return BasisImpl::heads_per_group(basis_policy, num_kv_heads());
    else
      return 1;
  }
  int num_groups() const { return num_kv_heads() / heads_per_group(); }
  /// Number of lists of compressed rows. List h holds the keys and values of head h. With joint
  /// values, list h holds only keys, and list num_kv_heads + g the values of group g.
  int num_lists() const { return num_kv_heads() + (joins ? num_groups() : 0); }
  int value_list(int head) const {
    return joins ? num_kv_heads() + head / heads_per_group() : head;
  }
  int list_of(int head, Part part) const { return part == Part::key ? head : value_list(head); }
  const typename Impl<Quantizer, Cpu>::Layout& code_layout(int head, Part part) const {
    return compressed.layout(list_of(head, part)).of(part);
  }
  Sequence& sequence(int slot) { return slots[static_cast<std::size_t>(slot)]; }
  const Sequence& sequence(int slot) const { return slots[static_cast<std::size_t>(slot)]; }
  /// @brief Position of the tail's first row. If the tail is empty, this is the position of the
  /// prompt chunk's first row, or of the next token.
  std::int64_t first_tail_position(int slot) const {
    const SequenceLengths& lengths = table.lengths(slot);
    return lengths.num_tokens - lengths.tail_length - sequence(slot).chunk.size();
  }
  /// @brief Rows between two publications: config.publish_interval, or enough rows to outweigh an
  /// epoch's own bytes.
  std::int64_t publish_interval() const {
    if (config.publish_interval > 0) return config.publish_interval;
    int rank = 1;
    for (const HeadBasis& head : calibrated.heads)
      rank = (std::max)({rank, head.key_rank, head.value_rank});
    return 4 * std::int64_t{rank};
  }
  /// @brief Bytes of `rows` compressed rows over all KV heads.
  std::size_t compressed_bytes(std::int64_t rows) const {
    std::size_t bytes = 0;
    for (int list = 0; list < num_lists(); ++list) bytes += compressed.layout(list).bytes(rows);
    return bytes;
  }

  /// @brief Number of queries at the end of a prompt that the updater or the token policy needs to
  /// score its rows.
  int scoring_window() const {
    int window = 0;
    if (UpdaterImpl::adapts && TokenImpl::compresses &&
        UpdaterImpl::prompt_selection(updater).share < 1.0F)
      window = UpdaterImpl::prompt_selection(updater).scores.window;
    if constexpr (wants(TokenImpl::evidence, Evidence::attention))
      window = (std::max)(window, TokenImpl::attention_scores(token_policy).window);
    return window;
  }

  const RowRuns& runs(int slot, int head) const {
    return sequence(slot).runs[static_cast<std::size_t>(head)];
  }
  RowRuns& runs(int slot, int head) { return sequence(slot).runs[static_cast<std::size_t>(head)]; }
  HeadResiduals& residuals(int slot, int head) {
    return sequence(slot).residuals[static_cast<std::size_t>(head)];
  }
  HeadScores& accumulated(int slot, int head) {
    return sequence(slot).accumulated[static_cast<std::size_t>(head)];
  }

  std::span<Segment> used_segments(int slot, int head) {
    return table.segments(slot, head)
        .first(static_cast<std::size_t>(table.lengths(slot).num_segments));
  }
  std::span<const Segment> used_segments(int slot, int head) const {
    return table.segments(slot, head)
        .first(static_cast<std::size_t>(table.lengths(slot).num_segments));
  }
};

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
