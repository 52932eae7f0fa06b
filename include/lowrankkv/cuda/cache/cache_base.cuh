// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache/cache_base.cuh  The base of CompressedKVCache<Cuda, ...>: its layer, memory
/// that layers share, and the calls that change a sequence's tokens and positions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lowrankkv/core/calls.hpp"
#include "lowrankkv/cuda/cache/checks.cuh"
#include "lowrankkv/cuda/cache/token_edits.cuh"
#include "lowrankkv/cuda/compress/flushed_rows.cuh"
#include "lowrankkv/cuda/layer/layer.cuh"
#include "lowrankkv/cuda/sequence/remove_tokens.cuh"
#include "lowrankkv/cuda/sequence/truncate_shift.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief A cache's layer, and the calls that only count, remove and move tokens.
/// CompressedKVCache<Cuda, ...> is the public class.
template <class Set, class Basis, class Updater, class TokenPolicy, class Quantizer,
          class EpochPolicy>
class CacheBase {
 public:  // CompressedKVCache inherits it privately
  using Layer = cuda::Layer<Set, Basis, Updater, TokenPolicy, Quantizer, EpochPolicy>;
  using PolicySet = typename Layer::PolicySet;

  CacheBase(const CacheConfig& config, const LayerBasis& basis, const PolicySet& policies,
            std::shared_ptr<PagePool> pool, const LentMemory& workspace)
      : layer_(config, basis, policies, std::move(pool), workspace) {
    // Makes scratch memory for a flush of all sequences at once, so that flushes do not allocate.
    const std::int64_t scored = layer_.state.max_rows(layer_.state.tables().scored);
    flush_scratch(layer_, static_cast<std::size_t>(layer_.config.max_sequences), scored);
  }

  /// @brief Size of the pool that layers with these bases can ever need. Pages have
  /// config.page_bytes bytes, or, if that is 0, the size that wastes least over all layers.
  /// @throws as the constructor
  static PoolSize pool_size(const CacheConfig& config, std::span<const LayerBasis> bases,
                            const PolicySet& policies) {
    std::vector<LayerTiles> layers;
    for (const LayerBasis& basis : bases) {
      layers.push_back(
          Layer::tiles_of(Layer::checked(config, basis, policies, nullptr), basis, policies));
    }
    return pool_of(config, std::move(layers), Layer::most_rows(config, policies));
  }
  /// @brief Makes a workspace that layers share, for the layer that needs most. Allocates on the
  /// device.
  static LentMemory make_shared(const CacheConfig& config, std::span<const LayerBasis> bases,
                                const PolicySet& policies) {
    std::size_t bytes = 0;
    for (const LayerBasis& basis : bases) {
      const CacheConfig checked = Layer::checked(config, basis, policies, nullptr);
      bytes = (std::max)(bytes, Layer::decode_bytes(checked, basis, policies));
    }
    const auto memory = std::make_shared<DeviceArray<std::uint8_t>>(bytes);
    return {memory->data(), bytes, memory};
  }
  static std::size_t bytes_of(const LentMemory& shared) { return shared.bytes; }
  /// @brief Pages that max_sequences sequences of max_tokens tokens can ever need, for a caller
  /// that makes the pool.
  static std::int64_t num_pages(const CacheConfig& config, const LayerBasis& basis,
                                const PolicySet& policies) {
    return pool_size(config, {&basis, 1}, policies).num_pages;
  }
  /// @brief Bytes of a page: config.page_bytes, or the default that 0 stands for.
  static std::size_t page_bytes(const CacheConfig& config, const LayerBasis& basis,
                                const PolicySet& policies) {
    return pool_size(config, {&basis, 1}, policies).page_bytes;
  }

  /// @brief Limits a sequence, and later forks of it, to `max_tokens` tokens. Host only.
  /// @throws CapacityError beyond config.max_tokens, or if the sequence has more tokens
  void limit(SequenceId seq, std::int64_t max_tokens) {
    const int slot = layer_.sequences.find(seq);
    layer_.sequences.limit(slot, max_tokens, layer_.tokens_of(slot));
  }
  /// @brief Raises what limit() would raise for these arguments.
  void check_limit(SequenceId seq, std::int64_t max_tokens) const {
    layer_.sequences.check_limit(max_tokens, layer_.tokens_of(layer_.sequences.find(seq)));
  }
  /// @brief The most tokens that a sequence may have.
  std::int64_t max_tokens(SequenceId seq) const {
    return layer_.sequences.max_tokens(layer_.sequences.find(seq));
  }

  /// @brief The shortest length to which truncate() is exact: the first token of the tail.
  std::int64_t rollback_limit(SequenceId seq) const {
    return layer_.state.sequence(idle_slot(layer_, seq)).first_tail();
  }
  /// @brief Removes the tokens from `length` on. Exact inside the tail; deeper, stored rows are
  /// removed, while epochs and updater state still reflect them.
  ///
  /// Waits for the stream if values chose among the removed rows; else for nothing. The first
  /// removal of rows from a layer's scored lists (HeavyHitters) allocates device memory, which
  /// waits.
  /// @throws ShapeError beyond the sequence. If `length` is before the tail and not 0:
  /// CapacityError if a head kept so many early outliers that its full rows could outgrow their
  /// tables, or if rows of a scored list are in pages shared with forks and the pool lacks pages
  /// for the copies
  TruncateResult truncate(SequenceId seq, std::int64_t length, cudaStream_t stream = nullptr) {
    refuse_capture("truncate", stream);
    std::vector<HeadRows> kept = kept_below(layer_, seq, length, stream);
    return truncate_sequence(layer_.state, layer_.sequences.find(seq), length, std::move(kept),
                             stream);
  }
  /// @brief Raises what truncate() would raise for these arguments. Waits for the device if values
  /// chose among the rows that would be removed.
  void check_truncate(SequenceId seq, std::int64_t length) const {
    static_cast<void>(kept_below(layer_, seq, length, nullptr));
  }

