// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache/token_edits.cuh  Which rows are left when truncate() or remove() takes tokens
/// from a sequence, and whether a sequence can go on with the rows that it is left with, or that
/// load() gives it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/cuda/cache/checks.cuh"
#include "lowrankkv/cuda/layer/layer.cuh"
#include "lowrankkv/cuda/sequence/remove_tokens.cuh"
#include "lowrankkv/cuda/sequence/truncate_shift.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Full rows that a head may have of `stored` tokens that have left the tail. Where errors
/// alone choose, heads may differ: so many that what is to come finds room in the tables.
template <class Layer>
std::int64_t most_full_rows(const Layer& layer, std::int64_t stored) {
  using Rows = typename Layer::Rows;
  const auto& policy = layer.policies.token_policy;
  if constexpr (Rows::by_errors && !Rows::accumulates_scores) {
    const RowCounts to_come =
        row_counts(policy, stored, layer.config.max_tokens - stored, Phase::decode);
    return layer.state.max_rows(RowList::full) - to_come.full;
  } else {
    return Layer::most_rows(policy, stored).full;
  }
}

namespace detail {

/// Raises unless heads that keep such rows of `stored` tokens can go on.
template <class Layer>
void check_left(const Layer& layer, const char* call, const std::vector<HeadRows>& rows,
                std::int64_t stored) {
  const std::int64_t most = most_full_rows(layer, stored);
  if (!Layer::Rows::by_errors || Layer::Rows::accumulates_scores) return;
  for (std::size_t head = 0; head < rows.size(); ++head) {
    if (rows[head].num_full <= most) continue;
    const std::int64_t room = layer.state.max_rows(RowList::full);
    ::lowrankkv::detail::fail<CapacityError>(
        call, ": head ", head, " would have ", rows[head].num_full, " full rows of ", stored,
        " tokens, and ", room - most, " may come: at most ", room, " in all");
  }
}

}  // namespace detail

/// @brief Rows of every head that are left of the first `length` tokens. Raises what truncate()
/// raises.
template <class Layer>
std::vector<HeadRows> kept_below(const Layer& layer, SequenceId seq, std::int64_t length,
                                 cudaStream_t stream) {
  const int slot = idle_slot(layer, seq);
  const HostSequence& now = layer.state.sequence(slot);
  if (length < 0 || length > now.num_tokens) {
    ::lowrankkv::detail::fail<ShapeError>("truncate: length ", length, ", sequence has ",
                                          now.num_tokens, " tokens");
  }
  const std::size_t heads = static_cast<std::size_t>(layer.state.tables().num_heads);
  if (length == 0) return std::vector<HeadRows>(heads);
  PageDemand demand;
  demand_truncation(layer.state, slot, length, demand);
  layer.state.pool().allocator().require(demand.total());
  std::vector<HeadRows> rows =
      RowCuts(layer.state, slot, length, Layer::Rows::chooses, stream).below(length);
  if (length < now.first_tail()) detail::check_left(layer, "truncate", rows, length);
  return rows;
}

/// @brief The rows that these tokens are. Raises what remove() raises, but for want of pages.
template <class Layer>
RemovedRows removed_rows(const Layer& layer, SequenceId seq, std::int64_t first, std::int64_t count,
                         cudaStream_t stream) {
  constexpr bool chooses = Layer::Rows::chooses;
  const int slot = idle_slot(layer, seq);
  const HostSequence& now = layer.state.sequence(slot);
  check_removal(layer.state, now, first, count);
  RemovedRows removed = RemovedRows::of(layer.state, slot, first, count, chooses, stream);
  const std::vector<HeadRows> left = removed.left(now);
  const std::int64_t of_tail = removed.tail_end - removed.tail_begin;
  const std::int64_t stored = now.first_tail() - (count - of_tail), full = left.front().num_full;
  if (!chooses && stored > full && pinned_rows(layer.policies.token_policy, stored, 1) > 0) {
    ::lowrankkv::detail::fail<StateError>("remove: ", stored, " stored tokens would be left, ",
                                          full,
                                          " of them at full rank, where the next would be kept so "
                                          "too; all, or none such, expected on this backend");
  }
  if (first < now.first_tail() && count > 0) detail::check_left(layer, "remove", left, stored);
  return removed;
}

/// @brief Raises unless this cache's token policy keeps as many rows of `stored` tokens as a saved
/// state has.
template <class Layer>
void check_saved_rows(const Layer& layer, const HeadRows& saved, std::int64_t stored) {
  const LayerState& state = layer.state;
  const auto check_kept = [&](const char* which, std::int64_t saved_rows, std::int64_t most_rows) {
    if (saved_rows <= most_rows) return;
    ::lowrankkv::detail::fail<FormatError>("saved state: ", saved_rows, " ", which, " rows of ",
                                           stored, ", this cache's token policy keeps at most ",
                                           most_rows);
  };
  // Of weighed rows more may be left than will be.
  const auto& policy = layer.policies.token_policy;
  const bool any_full = state.is_scored(RowList::full),
             any_compressed = state.is_scored(RowList::compressed);
  check_kept("full", saved.num_full,
             any_full ? state.max_rows(RowList::full) : most_full_rows(layer, stored));
  check_kept("compressed", saved.num_compressed,
             any_compressed ? state.max_rows(RowList::compressed)
                            : Layer::most_rows(policy, stored).compressed);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
