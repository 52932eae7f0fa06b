// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache/token_edits.cuh  The calls of a cache that are about which tokens a sequence has, and where they stand.
#pragma once

#include <cstdint>
#include <vector>

#include "lowrankkv/cuda/cache/prefill.cuh"
#include "lowrankkv/cuda/sequence/remove_tokens.cuh"
#include "lowrankkv/cuda/sequence/truncate_shift.cuh"

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
  /// @brief Forgets the tokens from `length` on. In the tail exact; deeper, stored rows go: where values chose among them the stream is waited for, else nothing is.
  /// @throws ShapeError beyond the sequence; deeper than the tail, but for 0: CapacityError where a head's outliers were so early that its full rows could outgrow their tables, or, where rows stay by the attention that they have received, forks share pages and the pool lacks others
  TruncateResult truncate(SequenceId seq, std::int64_t length, cudaStream_t stream = nullptr) {
    Base::refuse_capture("truncate", stream);
    std::vector<HeadRows> kept = kept_below(seq, length, stream);
    return truncate_sequence(layer_, sequences_.find(seq), length, std::move(kept), stream);
  }
  /// @brief Raises what truncate() would raise for these arguments. Waits for the device where values chose among the rows that would go.
  void check_truncate(SequenceId seq, std::int64_t length) const { static_cast<void>(kept_below(seq, length, nullptr)); }

  /// @brief Removes the tokens [first, first + count). Those behind them take their places, so that the sequence has fewer tokens, but keep their rotary positions, as tokens to come do: shift_positions()
  /// may close the gap where keys are stored unrotated. What bases learnt stays. About ten launches, two more for every 32 MiB of rows that move, one for every 32 heads where they differ, and one for every page that forks share; replayed steps see it.
  /// Rows that move pass through scratch memory, which may be allocated, which waits. Waits for the stream where values chose among rows that go or move, else for nothing.
  /// @throws ShapeError beyond the sequence, CapacityError if forks share pages and the pool lacks others; before the tail CapacityError as of truncate(), StateError where counts
  /// say which rows are at full rank and fewer tokens would be left than the policy keeps so, compressed ones among them
  void remove(SequenceId seq, std::int64_t first, std::int64_t count, cudaStream_t stream = nullptr) {
    Base::refuse_capture("remove", stream);
    const RemovedRows rows = removed_rows(seq, first, count, stream);
    const int slot = sequences_.find(seq);
    PageDemand demand;
    demand_removal(layer_, slot, rows, demand);
    layer_.pool().allocator().require(demand.total());
    remove_tokens(layer_, slot, first, count, rows, stream);
  }
  /// @brief Upper bound of the pages that remove() takes; raises what else it would raise, and allocates the scratch memory that it takes. Waits for the device where values chose among rows that go or move.
  std::int64_t pages_to_remove(SequenceId seq, std::int64_t first, std::int64_t count) const {
    PageDemand demand;
    demand_removal(layer_, this->idle_slot(seq), removed_rows(seq, first, count, nullptr), demand);
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

  /// Full rows that a head may have of `stored` tokens that have left the tail. Where errors alone choose, heads may differ: so many that what is to come finds room in the tables.
  std::int64_t most_full_rows(std::int64_t stored) const {
    if constexpr (Rows::by_errors && !Rows::keeps_masses) return layer_.max_rows(RowList::full) - row_counts(policies_.token_policy, stored, this->config_.max_tokens - stored, Phase::decode).full;
    else return Base::most_rows(policies_.token_policy, stored).full;
  }

 private:
  /// Raises unless heads that keep such rows of `stored` tokens can go on.
  void check_left(const char* call, const std::vector<HeadRows>& rows, std::int64_t stored) const {
    using ::lowrankkv::detail::fail;
    const std::int64_t most = most_full_rows(stored);
    for (std::size_t head = 0; head < rows.size(); ++head) {
      if (Rows::by_errors && !Rows::keeps_masses && rows[head].num_full > most) {
        const std::int64_t room = layer_.max_rows(RowList::full);
        fail<CapacityError>(call, ": head ", head, " would have ", rows[head].num_full, " full rows of ", stored, " tokens, and ", room - most, " may come: at most ", room, " in all");
      }
    }
  }
  /// Rows of every head that are left of the first `length` tokens. Raises what truncate() raises.
  std::vector<HeadRows> kept_below(SequenceId seq, std::int64_t length, cudaStream_t stream) const {
    const int slot = this->idle_slot(seq);
    const HostSequence& now = layer_.sequence(slot);
    if (length < 0 || length > now.num_tokens) ::lowrankkv::detail::fail<ShapeError>("truncate: length ", length, ", sequence has ", now.num_tokens, " tokens");
    if (length == 0) return std::vector<HeadRows>(static_cast<std::size_t>(layer_.tables().num_heads));
    PageDemand demand;
    demand_truncation(layer_, slot, length, demand);
    layer_.pool().allocator().require(demand.total());
    std::vector<HeadRows> rows = RowCuts(layer_, slot, length, Rows::chooses, stream).below(length);
    if (length < now.first_tail()) check_left("truncate", rows, length);
    return rows;
  }
  /// The rows that these tokens are. Raises what remove() raises, but for want of pages.
  RemovedRows removed_rows(SequenceId seq, std::int64_t first, std::int64_t count, cudaStream_t stream) const {
    const int slot = this->idle_slot(seq);
    const HostSequence& now = layer_.sequence(slot);
    check_removal(layer_, now, first, count);
    RemovedRows removed = RemovedRows::of(layer_, slot, first, count, Rows::chooses, stream);
    const std::vector<HeadRows> left = removed.left(now);
    const std::int64_t stored = now.first_tail() - (count - (removed.tail_end - removed.tail_begin)), full = left.front().num_full;
    if (!Rows::chooses && stored > full && pinned_rows(policies_.token_policy, stored, 1) > 0) {
      ::lowrankkv::detail::fail<StateError>("remove: ", stored, " stored tokens would be left, ", full, " of them at full rank, where the next would be kept so too; all, or none such, expected on this backend");
    }
    if (first < now.first_tail() && count > 0) check_left("remove", left, stored);
    return removed;
  }
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
