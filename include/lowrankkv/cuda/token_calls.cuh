// SPDX-License-Identifier: Apache-2.0
/// @file cuda/token_calls.cuh  The calls of a cache that are about which tokens a sequence has, and where they stand.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/prompt_calls.cuh"
#include "lowrankkv/cuda/remove_tokens.cuh"
#include "lowrankkv/cuda/sequence_ops.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief The calls of CompressedKVCache<Cuda, ...> that remove tokens or move them.
template <class Basis, class Updater, class TokenPolicy, class Quantizer, class EpochPolicy>
class TokenCalls : public PromptCalls<Basis, Updater, TokenPolicy, Quantizer, EpochPolicy> {
 public:  // CompressedKVCache inherits it privately
  using Base = PromptCalls<Basis, Updater, TokenPolicy, Quantizer, EpochPolicy>;
  using Base::Base;
  using Base::layer_;
  using Base::policies_;
  using Base::sequences_;
  using typename Base::Rows;

  /// @brief A sequence may have at most so many tokens from now on, no more than config.max_tokens; copies of it too. The host's alone. @throws CapacityError beyond that, or if it has more
  void limit(SequenceId seq, std::int64_t max_tokens) {
    const int slot = sequences_.find(seq);
    sequences_.limit(slot, max_tokens, this->tokens_of(slot));
  }
  /// @brief Raises what limit() would raise for these arguments.
  void check_limit(SequenceId seq, std::int64_t max_tokens) const { sequences_.check_limit(max_tokens, this->tokens_of(sequences_.find(seq))); }
  /// @brief Tokens that a sequence may have.
  std::int64_t max_tokens(SequenceId seq) const { return sequences_.max_tokens(sequences_.find(seq)); }

  /// @brief The shortest length that truncate() reaches exactly.
  std::int64_t rollback_limit(SequenceId seq) const {
    const HostSequence& now = layer_.sequence(this->idle_slot(seq));
    return now.num_tokens - now.tail_length;
  }
  /// @brief Forgets the tokens from `length` on. In the tail exact; deeper, stored rows go.
  /// @throws StateError deeper than the tail, but for 0, where values decided which rows stayed full (the host does not know how many go)
  TruncateResult truncate(SequenceId seq, std::int64_t length, cudaStream_t stream = nullptr) {
    Base::refuse_capture("truncate", stream);
    check_truncate(seq, length);
    return truncate_sequence(layer_, sequences_.find(seq), length, stream);
  }
  /// @brief Raises what truncate() would raise for these arguments.
  void check_truncate(SequenceId seq, std::int64_t length) const { check_truncation(layer_.sequence(this->idle_slot(seq)), length, Rows::choice != RowChoice::none); }

  /// @brief Removes the tokens [first, first + count). Those behind them take their places, so that the sequence has fewer tokens, but keep their rotary positions, as tokens to come do: shift_positions()
  /// may close the gap where keys are stored unrotated. What bases learnt stays. Up to five launches and one for every page that forks share; waits for nothing; replayed steps see it.
  /// @throws ShapeError beyond the sequence, CapacityError if forks share pages and the pool lacks others; StateError before the tail where values decided which rows stayed full, or where fewer
  /// tokens would be left than the policy keeps at full rank, compressed ones among them (the host would not know which are which)
  void remove(SequenceId seq, std::int64_t first, std::int64_t count, cudaStream_t stream = nullptr) {
    Base::refuse_capture("remove", stream);
    layer_.pool().allocator().require(pages_to_remove(seq, first, count));
    remove_tokens(layer_, sequences_.find(seq), first, count, stream);
  }
  /// @brief Upper bound of the pages that remove() takes; raises what else it would raise.
  std::int64_t pages_to_remove(SequenceId seq, std::int64_t first, std::int64_t count) const {
    const int slot = this->idle_slot(seq);
    const HostSequence& now = layer_.sequence(slot);
    check_removal(layer_, now, first, count, Rows::choice != RowChoice::none);
    const RemovedRows rows = RemovedRows::of(now, first, count);
    const std::int64_t full = now.rows.num_full - rows.count(RowList::full), stored = now.num_tokens - now.tail_length - (count - (rows.tail_end - rows.tail_begin));
    if (stored > full && pinned_rows(policies_.token_policy, stored, 1) > 0) {
      ::lowrankkv::detail::fail<StateError>("remove: ", stored, " stored tokens would be left, ", full, " of them at full rank, where the next would be kept so too; all, or none such, expected on this backend");
    }
    PageDemand demand;
    demand_removal(layer_, slot, rows, demand);
    return demand.total();
  }

  /// @brief Rotary position of a token, or of the next one (token = num_tokens): its index, unless positions were shifted. Queries of a token must arrive rotated to it.
  std::int64_t position(SequenceId seq, std::int64_t token) const {
    const int slot = sequences_.find(seq);
    if (token < 0 || token > this->tokens_of(slot)) ::lowrankkv::detail::fail<ShapeError>("position: token ", token, ", sequence has ", this->tokens_of(slot), " tokens");
    return layer_.sequence(slot).shifts.position(token);
  }
  /// @brief Moves the tokens from `first` on, those to come included, by `delta` positions; two calls move a range. Touches no stored row: needs keys that are stored unrotated (config.rope).
  /// 24 bytes a piece, counted. One launch; waits for nothing; replayed steps see it.
  /// @throws StateError if keys are stored rotated, ShapeError beyond the sequence, ValueError if positions could leave +-2^30, CapacityError beyond 32 pieces
  void shift_positions(SequenceId seq, std::int64_t first, std::int64_t delta, cudaStream_t stream = nullptr) {
    Base::refuse_capture("shift_positions", stream);
    const int slot = this->idle_slot(seq);
    layer_.rotary().write_shifts(slot, layer_.sequence(slot).shifts = shifted(layer_, slot, first, delta), stream);
  }
  /// @brief Raises what shift_positions() would raise for these arguments.
  void check_shift_positions(SequenceId seq, std::int64_t first, std::int64_t delta) const { static_cast<void>(shifted(layer_, this->idle_slot(seq), first, delta)); }
  /// @brief Divides the positions of tokens [first, first + count) by `divisor`, rounded down: several tokens share one. Else as shift_positions().
  /// @throws StateError if keys are stored rotated, ShapeError beyond the sequence, ValueError unless divisors are 1 to 2^20 in all, CapacityError beyond 32 pieces
  void divide_positions(SequenceId seq, std::int64_t first, std::int64_t count, std::int64_t divisor, cudaStream_t stream = nullptr) {
    Base::refuse_capture("divide_positions", stream);
    const int slot = this->idle_slot(seq);
    layer_.rotary().write_shifts(slot, layer_.sequence(slot).shifts = divided(layer_, slot, first, count, divisor), stream);
  }
  /// @brief Raises what divide_positions() would raise for these arguments.
  void check_divide_positions(SequenceId seq, std::int64_t first, std::int64_t count, std::int64_t divisor) const { static_cast<void>(divided(layer_, this->idle_slot(seq), first, count, divisor)); }
  /// @brief The shifts of a sequence, valid until it changes.
  const PositionShifts& position_shifts(SequenceId seq) const { return layer_.sequence(sequences_.find(seq)).shifts; }
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
