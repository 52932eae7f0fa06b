// SPDX-License-Identifier: Apache-2.0
/// @file cuda/layer/read_rows.cuh  Reads row counts from the device where values determine them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lowrankkv/cuda/layer/layer_state.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Reads the row counts of all heads of these slots from the device. Waits for the stream.
inline void read_rows(LayerState& layer, std::span<const std::int32_t> slots, cudaStream_t stream) {
  const auto [first, last] = std::minmax_element(slots.begin(), slots.end());
  const std::ptrdiff_t heads = layer.tables().num_heads;
  // One copy of all slots from the first to the last.
  std::vector<HeadRows> rows(static_cast<std::size_t>((*last + 1 - *first) * heads));
  check(cudaMemcpyAsync(rows.data(), layer.tables().rows + *first * heads,
                        rows.size() * sizeof(HeadRows), cudaMemcpyDeviceToHost, stream),
        "rows");
  check(cudaStreamSynchronize(stream), "rows");
  for (const std::int32_t slot : slots) {
    const auto own = rows.begin() + (slot - *first) * heads;
    layer.sequence(slot).set_rows({own, own + heads});
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
