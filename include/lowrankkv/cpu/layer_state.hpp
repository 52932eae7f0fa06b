// SPDX-License-Identifier: Apache-2.0
/// @file cpu/layer_state.hpp  Everything the CPU backend stores for one attention layer, and where each row is.
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
#include "lowrankkv/core/statistics.hpp"
#include "lowrankkv/cpu/attention_block.hpp"
#include "lowrankkv/cpu/epoch_store.hpp"
#include "lowrankkv/cpu/paged_rows.hpp"
#include "lowrankkv/cpu/quantizer/no_quantizer.hpp"
#include "lowrankkv/cpu/tail_rows.hpp"
#include "lowrankkv/cpu/thread_pool.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief The updater's side of one (sequence, KV head).
template <class UpdaterState>
struct HeadAdaptation {
  UpdaterState key_state, value_state;
  StoredMatrix key_basis, value_basis;  ///< working bases [head_dim, rank] in epoch_type; empty: those of the current epoch
};

/// @brief One sequence of a layer.
template <class UpdaterState>
struct Slot {
  bool used = false;
  std::int32_t epoch = 0;  ///< new rows are written under it
  std::int64_t rows_since_publication = 0;
  PromptChunk chunk;       ///< rows of an unfinished prefill
  bool prompt_open = false;  ///< the prompt goes on in a later call
  std::vector<HeadAdaptation<UpdaterState>> adaptation;      ///< per KV head
  std::vector<std::int32_t> full_prefix;                     ///< per KV head: full rows at positions 0, 1, 2, ...
  std::vector<std::vector<std::int32_t>> full_positions;     ///< per KV head: positions of the full rows after these
};

/// @brief Where a position that left the tail is stored.
struct RowPlace {
  RowList list = RowList::full;
  std::int32_t row = 0;
};

/// @brief The stored state of one layer. Plain data: the steps of the algorithm are in cpu/layer.hpp and what it includes.
template <class BasisPolicy, class Updater, class TokenPolicy, class Quantizer, class EpochPolicy>
struct LayerState {
  using UpdaterImpl = Impl<Updater, Cpu>;
  using TokenImpl = Impl<TokenPolicy, Cpu>;
  using BasisImpl = Impl<BasisPolicy, Cpu>;
  using Sequence = Slot<typename UpdaterImpl::State>;
  using Epochs = EpochPolicy;

  CacheConfig config;
  BasisPolicy basis_policy;
  Updater updater;
  TokenPolicy token_policy;
  Quantizer quantizer;
  LayerBasis calibrated;  ///< kept in f32: what updaters start from; means and metrics of every epoch
  std::shared_ptr<PagePool> pool;
  std::shared_ptr<ThreadPool> threads;

  DescriptorTable table;
  PagedRows<NoQuantizer> full;
  PagedRows<Quantizer> compressed;
  TailRows tail;
  EpochStore epochs;
  std::vector<Sequence> slots;
  std::vector<AttentionWorkspace> workspaces;  ///< one per thread
  CacheStatistics statistics;

  int num_kv_heads() const { return config.shape.num_kv_heads; }
  int head_dim() const { return config.shape.head_dim; }
  int recent() const { return TokenImpl::recent(token_policy); }
  int key_rank(int head) const { return calibrated.heads[static_cast<std::size_t>(head)].key_rank; }
  int value_rank(int head) const { return calibrated.heads[static_cast<std::size_t>(head)].value_rank; }
  Sequence& sequence(int slot) { return slots[static_cast<std::size_t>(slot)]; }
  const Sequence& sequence(int slot) const { return slots[static_cast<std::size_t>(slot)]; }
  /// @brief Position of the first row of the tail (or, if it is empty, of the prompt chunk, or of the next token).
  std::int64_t first_tail_position(int slot) const {
    const SequenceLengths& lengths = table.lengths(slot);
    return lengths.num_tokens - lengths.tail_length - sequence(slot).chunk.size();
  }
  /// @brief Rows between two publications: enough to outweigh an epoch's own bytes.
  std::int64_t publish_interval() const {
    if (config.publish_interval > 0) return config.publish_interval;
    int rank = 1;
    for (const HeadBasis& head : calibrated.heads) rank = (std::max)({rank, head.key_rank, head.value_rank});
    return 4 * std::int64_t{rank};
  }
  /// @brief Bytes of one compressed row over all KV heads.
  std::size_t compressed_row_bytes() const {
    std::size_t bytes = 0;
    for (int head = 0; head < num_kv_heads(); ++head) bytes += compressed.layout(head).row_bytes();
    return bytes;
  }

  /// @brief Full rows of a head at positions below `position`.
  std::int32_t full_rows_before(int slot, int head, std::int64_t position) const {
    const Sequence& here = sequence(slot);
    const std::int32_t prefix = here.full_prefix[static_cast<std::size_t>(head)];
    if (position <= prefix) return static_cast<std::int32_t>(position);
    const std::vector<std::int32_t>& rest = here.full_positions[static_cast<std::size_t>(head)];
    return prefix + static_cast<std::int32_t>(std::lower_bound(rest.begin(), rest.end(), position) - rest.begin());
  }
  /// @brief Where the row of `position`, which must have left the tail, is stored.
  RowPlace locate(int slot, int head, std::int64_t position) const {
    const Sequence& here = sequence(slot);
    const std::int32_t before = full_rows_before(slot, head, position);
    const std::int32_t prefix = here.full_prefix[static_cast<std::size_t>(head)];
    const std::vector<std::int32_t>& rest = here.full_positions[static_cast<std::size_t>(head)];
    const bool listed = before >= prefix && before - prefix < static_cast<std::int32_t>(rest.size()) &&
                        rest[static_cast<std::size_t>(before - prefix)] == position;
    if (position < prefix || listed) return {RowList::full, before};
    return {RowList::compressed, static_cast<std::int32_t>(position) - before};
  }
  /// @brief Notes that the next full row of a head stands at `position`.
  void add_full_position(int slot, int head, std::int64_t position) {
    Sequence& here = sequence(slot);
    std::int32_t& prefix = here.full_prefix[static_cast<std::size_t>(head)];
    std::vector<std::int32_t>& rest = here.full_positions[static_cast<std::size_t>(head)];
    if (rest.empty() && position == prefix) {
      ++prefix;
    } else {
      rest.push_back(static_cast<std::int32_t>(position));
    }
  }

  /// @brief The fate of the `count` oldest rows of the tail and the prompt chunk, for one head.
  void classify(int slot, int head, std::int64_t count, Phase phase, std::vector<RowState>& states) const {
    states.assign(static_cast<std::size_t>(count), RowState::full);
    const RowBatch batch{head, first_tail_position(slot), count, phase};
    TokenImpl::classify(token_policy, batch, states);
  }

  std::span<Segment> used_segments(int slot, int head) {
    return table.segments(slot, head).first(static_cast<std::size_t>(table.lengths(slot).num_segments));
  }
  std::span<const Segment> used_segments(int slot, int head) const {
    return table.segments(slot, head).first(static_cast<std::size_t>(table.lengths(slot).num_segments));
  }
};

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
