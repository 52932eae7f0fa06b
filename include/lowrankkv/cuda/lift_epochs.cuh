// SPDX-License-Identifier: Apache-2.0
/// @file cuda/lift_epochs.cuh  What is made on the device of a basis that a sequence publishes, besides the basis: maps in its metric, what lifts unrotated keys.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/epochs.cuh"
#include "lowrankkv/cuda/turned_keys.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Writes the lifting maps of epochs whose decoders were written before. Grid: kStoreThreads operands x heads x sequences.
/// Cost: the decoder once, head_dim x rank numbers of 16 bits.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads) lift_epochs_kernel(Tables tables, PublishedEpochs epochs) {
  const int head = static_cast<int>(blockIdx.y), epoch = epochs.of(static_cast<int>(blockIdx.z)), dim = tables.head_dim, blocks = dim / (2 * kTurnPairs);
  if (epoch < 0) return;
  const HeadMaps& maps = tables.maps[epoch * tables.num_heads + head];
  const int item = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), lane = item % 32, block = item / 32 % blocks, unit = item / 32 / blocks;
  if (unit >= maps.lift.units) return;
  const bool codes = tables.compressed[head].codes;
  const auto word = [&](int i, int place) {
    const int channel = tables.rotary.channel(place, dim);
    const auto element = [&](int which) {
      const int coefficient = lift_place(codes, unit, lane % 4, which);
      return coefficient < maps.key.rank ? maps.lift.scale * maps.key.decoder.element(coefficient, channel, dim) : 0.0F;
    };
    return half_word(element(i), element(i + 1));
  };
  const int first = kTurnPairs * block + lane / 4, second = first + dim / 2;
  const_cast<uint4*>(maps.lift.operands)[item] = {word(0, first), word(2, first), word(0, second), word(2, second)};
}

/// @brief Enqueues what is made of the bases that `count` sequences have published besides themselves: maps in their metric, maps that lift keys which are stored unrotated.
template <class = void>
void finish_epochs(const Tables& tables, const EpochStore& store, const PublishedEpochs& epochs, int count, cudaStream_t stream) {
  if (store.metrics().any()) {
    const unsigned groups = static_cast<unsigned>((store.most() + detail::kMetricWarps - 1) / detail::kMetricWarps);
    metric_epochs_kernel<><<<dim3(2 * groups, static_cast<unsigned>(tables.num_heads), static_cast<unsigned>(count)), detail::kMetricThreads, 0, stream>>>(tables, store.metrics(), store.bases(), epochs);
    check(cudaGetLastError(), "metric_epochs_kernel");
  }
  if (!tables.rotary.turns()) return;
  const int operands = store.most_lift_units() * (tables.head_dim / (2 * kTurnPairs)) * 32;
  lift_epochs_kernel<><<<dim3(static_cast<unsigned>((operands + kStoreThreads - 1) / kStoreThreads), static_cast<unsigned>(tables.num_heads), static_cast<unsigned>(count)), kStoreThreads, 0, stream>>>(tables, epochs);
  check(cudaGetLastError(), "lift_epochs_kernel");
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
