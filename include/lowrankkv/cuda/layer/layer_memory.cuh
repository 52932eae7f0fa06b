// SPDX-License-Identifier: Apache-2.0
/// @file cuda/layer/layer_memory.cuh  Memory usage of a sequence, and event counts of
/// device-managed epochs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lowrankkv/core/memory_usage.hpp"
#include "lowrankkv/core/statistics.hpp"
#include "lowrankkv/cuda/layer/layer_state.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Bytes of one sequence. Pages shared with forks are counted in full. Coefficient bytes
/// include the padding of codes to whole units. Waits for the device if epochs are device-managed.
/// @param listed  the lists with explicit positions and scores
/// @param pending  bytes of the sequence's unfinished prompt
inline MemoryUsage sequence_memory(const LayerState& layer, int slot, const ListedRows& listed,
                                   std::size_t pending) {
  const HostSequence& now = layer.sequence(slot);
  const std::int64_t heads = layer.tables().num_heads,
                     row = 2 * std::int64_t{layer.tables().head_dim} *
                           static_cast<std::int64_t>(size_of(layer.config().full_type));
  MemoryUsage usage;
  usage.pending_bytes = pending;
  usage.tail_bytes = static_cast<std::size_t>(now.tail_length * row * heads);
  std::size_t pages = 0;
  const HeadTiles& listed_tiles = layer.tiles().listed;  // 8-bit tiles include their steps
  std::int64_t full_rows = 0, compressed_rows = 0;
  for (int head = 0; head < layer.tables().num_heads; ++head) {
    full_rows += now.num_rows(RowList::full, head);
    compressed_rows += now.num_rows(RowList::compressed, head);
  }
  usage.full_row_bytes =
      static_cast<std::size_t>(full_rows * listed_tiles.bytes / listed_tiles.rows);
  for (int list = 0; list < layer.num_lists(RowList::compressed); ++list) {
    const HeadTiles& tiles = layer.layout(RowList::compressed, list);
    usage.coefficient_bytes += static_cast<std::size_t>(now.num_rows(RowList::compressed, list) *
                                                        tiles.bytes / tiles.rows);
  }
  for (const auto& list : now.pages) {
    for (const auto& own : list) pages += own.size();
  }
  usage.slack_bytes =
      pages * layer.pool().page_bytes() - usage.full_row_bytes - usage.coefficient_bytes;
  usage.position_bytes = static_cast<std::size_t>((listed.full ? full_rows : 0) +
                                                  (listed.compressed ? compressed_rows : 0)) *
                             sizeof(std::int32_t) +
                         now.shifts.bytes();
  const LayerEdit& tables = layer.tables();
  if (tables.largest_values != nullptr) {
    usage.residual_bytes = static_cast<std::size_t>(
                               (tables.residuals[0] != nullptr ? full_rows : 0) + compressed_rows) *
                               sizeof(std::uint32_t) +
                           static_cast<std::size_t>(heads) * sizeof(float);
  }
  const HostEpochs epochs = layer.epochs_of(slot, nullptr);
  usage.epoch_bytes = layer.epochs().epoch_bytes(epochs);
  usage.updater_bytes = layer.epochs().updater_bytes(epochs) +
                        (layer.device_epochs().used() ? layer.device_epochs().sketch_bytes() : 0);
  for (int head = 0; listed.accumulated_scores && head < static_cast<int>(heads); ++head)
    usage.updater_bytes +=
        static_cast<std::size_t>(tables.scored_rows(now.rows_of(head)) + now.tail_length) *
        sizeof(float);
  return usage;
}

/// @brief Adds the device's counts of device-managed epochs. Waits for the device.
inline void count_device_epochs(const LayerState& layer, CacheStatistics& statistics) {
  DeviceEpochCounts counts;
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  check(cudaMemcpy(&counts, layer.device_epochs().counts(), sizeof counts, cudaMemcpyDeviceToHost),
        "cudaMemcpy");
  statistics.publications += static_cast<std::int64_t>(counts.publications);
  statistics.merges += static_cast<std::int64_t>(counts.merges);
  std::vector<unsigned long long> reprojected(static_cast<std::size_t>(layer.tables().num_heads));
  check(cudaMemcpy(reprojected.data(), layer.device_epochs().reprojected(),
                   reprojected.size() * sizeof(unsigned long long), cudaMemcpyDeviceToHost),
        "cudaMemcpy");
  for (int head = 0; head < layer.tables().num_heads; ++head) {
    const HeadTiles& tiles = layer.layout(RowList::compressed, head);
    const std::int64_t rows =
        static_cast<std::int64_t>(reprojected[static_cast<std::size_t>(head)]);
    statistics.rows_reprojected += rows;
    statistics.bytes_reprojected += 2 * rows * tiles.bytes / tiles.rows;
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
