// SPDX-License-Identifier: Apache-2.0
/// @file cuda/combine.cuh  Partial states become outputs: merged in a fixed order, coefficients expanded by the maps.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cuda/attention_step.cuh"
#include "lowrankkv/cuda/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Entries a block can merge: the splits of two lists, the tail, a prompt.
inline constexpr int kMaxEntries = 2 * kMaxSplits + 2;

/// @brief Loads that a thread starts before it uses the first.
inline constexpr int kInFlight = 8;

/// @brief Outputs as kernels see them.
struct DeviceOutput {
  float* data = nullptr;
  std::int64_t token_stride = 0, head_stride = 0;
  float* lse = nullptr;
  std::int64_t lse_stride = 0;
};

/// @brief Shared memory of combine_kernel in bytes.
inline std::size_t combine_bytes(int width, int head_dim) { return sizeof(float) * kBlockColumns * static_cast<std::size_t>(width + (std::max)(kStepThreads, head_dim)); }

/// @brief out, lse of every column. Grid: column blocks x KV heads x sequences; entries are merged in the order in which they stand, so that
/// results repeat bit for bit.
template <class = void>
__global__ void __launch_bounds__(kStepThreads) combine_kernel(Tables tables, AttentionStep step, const HeadMaps* all_maps, CodedForm form, Batch batch, DeviceOutput out, std::int64_t first_row,
                                                                        int first_sequence) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  float* coefficients = reinterpret_cast<float*>(shared_memory);  // [width, kBlockColumns]: sums over the compressed rows, by channel
  float* outputs = coefficients + step.width * kBlockColumns;     // [parts, kBlockColumns, head_dim]
  __shared__ float heads[3][kMaxEntries][kBlockColumns];          // the states' maxima, then factors; sums; sums of weights
  __shared__ float tops[kBlockColumns], sums[kBlockColumns], coded_sums[kBlockColumns], coded_weights[kBlockColumns];
  const int block = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y), sequence = first_sequence + static_cast<int>(blockIdx.z), slot = batch.slots[blockIdx.z];
  const int thread = static_cast<int>(threadIdx.x), column = thread % kBlockColumns;
  const std::size_t row = static_cast<std::size_t>(sequence) * static_cast<std::size_t>(tables.num_heads) + static_cast<std::size_t>(head);
  const int coded = form == CodedForm::none ? 0 : splits_of(tables.num_rows(RowList::compressed, slot, head)), full = splits_of(tables.num_rows(RowList::full, slot, head));
  const int entries = coded + full + (step.prompt == nullptr ? 1 : 2);
  // Entries in the order compressed, full, tail, prompt; between two of a list there are the other blocks of columns.
  const std::size_t apart = static_cast<std::size_t>(step.blocks) * step.state_floats();
  const float* coded_states = step.state(row, step.first_entry(Source::compressed), block);
  const float* full_states = step.state(row, step.first_entry(Source::full), block);
  const float* tail_state = step.state(row, step.first_entry(Source::tail), block);
  const auto state_of = [&](int entry) {
    return entry < coded ? coded_states + static_cast<std::size_t>(entry) * apart : entry < coded + full ? full_states + static_cast<std::size_t>(entry - coded) * apart : tail_state + static_cast<std::size_t>(entry - coded - full) * apart;
  };
  wait_for_last_kernel();
  for (int item = thread; item < entries * kBlockColumns; item += kStepThreads) {
    const float* state = state_of(item / kBlockColumns);
    for (int i = 0; i < 3; ++i) heads[i][item / kBlockColumns][column] = state[i * kBlockColumns + column];
  }
  __syncthreads();
  if (thread < kBlockColumns) {
    float top = -INFINITY;
    for (int entry = 0; entry < entries; ++entry) top = fmaxf(top, heads[0][entry][column]);
    float sum = 0.0F, coded_sum = 0.0F, coded_weight = 0.0F;
    for (int entry = 0; entry < entries; ++entry) {
      const float own = heads[0][entry][column], factor = own > -INFINITY ? exp2f(own - top) : 0.0F;
      heads[0][entry][column] = factor;
      sum = fmaf(factor, heads[1][entry][column], sum);
      if (entry < coded) {
        coded_sum = fmaf(factor, heads[1][entry][column], coded_sum);
        coded_weight = fmaf(factor, heads[2][entry][column], coded_weight);
      }
    }
    tops[column] = top;
    sums[column] = sum;
    coded_sums[column] = coded_sum;
    coded_weights[column] = coded_weight;
  }
  __syncthreads();
  const int channels = coded > 0 ? tables.compressed[head].channels(Part::value) : 0;
  // A thread sums some of the entries of a channel for all columns; the parts are added in order.
  const auto add = [](float4& total, const float* factor, const float4& value) {
    total = {fmaf(factor[0], value.x, total.x), fmaf(factor[1], value.y, total.y), fmaf(factor[2], value.z, total.z), fmaf(factor[3], value.w, total.w)};
  };
  for (int base = 0; base < channels; base += kStepThreads) {
    const int together = min(channels - base, kStepThreads), parts = kStepThreads / together, part = thread / together, own = base + thread % together;
    float4 total = {0.0F, 0.0F, 0.0F, 0.0F};
    if (part < parts) {
      const int per_part = (coded + parts - 1) / parts, end = min(coded, (part + 1) * per_part);
      const float* state = coded_states + (3 + own) * kBlockColumns;
      for (int entry = part * per_part; entry < end; entry += kInFlight) {
        float4 values[kInFlight];
        #pragma unroll
        for (int i = 0; i < kInFlight; ++i) values[i] = entry + i < end ? *reinterpret_cast<const float4*>(state + static_cast<std::size_t>(entry + i) * apart) : float4{};
        #pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          if (entry + i < end) add(total, heads[0][entry + i], values[i]);
        }
      }
      reinterpret_cast<float4*>(outputs)[thread] = total;
    }
    __syncthreads();
    if (part == 0) {
      for (int i = 1; i < parts; ++i) {
        const float4 other = reinterpret_cast<const float4*>(outputs)[thread + i * together];
        total = {total.x + other.x, total.y + other.y, total.z + other.z, total.w + other.w};
      }
      if (form == CodedForm::codes) {  // mid-rise: a plane of w bits is centred at (2^w - 1) / 2
        const float centre = 0.5F * static_cast<float>((1 << tables.compressed[head].value_widths[own / kCodeUnit]) - 1);
        total = {total.x - centre * coded_weights[0], total.y - centre * coded_weights[1], total.z - centre * coded_weights[2], total.w - centre * coded_weights[3]};
      }
      reinterpret_cast<float4*>(coefficients)[own] = total;
    }
    __syncthreads();
  }
  // A thread expands part of the coefficients into one channel of all columns; the parts are added in order.
  const int dim = tables.head_dim, parts = dim < kStepThreads ? kStepThreads / dim : 1, part = thread / dim, channel = thread % dim;
  if (part < parts) {
    float4 total = {0.0F, 0.0F, 0.0F, 0.0F};
    if (coded > 0) {  // values without any bits still have their mean
      const PartMaps maps = all_maps[head].value;
      const int per_part = (channels + parts - 1) / parts, end = min(channels, (part + 1) * per_part);
      for (int k = part * per_part; k < end; k += 2 * kInFlight) {
        float ups[2 * kInFlight];
        #pragma unroll
        for (int i = 0; i < 2 * kInFlight; ++i) ups[i] = k + i < end ? __ldg(maps.reader + (k + i) * dim + channel) : 0.0F;
        #pragma unroll
        for (int i = 0; i < 2 * kInFlight; ++i) {
          const float4 own = reinterpret_cast<const float4*>(coefficients)[min(k + i, channels - 1)];
          total = {fmaf(own.x, ups[i], total.x), fmaf(own.y, ups[i], total.y), fmaf(own.z, ups[i], total.z), fmaf(own.w, ups[i], total.w)};
        }
      }
      if (part == 0 && maps.mean != nullptr) {
        const float mean = maps.mean[channel];
        total = {fmaf(coded_sums[0], mean, total.x), fmaf(coded_sums[1], mean, total.y), fmaf(coded_sums[2], mean, total.z), fmaf(coded_sums[3], mean, total.w)};
      }
    }
    const int per_part = (entries - coded + parts - 1) / parts, end = min(entries, coded + (part + 1) * per_part);
    #pragma unroll 4
    for (int entry = coded + part * per_part; entry < end; ++entry) add(total, heads[0][entry], *reinterpret_cast<const float4*>(state_of(entry) + (3 + channel) * kBlockColumns));
    const float values[kBlockColumns] = {total.x, total.y, total.z, total.w};
    for (int i = 0; i < kBlockColumns; ++i) outputs[(part * kBlockColumns + i) * dim + channel] = values[i];
  }
  __syncthreads();
  for (int item = thread; item < dim * kBlockColumns; item += kStepThreads) {
    const int own = item / dim, at = item % dim, index = block * kBlockColumns + own;
    if (index >= step.columns()) continue;
    float total = 0.0F;
    for (int i = 0; i < parts; ++i) total += outputs[(i * kBlockColumns + own) * dim + at];
    const std::int64_t token = first_row + static_cast<std::int64_t>(blockIdx.z) * step.m + index / step.group;
    const int query_head = head * step.group + index % step.group;
    out.data[token * out.token_stride + query_head * out.head_stride + at] = total / sums[own];
    if (out.lse != nullptr && at == 0) out.lse[token * out.lse_stride + query_head] = 0.69314718F * (tops[own] + log2f(sums[own]));
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
