// SPDX-License-Identifier: Apache-2.0
/// @file cuda/layer/row_states.cuh  States of a sequence's rows, and the pages that rows take.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lowrankkv/core/descriptors.hpp"
#include "lowrankkv/cuda/layer/layer_state.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief States of positions [first, first + states.size()) of a KV head. Waits for the stream.
/// @param tokens  tokens of the sequence; positions after the tail are staged prompt rows, which
/// are full
/// @throws ShapeError beyond the heads or the sequence
inline void read_row_states(const LayerState& layer, int slot, std::int64_t tokens, int kv_head,
                            std::int64_t first, std::span<RowState> states, cudaStream_t stream) {
  using ::lowrankkv::detail::fail;
  const LayerEdit& tables = layer.tables();
  const HostSequence& now = layer.sequence(slot);
  const std::int64_t count = static_cast<std::int64_t>(states.size()),
                     first_tail = now.first_tail();
  if (kv_head < 0 || kv_head >= tables.num_heads)
    fail<ShapeError>("row_states: kv_head ", kv_head, ", num_kv_heads ", tables.num_heads);
  if (first < 0 || first > tokens || count > tokens - first)
    fail<ShapeError>("row_states: ", count, " positions from ", first, " on, sequence has ", tokens,
                     " tokens");
  std::vector<RowState> all(static_cast<std::size_t>(first_tail), RowState::dropped);
  std::vector<std::int32_t> positions;
  const auto mark = [&](RowList list, RowState state) {  // from explicit positions
    positions.resize(static_cast<std::size_t>(now.num_rows(list, kv_head)));
    const std::int32_t* from =
        tables.positions[static_cast<int>(list)] +
        static_cast<std::size_t>(slot * tables.num_heads + kv_head) *
            static_cast<std::size_t>(tables.max_rows[static_cast<int>(list)]);
    check(cudaMemcpyAsync(positions.data(), from, positions.size() * sizeof(std::int32_t),
                          cudaMemcpyDeviceToHost, stream),
          "positions");
    check(cudaStreamSynchronize(stream), "positions");
    for (const std::int32_t position : positions) all[static_cast<std::size_t>(position)] = state;
  };
  const bool full_listed = tables.positions[0] != nullptr,
             compressed_listed = tables.positions[1] != nullptr;
  // As in detail::position_of(): without explicit positions, full rows are the first tokens and
  // compressed rows take the remaining positions in order.
  const HeadRows rows = now.rows_of(kv_head);
  if (!compressed_listed && rows.num_compressed > 0)
    std::fill_n(all.begin(),
                (std::min)(first_tail, std::int64_t{rows.num_full} + rows.num_compressed),
                RowState::compressed);
  if (full_listed)
    mark(RowList::full, RowState::full);
  else
    std::fill_n(all.begin(), rows.num_full, RowState::full);
  if (compressed_listed) mark(RowList::compressed, RowState::compressed);
  for (std::int64_t i = 0; i < count; ++i)
    states[static_cast<std::size_t>(i)] =
        first + i < first_tail ? all[static_cast<std::size_t>(first + i)] : RowState::full;
}

/// @brief Tokens that fit in a page of a compressed list, or of a full list if nothing is
/// compressed.
inline int tokens_per_page(const LayerState& layer, int list) {
  const HeadTiles& tiles =
      layer.layout(layer.tiles().compressed.empty() ? RowList::full : RowList::compressed, list);
  return tiles.rows * tiles.tiles_per_page;
}

/// @brief Bytes of the pages that `tokens` tokens take in all lists: compressed, or full if nothing
/// is compressed.
inline std::size_t bytes_for(const LayerState& layer, std::int64_t tokens) {
  const RowList list = layer.tiles().compressed.empty() ? RowList::full : RowList::compressed;
  std::int64_t pages = 0;
  for (int index = 0; index < layer.num_lists(list); ++index)
    pages += layer.pages_for(list, index, tokens);
  return static_cast<std::size_t>(pages) * layer.pool().page_bytes();
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
