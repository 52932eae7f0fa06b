// SPDX-License-Identifier: Apache-2.0
/// @file cuda/update/key_up_epochs.cuh  What the device derives from a basis that a sequence
/// publishes: maps in its metric, readers and steps of codes, and up-projection maps of pre-RoPE
/// keys.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/attention/pre_rope/rope_on_read.cuh"
#include "lowrankkv/cuda/epochs/epoch_store.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Writes the up-projection maps of epochs whose decoders, and steps, were written before.
/// Grid: pieces of kStoreThreads operands x heads x sequences. Cost: the decoder once, head_dim x
/// rank 16-bit numbers.
/// @param axes  of codes of principal axes; else empty. With them scales and means are an epoch's
/// own, such that no sum over a row's channels, without its gain, is beyond 16 (up_project_codes())
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    key_up_epochs_kernel(LayerView tables, PublishedEpochs epochs, AxisScales axes) {
  __shared__ float scale;
  const int head = static_cast<int>(blockIdx.y), epoch = epochs.of(static_cast<int>(blockIdx.z)),
            dim = tables.head_dim, blocks = dim / (2 * kRopePairs),
            thread = static_cast<int>(threadIdx.x);
  if (epoch < 0) return;
  const HeadMaps& maps = tables.maps[epoch * tables.num_heads + head];
  const PartMaps& keys = maps.key;
  const bool codes = tables.compressed[head].codes, orders = axes.longest != nullptr;
  const auto step = [&](int coefficient) {
    return keys.inverse_steps == nullptr ? 1.0F : 1.0F / __ldg(keys.inverse_steps + coefficient);
  };
  if (thread < 32) {
    float squares = 0.0F, mean = 0.0F;
    for (int i = thread; orders && i < keys.coded; i += 32) {
      const float largest = 0.5F * static_cast<float>((1 << keys.bits[i]) - 1) * step(i);
      squares = fmaf(largest, largest, squares);
    }
    for (int i = thread; orders && keys.mean != nullptr && i < dim; i += 32)
      mean = fmaxf(mean, fabsf(keys.mean[i]));
    for (int distance = 16; distance > 0; distance /= 2) {
      squares += __shfl_xor_sync(~0U, squares, distance);
      mean = fmaxf(mean, __shfl_xor_sync(~0U, mean, distance));
    }
    if (thread == 0)
      scale = !orders
                  ? maps.key_up.scales->x
                  : exp2f(4.0F -
                          ceilf(log2f(fmaxf(
                              fmaxf(1e-30F, sqrtf(squares) *
                                                axes.longest[AxisScales::which(Part::key, head)]),
                              mean / 1024.0F))));
  }
  __syncthreads();
  const int item = static_cast<int>(blockIdx.x * blockDim.x) + thread, lane = item % 32,
            block = item / 32 % blocks, unit = item / 32 / blocks;
  if (orders && blockIdx.x == 0) {
    if (thread == 0) const_cast<float2*>(maps.key_up.scales)[0] = {scale, 1.0F / scale};
    const auto mean_word = [&](int place) {
      return keys.mean == nullptr
                 ? 0U
                 : half_word(scale * keys.mean[tables.rotary.channel(place, dim)],
                             scale * keys.mean[tables.rotary.channel(place + 1, dim)]);
    };
    for (int i = thread; i < dim / 4; i += kStoreThreads)
      const_cast<uint2*>(maps.key_up.means)[i] = {mean_word(2 * i), mean_word(2 * i + dim / 2)};
  }
  if (unit >= maps.key_up.units) return;
  const auto word = [&](int i, int place) {
    const int channel = tables.rotary.channel(place, dim);
    const auto element = [&](int which) {
      const int own = key_up_place(codes, unit, lane % 4, which);
      if (!orders) return own < keys.rank ? scale * keys.decoder.element(own, channel, dim) : 0.0F;
      const TileChannel code = own < keys.width ? keys.channels[own] : TileChannel{};
      return code.source < 0
                 ? 0.0F
                 : scale * keys.decoder.element(code.source, channel, dim) * step(code.source) *
                       static_cast<float>(1U << code.shift) * (code.width == 8 ? 1.0F : 0.5F);
    };
    return half_word(element(i), element(i + 1));
  };
  const int first = kRopePairs * block + lane / 4, second = first + dim / 2;
  const_cast<uint4*>(maps.key_up.operands)[item] = {word(0, first), word(2, first), word(0, second),
                                                    word(2, second)};
}

