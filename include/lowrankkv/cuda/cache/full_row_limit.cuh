// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache/full_row_limit.cuh  How many full rows a sequence may have.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/layer/layer.cuh"

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

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
