// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache/cache_base.cuh  Under CompressedKVCache<Cuda, ...>: its layer, what layers
/// share, and the calls that are about which tokens a sequence has and where they stand.
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

/// @brief A cache's layer, and those of its calls that only count and move tokens;
/// CompressedKVCache<Cuda, ...> is the public face.
template <class Basis, class Updater, class TokenPolicy, class Quantizer, class EpochPolicy>
class CacheBase {
 public:  // CompressedKVCache inherits it privately
  using Layer = cuda::Layer<Basis, Updater, TokenPolicy, Quantizer, EpochPolicy>;
  using PolicySet = typename Layer::PolicySet;

  CacheBase(const CacheConfig& config, const LayerBasis& basis, const PolicySet& policies,
            std::shared_ptr<PagePool> pool, const LentMemory& workspace)
      : layer_(config, basis, policies, std::move(pool), workspace) {
    // Flushes of all sequences at once find their scratch memory there.
    const std::int64_t scored = layer_.state.max_rows(layer_.state.tables().scored);
    flush_scratch(layer_, static_cast<std::size_t>(layer_.config.max_sequences), scored);
  }

  /// @brief The pool that layers with these bases can ever need: pages of config.page_bytes, or of
  /// the size that wastes least over all of them. @throws as the constructor
  static PoolSize pool_size(const CacheConfig& config, std::span<const LayerBasis> bases,
                            const PolicySet& policies) {
    std::vector<LayerTiles> layers;
    for (const LayerBasis& basis : bases) {
      layers.push_back(
          Layer::tiles_of(Layer::checked(config, basis, policies, nullptr), basis, policies));
    }
    return pool_of(config, std::move(layers), Layer::most_rows(config, policies));
  }
  /// @brief Makes what layers share besides pages: a workspace for the largest of them. Allocates
  /// on the device.
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
  /// @brief Pages that max_sequences of max_tokens can ever need, for a pool of one's own making.
  static std::int64_t num_pages(const CacheConfig& config, const LayerBasis& basis,
                                const PolicySet& policies) {
    return pool_size(config, {&basis, 1}, policies).num_pages;
  }
  /// @brief The page size that config.page_bytes = 0 stands for.
  static std::size_t page_bytes(const CacheConfig& config, const LayerBasis& basis,
                                const PolicySet& policies) {
    return pool_size(config, {&basis, 1}, policies).page_bytes;
  }

  /// @brief A sequence may have at most so many tokens from now on, no more than config.max_tokens;
  /// copies of it too. The host's alone. @throws CapacityError beyond that, or if it has more
  void limit(SequenceId seq, std::int64_t max_tokens) {
    const int slot = layer_.sequences.find(seq);
    layer_.sequences.limit(slot, max_tokens, layer_.tokens_of(slot));
  }
  /// @brief Raises what limit() would raise for these arguments.
  void check_limit(SequenceId seq, std::int64_t max_tokens) const {
    layer_.sequences.check_limit(max_tokens, layer_.tokens_of(layer_.sequences.find(seq)));
  }
  /// @brief Tokens that a sequence may have.
  std::int64_t max_tokens(SequenceId seq) const {
    return layer_.sequences.max_tokens(layer_.sequences.find(seq));
  }

  /// @brief The shortest length that truncate() reaches exactly.
  std::int64_t rollback_limit(SequenceId seq) const {
    return layer_.state.sequence(idle_slot(layer_, seq)).first_tail();
  }
  /// @brief Forgets the tokens from `length` on. In the tail exact; deeper, stored rows go: where
  /// values chose among them the stream is waited for, else nothing is.
  /// @throws ShapeError beyond the sequence; deeper than the tail, but for 0: CapacityError where a
  /// head's outliers were so early that its full rows could outgrow their tables, or, where rows
  /// stay by the attention that they have received, forks share pages and the pool lacks others
  TruncateResult truncate(SequenceId seq, std::int64_t length, cudaStream_t stream = nullptr) {
    refuse_capture("truncate", stream);
    std::vector<HeadRows> kept = kept_below(layer_, seq, length, stream);
    return truncate_sequence(layer_.state, layer_.sequences.find(seq), length, std::move(kept),
                             stream);
  }
  /// @brief Raises what truncate() would raise for these arguments. Waits for the device where
  /// values chose among the rows that would go.
  void check_truncate(SequenceId seq, std::int64_t length) const {
    static_cast<void>(kept_below(layer_, seq, length, nullptr));
  }

  /// @brief Removes the tokens [first, first + count). Those behind them take their places, so that
  /// the sequence has fewer tokens, but keep their rotary positions, as tokens to come do:
  /// shift_positions() may close the gap where keys are stored unrotated. What bases learnt stays.
  /// About ten launches, two more for every 32 MiB of rows that move, one for every 32 heads where
  /// they differ, and one for every page that forks share; replayed steps see it. Rows that move
  /// pass through scratch memory, which may be allocated, which waits. Waits for the stream where
  /// values chose among rows that go or move, else for nothing.
  /// @throws ShapeError beyond the sequence, CapacityError if forks share pages and the pool lacks
  /// others; before the tail CapacityError as of truncate(), StateError where counts say which rows
  /// are at full rank and fewer tokens would be left than the policy keeps so, compressed ones
  /// among them
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
  /// @brief Upper bound of the pages that remove() takes; raises what else it would raise, and
  /// allocates the scratch memory that it takes. Waits for the device where values chose among rows
  /// that go or move.
  std::int64_t pages_to_remove(SequenceId seq, std::int64_t first, std::int64_t count) const {
    const RemovedRows rows = removed_rows(layer_, seq, first, count, nullptr);
    PageDemand demand;
    demand_removal(layer_.state, layer_.sequences.find(seq), rows, demand);
    return demand.total();
  }

  /// @brief Rotary position of a token, or of the next one (token = num_tokens): its index, unless
  /// positions were shifted. Queries of a token must arrive rotated to it.
  std::int64_t position(SequenceId seq, std::int64_t token) const {
    const int slot = layer_.sequences.find(seq);
    const std::int64_t tokens = layer_.tokens_of(slot);
    if (token < 0 || token > tokens) {
      ::lowrankkv::detail::fail<ShapeError>("position: token ", token, ", sequence has ", tokens,
                                            " tokens");
    }
    return layer_.state.sequence(slot).shifts.position(token);
  }
  /// @brief Moves the tokens from `first` on, those to come included, by `delta` positions; two
  /// calls move a range. Touches no stored row: needs keys that are stored unrotated (config.rope).
  /// 24 bytes a piece, counted. One launch; waits for nothing; replayed steps see it.
  /// @throws StateError if keys are stored rotated, ShapeError beyond the sequence, ValueError if
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
  /// @brief Divides the positions of tokens [first, first + count) by `divisor`, rounded down:
  /// several tokens share one. Else as shift_positions().
  /// @throws StateError if keys are stored rotated, ShapeError beyond the sequence, ValueError
  /// unless divisors are 1 to 2^20 in all, CapacityError beyond 32 pieces
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
  /// @brief The shifts of a sequence, valid until it changes.
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