/// @brief Writes what codes of principal axes need of epochs whose encoders and decoders were
/// written before: steps, offsets in steps, and readers. Grid: pieces of kStoreThreads numbers of
/// the largest reader x (heads x 2) x sequences.
/// @param steps  [sequence, head, part, most], of the codes
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    code_epochs_kernel(LayerView tables, PublishedEpochs epochs, AxisScales scales,
                       const float* steps) {
  __shared__ float largest[kStoreThreads / 32];
  const int which = static_cast<int>(blockIdx.y), head = which / 2,
            epoch = epochs.of(static_cast<int>(blockIdx.z)), dim = tables.head_dim,
            thread = static_cast<int>(threadIdx.x);
  if (epoch < 0) return;
  const Part part = which % 2 == 0 ? Part::key : Part::value;
  const PartMaps& maps = tables.maps[epoch * tables.num_heads + head].of(part);
  const float* own = steps + static_cast<std::size_t>(
                                 static_cast<int>(blockIdx.z) * tables.num_heads * 2 + which) *
                                 static_cast<std::size_t>(scales.most);
  const auto factor = [&](const TileChannel& place, int channel) {
    return place.source < 0
               ? 0.0F
               : own[place.source] * static_cast<float>(1U << place.shift) /
                     (part == Part::key ? 1.0F
                                        : static_cast<float>(value_weight(place.width, channel)));
  };
  const int item = static_cast<int>(blockIdx.x) * kStoreThreads + thread, channel = item / dim,
            row = item % dim;
  if (channel < (maps.width + kPlainUnit - 1) / kPlainUnit * kPlainUnit) {
    const TileChannel place = channel < maps.width ? maps.channels[channel] : TileChannel{};
    maps.reader.put(channel, row, dim,
                    place.source < 0
                        ? 0.0F
                        : maps.decoder.element(place.source, row, dim) * factor(place, channel));
  }
  if (blockIdx.x > 0) return;
  for (int i = thread; i < maps.rank && maps.inverse_steps != nullptr; i += kStoreThreads) {
    const float inverse = 1.0F / own[i];
    const_cast<float*>(maps.inverse_steps)[i] = inverse;
    const_cast<float*>(maps.offset)[i] *= inverse;
  }
  float most = 1e-30F;
  for (int i = thread; i < maps.width; i += kStoreThreads)
    most = fmaxf(most, factor(maps.channels[i], i));
  for (int distance = 16; distance > 0; distance /= 2)
    most = fmaxf(most, __shfl_xor_sync(~0U, most, distance));
  if (thread % 32 == 0) largest[thread / 32] = most;
  __syncthreads();
  if (thread > 0) return;
  for (const float other : largest) most = fmaxf(most, other);
  const_cast<float*>(maps.reader_scale)[0] =
      exp2f(8.0F - ceilf(log2f(most * scales.longest[which])));
}

/// @brief Enqueues what is derived from the bases that `count` sequences have published: maps in
/// their metric, readers and steps of codes, up-projection maps of pre-RoPE keys.
/// @param steps  of align_axes(), where codes want principal axes; else null
template <class = void>
void finish_epochs(const LayerView& tables, const EpochStore& store, const PublishedEpochs& epochs,
                   int count, const float* steps, cudaStream_t stream) {
  if (store.metrics().any()) {
    const unsigned groups =
        static_cast<unsigned>((store.most() + detail::kMetricWarps - 1) / detail::kMetricWarps);
    metric_epochs_kernel<>
        <<<dim3(2 * groups, static_cast<unsigned>(tables.num_heads), static_cast<unsigned>(count)),
           detail::kMetricThreads, 0, stream>>>(tables, store.metrics(), store.bases(), epochs);
    check(cudaGetLastError(), "metric_epochs_kernel");
  }
  if (store.axis_store().any()) {
    const unsigned pieces =
        static_cast<unsigned>((store.most_reader() + kStoreThreads - 1) / kStoreThreads);
    code_epochs_kernel<>
        <<<dim3(pieces, 2 * static_cast<unsigned>(tables.num_heads), static_cast<unsigned>(count)),
           kStoreThreads, 0, stream>>>(tables, epochs, store.axes(), steps);
    check(cudaGetLastError(), "code_epochs_kernel");
  }
  if (!tables.rotary.pre_rope()) return;
  const int operands = store.most_key_up_units() * (tables.head_dim / (2 * kRopePairs)) * 32;
  key_up_epochs_kernel<>
      <<<dim3(static_cast<unsigned>((operands + kStoreThreads - 1) / kStoreThreads),
              static_cast<unsigned>(tables.num_heads), static_cast<unsigned>(count)),
         kStoreThreads, 0, stream>>>(tables, epochs, store.axes());
  check(cudaGetLastError(), "key_up_epochs_kernel");
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