  /// @brief Removes tokens [first, first + count). Later tokens move up: the sequence has fewer
  /// tokens.
  ///
  /// Later tokens, and tokens to come, keep their rotary positions. With pre-RoPE keys,
  /// shift_positions() can close the gap. What bases have learnt from the removed rows stays.
  ///
  /// Cost: about ten launches, two more per 32 MiB of rows that move, one per 32 heads if heads
  /// have different numbers of rows, and two per list and 400 pages shared with forks. Replayed
  /// steps see the change. Rows move through scratch memory, which may be allocated; that waits. So
  /// does the first removal of rows from a layer's scored lists (HeavyHitters), which allocates.
  /// Waits for the stream if values chose among rows that are removed or move; else for nothing.
  /// @throws ShapeError beyond the sequence; ValueError if positions could end too far from their
  /// tokens; CapacityError beyond 32 pieces of positions with pre-RoPE keys, or if pages are shared
  /// with forks and the pool lacks pages for the copies. If `first` is before the tail:
  /// CapacityError as truncate(); StateError if counts determine which rows are full, and fewer
  /// tokens would be left than the policy keeps full, compressed ones among them
  void remove(SequenceId seq, std::int64_t first, std::int64_t count,
              cudaStream_t stream = nullptr) {
    refuse_capture("remove", stream);
    const RemovedRows rows = removed_rows(layer_, seq, first, count, stream);
    const int slot = layer_.sequences.find(seq);
    PageDemand demand;
    demand_removal(layer_.state, slot, rows, demand);
    layer_.state.pool().allocator().require(demand.total());
    remove_tokens(layer_.state, slot, first, count, rows, stream);
  }
  /// @brief Upper bound of the pages that remove() takes. Raises what remove() would raise, except
  /// for missing pages. Allocates the scratch memory that remove() needs. Waits for the device if
  /// values chose among rows that would be removed or move.
  std::int64_t pages_to_remove(SequenceId seq, std::int64_t first, std::int64_t count) const {
    const RemovedRows rows = removed_rows(layer_, seq, first, count, nullptr);
    PageDemand demand;
    demand_removal(layer_.state, layer_.sequences.find(seq), rows, demand);
    return demand.total();
  }

  /// @brief Rotary position of a token, or of the next token (token = num_tokens): its index,
  /// unless positions were shifted. The engine must rotate a token's queries to this position.
  std::int64_t position(SequenceId seq, std::int64_t token) const {
    const int slot = layer_.sequences.find(seq);
    const std::int64_t tokens = layer_.tokens_of(slot);
    if (token < 0 || token > tokens) {
      ::lowrankkv::detail::fail<ShapeError>("position: token ", token, ", sequence has ", tokens,
                                            " tokens");
    }
    return layer_.state.sequence(slot).shifts.position(token);
  }
  /// @brief Moves the tokens from `first` on, including those to come, by `delta` positions. Two
  /// calls move a range.
  ///
  /// Needs pre-RoPE keys (config.rope); no stored row changes. Cost: 24 bytes per piece, counted by
  /// memory(); one launch; waits for nothing. Replayed steps see the change.
  /// @throws StateError with post-RoPE keys, ShapeError beyond the sequence, ValueError if
  /// positions could leave +-2^30, CapacityError beyond 32 pieces
  void shift_positions(SequenceId seq, std::int64_t first, std::int64_t delta,
                       cudaStream_t stream = nullptr) {
    refuse_capture("shift_positions", stream);
    const int slot = idle_slot(layer_, seq);
    set_shifts(slot, shifted(layer_.state, slot, first, delta), stream);
  }
  /// @brief Raises what shift_positions() would raise for these arguments.
  void check_shift_positions(SequenceId seq, std::int64_t first, std::int64_t delta) const {
    static_cast<void>(shifted(layer_.state, idle_slot(layer_, seq), first, delta));
  }
  /// @brief Divides the positions of tokens [first, first + count) by `divisor`, rounded down, so
  /// that several tokens share a position. Otherwise as shift_positions().
  /// @throws StateError with post-RoPE keys, ShapeError beyond the sequence, ValueError unless the
  /// product of a token's divisors is in [1, 2^20], CapacityError beyond 32 pieces
  void divide_positions(SequenceId seq, std::int64_t first, std::int64_t count,
                        std::int64_t divisor, cudaStream_t stream = nullptr) {
    refuse_capture("divide_positions", stream);
    const int slot = idle_slot(layer_, seq);
    set_shifts(slot, divided(layer_.state, slot, first, count, divisor), stream);
  }
  /// @brief Raises what divide_positions() would raise for these arguments.
  void check_divide_positions(SequenceId seq, std::int64_t first, std::int64_t count,
                              std::int64_t divisor) const {
    static_cast<void>(divided(layer_.state, idle_slot(layer_, seq), first, count, divisor));
  }
  /// @brief The position shifts of a sequence. The reference is valid until the sequence changes.
  const PositionShifts& position_shifts(SequenceId seq) const {
    return layer_.state.sequence(layer_.sequences.find(seq)).shifts;
  }

  Layer layer_;

 private:
  void set_shifts(int slot, PositionShifts shifts, cudaStream_t stream) {
    PositionShifts& own = layer_.state.sequence(slot).shifts;
    own = std::move(shifts);
    layer_.state.rotary().write_shifts(slot, own, stream);
  }
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
