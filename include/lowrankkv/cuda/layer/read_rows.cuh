// SPDX-License-Identifier: Apache-2.0
/// @file cuda/layer/read_rows.cuh  How many rows heads have of their lists, where values said so:
/// the host asks the device.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lowrankkv/cuda/layer/layer_state.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief The host learns how many rows heads of some sequences have of the lists, and waits for
/// that.
inline void read_rows(LayerState& layer, std::span<const std::int32_t> slots, cudaStream_t stream) {
  const auto [first, last] = std::minmax_element(slots.begin(), slots.end());
  const std::ptrdiff_t heads = layer.tables().num_heads;
  std::vector<HeadRows> rows(
      static_cast<std::size_t>((*last + 1 - *first) * heads));  // those between them too: one copy
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
