// SPDX-License-Identifier: Apache-2.0
/// @file cuda/sequence/fork.cuh  Forks a sequence. Pages are copied on write
/// (LayerState::own_pages).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/cuda/layer/layer_state.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Makes the empty slot `target` a copy of slot `source`. Pages are shared; tail, tables and
/// the sequence's own epochs are copied.
template <class = void>
void fork_sequence(LayerState& layer, int source, int target, cudaStream_t stream) {
  HostSequence copy_of_host = layer.sequence(source);
  HostSequence& to = layer.sequence(target);
  to = std::move(copy_of_host);
  for (const auto& list : to.pages) {
    for (const auto& pages : list) {
      for (const std::int32_t page : pages) layer.pool().allocator().share(page);
    }
  }
  const LayerEdit& tables = layer.tables();
  const auto copy = [&](auto* base, std::size_t per_slot) {
    if (base == nullptr || per_slot == 0) return;
    check(cudaMemcpyAsync(base + static_cast<std::size_t>(target) * per_slot,
                          base + static_cast<std::size_t>(source) * per_slot,
                          per_slot * sizeof(*base), cudaMemcpyDeviceToDevice, stream),
          "fork");
  };
  const std::size_t heads = static_cast<std::size_t>(tables.num_heads);
  for (int list = 0; list < 2; ++list) {
    copy(tables.pages[list], static_cast<std::size_t>(tables.num_lists) *
                                 static_cast<std::size_t>(tables.max_pages[list]));
    copy(tables.positions[list], heads * static_cast<std::size_t>(tables.max_rows[list]));
    copy(tables.residuals[list], heads * static_cast<std::size_t>(tables.max_rows[list]));
    copy(tables.accumulated_scores[list], heads * static_cast<std::size_t>(tables.max_rows[list]));
  }
  copy(tables.largest_values, heads);
  copy(tables.tail_scores, heads * static_cast<std::size_t>(tables.ring_rows()));
  copy(tables.lengths, 1);  // for tail_first, where the ring of the tail begins
  copy(tables.tails, layer.tail_bytes());
  layer.rotary().write_shifts(target, to.shifts, stream);
  layer.epochs().fork(to.epochs, source, target, stream);
  if (const DeviceEpochStore& device_epochs = layer.device_epochs(); device_epochs.used()) {
    const auto clone = [&](void* into, const void* from, std::size_t bytes) {
      check(cudaMemcpyAsync(into, from, bytes, cudaMemcpyDeviceToDevice, stream), "fork");
    };
    const EpochStore& epochs = layer.epochs();
    clone(epochs.all_own(target), epochs.all_own(source), epochs.all_own_size());
    clone(epochs.bases_of(target), epochs.bases_of(source), epochs.bases_size());
    clone(device_epochs.rows_of(target), device_epochs.rows_of(source),
          device_epochs.sketch_bytes());
    clone(device_epochs.states_of(target), device_epochs.states_of(source),
          device_epochs.state_bytes());
    fork_device_epochs_kernel<><<<1, 128, 0, stream>>>(
        tables, source, target, device_epochs.limits(), device_epochs.states());
    check(cudaGetLastError(), "fork_device_epochs_kernel");
  }
  layer.write_lengths(target, to.epochs.segments, layer.device_epochs().used(), stream);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
