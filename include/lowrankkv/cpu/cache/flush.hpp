// SPDX-License-Identifier: Apache-2.0
/// @file cpu/cache/flush.hpp  When a tail is flushed, and how many pages flushes and prompts can
/// need.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lowrankkv/core/page_allocator.hpp"
#include "lowrankkv/cpu/compress.hpp"
#include "lowrankkv/cpu/layer.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Whether the tail is longer than recent + flush_interval rows, after `added` more rows.
template <class Layer>
bool flush_due(const Layer& layer, int slot, std::int64_t added = 0) {
  return layer.table.lengths(slot).tail_length + added >
         std::int64_t{layer.recent()} + layer.config.flush_interval;
}
/// @brief The rows of `count` that leave the tail: as many as end a group of the quantizer's, if
/// it codes rows in groups; 0 if they end none. Lists of equal lengths in all heads stay in step;
/// of others the first head's counts.
template <class Layer>
std::int64_t whole_groups(const Layer& layer, int slot, std::int64_t count) {
  if constexpr (Layer::TokenImpl::compresses &&
                groups_rows<typename Layer::QuantizerPolicy, Cpu>()) {
    const std::int64_t have = layer.compressed.size(slot, 0);
    const std::int64_t end = have + count;
    return (std::max)(std::int64_t{0}, end - end % rows_together<Cpu>(layer.quantizer) - have);
  }
  return count;
}
/// @brief Compresses flush_interval rows of the tail at a time, as long as a flush is due.
template <class Layer>
void flush(Layer& layer, int slot) {
  while (flush_due(layer, slot))
    compress_rows(layer, slot, whole_groups(layer, slot, layer.config.flush_interval),
                  Phase::decode);
}
/// @brief Adds to `demand` an upper bound of the pages needed until, after `added` more rows, only
/// the recent window is at full rank.
template <class Layer>
void demand_rows(const Layer& layer, int slot, std::int64_t added, Phase phase,
                 PageDemand& demand) {
  const std::int64_t rows = layer.table.lengths(slot).tail_length +
                            layer.sequence(slot).chunk.size() + added - layer.recent();
  if (rows > 0) demand_compress(layer, slot, rows, phase, demand);
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
