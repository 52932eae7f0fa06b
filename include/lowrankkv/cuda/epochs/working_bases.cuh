// SPDX-License-Identifier: Apache-2.0
/// @file cuda/epochs/working_bases.cuh  Working bases of sequences, and the kernel that publishes
/// them as maps of epochs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lowrankkv/cuda/runtime/forms.cuh"
#include "lowrankkv/cuda/state/layer_view.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief The working bases of all sequences, of `type`. The columns of a basis U are stored one
/// after the other.
struct WorkingBases {
  void* moved = nullptr;        ///< [slots, heads, 2, most, head_dim]
  const void* start = nullptr;  ///< [heads, 2, most, head_dim]: the bases before they move
  std::int32_t most = 0;        ///< largest rank
  DType type = DType::f16;

  /// @brief Index of an element of a slot's basis `which` (2 head + part).
  __device__ std::size_t place(int slot, int heads, int which, int column, int channel,
                               int dim) const {
    return static_cast<std::size_t>(slot * heads * 2 + which) *
               static_cast<std::size_t>(most * dim) +
           static_cast<std::size_t>(column * dim + channel);
  }
  /// @brief Loads an element of a working basis as f32.
  __device__ float element(int slot, int heads, int which, int column, int channel, int dim) const {
    const std::size_t at = place(slot, heads, which, column, channel, dim);
    return type == DType::f32 ? static_cast<const float*>(moved)[at]
                              : from_bits(type, static_cast<const std::uint16_t*>(moved)[at]);
  }
  /// @brief Stores an element of a working basis.
  __device__ void put(int slot, int heads, int which, int column, int channel, int dim,
                      float value) const {
    const std::size_t at = place(slot, heads, which, column, channel, dim);
    if (type == DType::f32)
      static_cast<float*>(moved)[at] = value;
    else
      static_cast<std::uint16_t*>(moved)[at] = to_bits(type, value);
  }
};

/// @brief An updater's state of one basis between batches, where only the device knows how many
/// rows it saw. Of a sketch: the rows of the current chunk, and the rows that the sketch holds. Of
/// Oja's rule, which has no sketch: chunk_rows counts its steps on decoded rows.
struct SketchState {
  std::int64_t chunk_rows = 0;
  std::int32_t held = 0, padding = 0;
};

/// @brief The published epochs of a launch, by sequence, as indices in LayerView::maps; -1: none.
/// The host chose them, or, with device-managed epochs, they are in device memory.
struct PublishedEpochs {
  std::int32_t slots[kMaxBatch];
  std::int32_t taken[kMaxBatch];
  const std::int32_t* decided = nullptr;
  __device__ std::int32_t of(int sequence) const {
    return decided == nullptr ? taken[sequence] : decided[sequence];
  }
};

/// @brief Writes working bases to the maps of the epochs that sequences publish. Grid: 2 x heads x
/// sequences.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    publish_kernel(LayerView tables, WorkingBases bases, PublishedEpochs epochs) {
  const Part part = blockIdx.x == 0 ? Part::key : Part::value;
  const int head = static_cast<int>(blockIdx.y), slot = epochs.slots[blockIdx.z],
            epoch = epochs.of(static_cast<int>(blockIdx.z)), dim = tables.head_dim;
  if (epoch < 0) return;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const PartMaps& target = tables.maps[epoch * tables.num_heads + head].of(part);
  for (int column = warp; column < target.rank; column += kStoreThreads / 32) {
    float shift = 0.0F;
    for (int channel = lane; channel < dim; channel += 32) {
      const float value = target.encoder.put(
          column, channel, dim,
          bases.element(slot, tables.num_heads, 2 * head + static_cast<int>(part), column, channel,
                        dim));
      if (target.mean != nullptr) shift = fmaf(target.mean[channel], value, shift);
    }
    for (int distance = 16; distance > 0; distance /= 2)
      shift += __shfl_xor_sync(~0U, shift, distance);
    if (lane == 0) const_cast<float*>(target.offset)[column] = shift;
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
