// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache/token_edits.cuh  Finds the rows that truncate() and remove() leave, and checks
/// that a sequence can continue with the rows that these calls or load() give it.
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

/// @brief The most full rows that a head may have when `stored` tokens have left the tail. If
/// errors choose, but not accumulated scores, heads may differ: then as many as leave room in the
/// tables for the full rows to come.
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

/// Checks that a sequence of `stored` tokens that have left the tail can continue with these rows
/// [heads]. @throws CapacityError
template <class Layer>
void check_left([[maybe_unused]] const Layer& layer, [[maybe_unused]] const char* call,
                [[maybe_unused]] const std::vector<HeadRows>& rows,
                [[maybe_unused]] std::int64_t stored) {
  if constexpr (Layer::Rows::by_errors && !Layer::Rows::accumulates_scores) {
    const std::int64_t most = most_full_rows(layer, stored);
    for (std::size_t head = 0; head < rows.size(); ++head) {
      if (rows[head].num_full <= most) continue;
      const std::int64_t room = layer.state.max_rows(RowList::full);
      ::lowrankkv::detail::fail<CapacityError>(
          call, ": head ", head, " would have ", rows[head].num_full, " full rows of ", stored,
          " tokens, and ", room - most, " may come: at most ", room, " in all");
    }
  }
}

}  // namespace detail

/// @brief Rows of every head [heads] that are left after truncation to `length` tokens. Raises what
/// truncate() raises. Waits for the stream (for the device, if it is null) if values chose among
/// rows that go.
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

/// @brief The rows of tokens [first, first + count). Raises what remove() raises, except for
/// missing pages. Waits for the stream (for the device, if it is null) if values chose among rows
/// that go or move.
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

/// @brief Checks that this cache's token policy can keep the rows of a saved state in which
/// `stored` tokens have left the tail. @throws FormatError
template <class Layer>
void check_saved_rows(const Layer& layer, const HeadRows& saved, std::int64_t stored) {
  const LayerState& state = layer.state;
  const auto check_kept = [&](const char* which, std::int64_t saved_rows, std::int64_t most_rows) {
    if (saved_rows <= most_rows) return;
    ::lowrankkv::detail::fail<FormatError>("saved state: ", saved_rows, " ", which, " rows of ",
                                           stored, ", this cache's token policy keeps at most ",
                                           most_rows);
  };
  // After tokens were removed, a scored list may have more rows than the policy keeps.
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
