// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cut_rows.cuh  Where a position cuts the lists of every head. Counts say so, unless values chose among the rows: then positions are read from the device.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/cuda/layer.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Rows of every head's lists that stand before a position, which is not in the tail. @param chosen  values decided which rows are stored how: waits for the stream, for the device if that is null
inline std::vector<HeadRows> rows_below(const LayerState& layer, int slot, std::int64_t position, bool chosen, cudaStream_t stream) {
  const Tables& tables = layer.tables();
  const HostSequence& now = layer.sequence(slot);
  const std::size_t heads = static_cast<std::size_t>(tables.num_heads);
  std::vector<HeadRows> below(heads);
  for (std::size_t head = 0; head < heads; ++head) below[head] = now.rows_of(static_cast<int>(head));
  if (position >= now.first_tail()) return below;
  if (!chosen) {  // full rows are the first tokens, compressed ones follow; others were dropped
    for (HeadRows& rows : below) {
      rows.num_full = static_cast<std::int32_t>((std::min)(position, std::int64_t{rows.num_full}));
      rows.num_compressed = (std::min)(static_cast<std::int32_t>(position) - rows.num_full, rows.num_compressed);
    }
    return below;
  }
  if (stream == nullptr) check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // whatever stream its calls are on
  const auto count_listed = [&](RowList list, std::int32_t HeadRows::*count) {  // positions ascend
    const int which = static_cast<int>(list);
    const std::size_t most = static_cast<std::size_t>(now.num_rows(list)), pitch = static_cast<std::size_t>(tables.max_rows[which]) * sizeof(std::int32_t);
    if (most == 0) return;
    std::vector<std::int32_t> positions(heads * most);
    for (std::size_t head = 0; head < heads; ++head) {
      const std::uint8_t* own = reinterpret_cast<const std::uint8_t*>(tables.positions[which]) + (static_cast<std::size_t>(slot) * heads + head) * pitch;
      check(cudaMemcpyAsync(positions.data() + head * most, own, static_cast<std::size_t>(below[head].*count) * sizeof(std::int32_t), cudaMemcpyDeviceToHost, stream), "positions");
    }
    check(cudaStreamSynchronize(stream), "positions");
    for (std::size_t head = 0; head < heads; ++head) {
      const auto begin = positions.begin() + static_cast<std::ptrdiff_t>(head * most);
      below[head].*count = static_cast<std::int32_t>(std::lower_bound(begin, begin + below[head].*count, position) - begin);
    }
  };
  count_listed(RowList::full, &HeadRows::num_full);
  if (tables.positions[1] != nullptr) {
    count_listed(RowList::compressed, &HeadRows::num_compressed);
  } else {  // nothing was dropped
    for (HeadRows& rows : below) rows.num_compressed = (std::min)(rows.num_compressed, static_cast<std::int32_t>(position) - rows.num_full);
  }
  return below;
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
