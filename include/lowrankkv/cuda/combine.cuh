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
/// @brief Elements of the map that a thread holds before the partial states are there.
inline constexpr int kUps = 16;

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
  __shared__ float factors[kMaxEntries][kBlockColumns];           // what an entry's state counts
  __shared__ float tops[kBlockColumns], sums[kBlockColumns], coded_sums[kBlockColumns], coded_weights[kBlockColumns];
  const int block = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y), sequence = first_sequence + static_cast<int>(blockIdx.z), slot = batch.slots[blockIdx.z];
  const int thread = static_cast<int>(threadIdx.x);
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
  const int channels = coded > 0 ? tables.compressed[head].channels(Part::value) : 0, dim = tables.head_dim;
  // Coefficients: a thread sums some of the entries of a channel, for all columns. Outputs: it expands some of the coefficients into a
  // channel. Parts are added in order.
  const int sum_channels = max(1, min(channels, kStepThreads)), sum_parts = kStepThreads / sum_channels, sum_part = thread / sum_channels;
  const int out_parts = max(1, kStepThreads / dim), out_part = thread / dim, channel = thread % dim;
  const int per_part = (channels + out_parts - 1) / out_parts, first_up = out_part * per_part, end_up = out_part < out_parts ? min(channels, first_up + per_part) : first_up;
  PartMaps maps;
  if (coded > 0) maps = all_maps[head].value;
  // What depends on no other kernel is on its way before the last one is waited for; then, before anything is used, all that it left.
  float ups[kUps];
  #pragma unroll
  for (int i = 0; i < kUps; ++i) ups[i] = first_up + i < end_up ? __ldg(maps.reader + (first_up + i) * dim + channel) : 0.0F;
  const float mean = out_part == 0 && maps.mean != nullptr ? maps.mean[channel] : 0.0F;
  wait_for_last_kernel();
  const auto coded_value = [&](int entry, int own) { return *reinterpret_cast<const float4*>(coded_states + static_cast<std::size_t>(entry) * apart + (3 + own) * kBlockColumns); };
  const int entries_per_part = (coded + sum_parts - 1) / sum_parts, first_entry = sum_part * entries_per_part, end_entry = sum_part < sum_parts ? min(coded, first_entry + entries_per_part) : first_entry;
  float4 ahead[kInFlight];
  #pragma unroll
  for (int i = 0; i < kInFlight; ++i) ahead[i] = first_entry + i < end_entry ? coded_value(first_entry + i, thread % sum_channels) : float4{};
  const auto full_value = [&](int entry) { return *reinterpret_cast<const float4*>(state_of(entry) + (3 + channel) * kBlockColumns); };
  const int full_per_part = (entries - coded + out_parts - 1) / out_parts, first_full = coded + out_part * full_per_part, end_full = out_part < out_parts ? min(entries, first_full + full_per_part) : first_full;
  const float4 full_ahead = first_full < end_full ? full_value(first_full) : float4{};
  if (thread < 32 * kBlockColumns) {  // a warp a column
    const int own = thread / 32, lane = thread % 32;
    constexpr int kPerLane = (kMaxEntries + 31) / 32;
    float state_tops[kPerLane], state_sums[kPerLane], state_weights[kPerLane], top = -INFINITY;
    #pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int entry = lane + 32 * i;
      const float* state = state_of(min(entry, entries - 1));
      state_tops[i] = entry < entries ? state[own] : -INFINITY;
      state_sums[i] = entry < entries ? state[kBlockColumns + own] : 0.0F;
      state_weights[i] = entry < coded ? state[2 * kBlockColumns + own] : 0.0F;
    }
    #pragma unroll
    for (int i = 0; i < kPerLane; ++i) top = fmaxf(top, state_tops[i]);
    for (int distance = 16; distance > 0; distance /= 2) top = fmaxf(top, __shfl_xor_sync(~0U, top, distance));
    float sum = 0.0F, coded_sum = 0.0F, coded_weight = 0.0F;
    #pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int entry = lane + 32 * i;
      const float factor = state_tops[i] > -INFINITY ? exp2f(state_tops[i] - top) : 0.0F;
      if (entry < entries) factors[entry][own] = factor;
      sum = fmaf(factor, state_sums[i], sum);
      if (entry < coded) coded_sum = fmaf(factor, state_sums[i], coded_sum);
      coded_weight = fmaf(factor, state_weights[i], coded_weight);
    }
    for (int distance = 16; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(~0U, sum, distance);
      coded_sum += __shfl_xor_sync(~0U, coded_sum, distance);
      coded_weight += __shfl_xor_sync(~0U, coded_weight, distance);
    }
    if (lane == 0) {
      tops[own] = top;
      sums[own] = sum;
      coded_sums[own] = coded_sum;
      coded_weights[own] = coded_weight;
    }
  }
  __syncthreads();
  const auto add = [](float4& total, const float* factor, const float4& value) {
    total = {fmaf(factor[0], value.x, total.x), fmaf(factor[1], value.y, total.y), fmaf(factor[2], value.z, total.z), fmaf(factor[3], value.w, total.w)};
  };
  for (int base = 0; base < channels; base += sum_channels) {  // once, unless there are more channels than threads
    const int own = base + thread % sum_channels;
    float4 total = {0.0F, 0.0F, 0.0F, 0.0F};
    if (own < channels) {
      #pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (first_entry + i < end_entry) add(total, factors[first_entry + i], base == 0 ? ahead[i] : coded_value(first_entry + i, own));
      }
      #pragma unroll 4
      for (int entry = first_entry + kInFlight; entry < end_entry; ++entry) add(total, factors[entry], coded_value(entry, own));
    }
    reinterpret_cast<float4*>(outputs)[thread] = total;
    __syncthreads();
    if (sum_part == 0 && own < channels) {
      for (int i = 1; i < sum_parts; ++i) {
        const float4 other = reinterpret_cast<const float4*>(outputs)[thread + i * sum_channels];
        total = {total.x + other.x, total.y + other.y, total.z + other.z, total.w + other.w};
      }
      if (form == CodedForm::codes) {  // mid-rise: a plane of w bits is centred at (2^w - 1) / 2
        const int bits = tables.compressed[head].value_widths[own / kCodeUnit];
        const float centre = 0.5F * static_cast<float>(((1 << bits) - 1) * value_weight(bits, own));
        total = {total.x - centre * coded_weights[0], total.y - centre * coded_weights[1], total.z - centre * coded_weights[2], total.w - centre * coded_weights[3]};
      }
      reinterpret_cast<float4*>(coefficients)[own] = total;
    }
    __syncthreads();
  }
  if (out_part < out_parts) {
    float4 total = {mean * coded_sums[0], mean * coded_sums[1], mean * coded_sums[2], mean * coded_sums[3]};  // values without any bits still have their mean
    const auto expand = [&](int k, float up) {
      const float4 own = reinterpret_cast<const float4*>(coefficients)[k];
      total = {fmaf(own.x, up, total.x), fmaf(own.y, up, total.y), fmaf(own.z, up, total.z), fmaf(own.w, up, total.w)};
    };
    #pragma unroll
    for (int i = 0; i < kUps; ++i) {
      if (first_up + i < end_up) expand(first_up + i, ups[i]);
    }
    #pragma unroll 8
    for (int k = first_up + kUps; k < end_up; ++k) expand(k, __ldg(maps.reader + k * dim + channel));
    if (first_full < end_full) add(total, factors[first_full], full_ahead);
    #pragma unroll 4
    for (int entry = first_full + 1; entry < end_full; ++entry) add(total, factors[entry], full_value(entry));
    const float values[kBlockColumns] = {total.x, total.y, total.z, total.w};
    for (int i = 0; i < kBlockColumns; ++i) outputs[(out_part * kBlockColumns + i) * dim + channel] = values[i];
  }
  __syncthreads();
  for (int item = thread; item < dim * kBlockColumns; item += kStepThreads) {
    const int own = item / dim, at = item % dim, index = block * kBlockColumns + own;
    if (index >= step.columns()) continue;
    float total = 0.0F;
    for (int i = 0; i < out_parts; ++i) total += outputs[(i * kBlockColumns + own) * dim + at];
    const std::int64_t token = first_row + static_cast<std::int64_t>(blockIdx.z) * step.m + index / step.group;
    const int query_head = head * step.group + index % step.group;
    out.data[token * out.token_stride + query_head * out.head_stride + at] = total / sums[own];
    if (out.lse != nullptr && at == 0) out.lse[token * out.lse_stride + query_head] = 0.69314718F * (tops[own] + log2f(sums[own]));
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
