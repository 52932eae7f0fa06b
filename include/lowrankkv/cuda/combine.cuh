// SPDX-License-Identifier: Apache-2.0
/// @file cuda/combine.cuh  Partial states become outputs: merged in a fixed order, coefficients expanded by the maps of their epoch.
#pragma once

#include <cstdint>
#include <type_traits>

#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cuda/attention_step.cuh"
#include "lowrankkv/cuda/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Entries a block can merge: the splits of two lists, one more for every segment, the tail, a prompt.
inline constexpr int kMaxEntries = 2 * kMaxSplits + kMaxSegments + 2;

/// @brief Loads that a thread starts before it uses the first.
inline constexpr int kInFlight = 8;

/// @brief Outputs as kernels see them, null where they are not wanted; with `sum`, unnormalised, and `lse` takes the maxima.
struct DeviceOutput {
  float* data = nullptr;
  std::int64_t token_stride = 0, head_stride = 0;
  float* lse = nullptr;
  std::int64_t lse_stride = 0;
  float* sum = nullptr;
};

/// @brief Shared memory of combine_kernel in bytes.
inline std::size_t combine_bytes(int width) { return sizeof(float4) * static_cast<std::size_t>(width + kStepThreads); }

namespace detail {

__device__ inline void add_scaled(float4& total, const float4& factor, const float4& value) {
  total = {fmaf(factor.x, value.x, total.x), fmaf(factor.y, value.y, total.y), fmaf(factor.z, value.z, total.z), fmaf(factor.w, value.w, total.w)};
}
__device__ inline void add_scaled(float4& total, float factor, const float4& value) { add_scaled(total, float4{factor, factor, factor, factor}, value); }
/// The sum over lanes that hold the same t = lane % 4.
__device__ inline float4 sum_over_rows(float4 x) { return {column_sum(x.x), column_sum(x.y), column_sum(x.z), column_sum(x.w)}; }

}  // namespace detail

/// @brief out, lse of every column. Grid: column blocks x KV heads x sequences; entries are merged in the order in which they stand, so that
/// results repeat bit for bit.
///
/// A warp makes eight channels of the output at a time: lane (g, t) adds up the coefficients g and g + 8 of every 16, and every eighth entry at full
/// rank, for channels 2t and 2t + 1.
/// @tparam scale_groups  of tiles of codes
template <int scale_groups>
__global__ void __launch_bounds__(kStepThreads) combine_kernel(Tables tables, AttentionStep step, CodedForm form, Batch batch, DeviceOutput out, std::int64_t first_row, int first_sequence) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  float4* coefficients = reinterpret_cast<float4*>(shared_memory);  // [width, or that of joint values]: sums over the compressed rows of a segment, by channel
  float4* parts = coefficients + max(step.width, step.joint_width);  // [threads]
  __shared__ float4 factors[kMaxEntries];                           // what an entry's state counts
  __shared__ float weighted[1 + scale_groups][kMaxEntries][kBlockColumns];  // its sums times that; its sums of weights
  __shared__ float tops[kBlockColumns], sums[kBlockColumns], segment_sums[1 + scale_groups][kBlockColumns];
  constexpr int kBlocksPerWarp = kMaxHeadDim / 8 / (kStepThreads / 32);
  const int block = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y), sequence = first_sequence + static_cast<int>(blockIdx.z), slot = batch.slots[blockIdx.z];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4, dim = tables.head_dim;
  const std::size_t row = static_cast<std::size_t>(sequence) * static_cast<std::size_t>(tables.num_heads) + static_cast<std::size_t>(head);
  const int coded_rows = form == CodedForm::none ? 0 : tables.num_rows(RowList::compressed, slot, head), segments = form == CodedForm::none ? 0 : tables.num_segments(slot, coded_rows);
  SegmentRows range;
  int coded = 0;
  const bool joint = step.joint_states != nullptr;  // then a head has one state of compressed rows
  for (int i = 0; i < segments; ++i) coded += joint ? 1 : tables.segment(slot, coded_rows, i, coded).splits;
  const int full = splits_of(tables.num_rows(RowList::full, slot, head)), entries = coded + full + (step.prompt == nullptr ? 1 : 2);
  // Entries in the order compressed, full, tail, prompt; between two of a list there are the other blocks of columns.
  const std::size_t apart = static_cast<std::size_t>(step.blocks) * step.state_floats();
  const float* coded_states = joint ? step.joint_state(row, block) : step.state(row, step.first_entry(Source::compressed), block);
  const float* full_states = step.state(row, step.first_entry(Source::full), block);
  const float* tail_state = step.state(row, step.first_entry(Source::tail), block);
  const auto state_of = [&](int entry) {
    return entry < coded ? coded_states + static_cast<std::size_t>(entry) * apart : entry < coded + full ? full_states + static_cast<std::size_t>(entry - coded) * apart : tail_state + static_cast<std::size_t>(entry - coded - full) * apart;
  };
  PartMaps maps;
  if (segments > 0) {
    range = tables.segment(slot, coded_rows, 0, 0);
    if (joint) range.splits = 1;
    maps = tables.maps[range.epoch * tables.num_heads + head].value;
  }
  const int channels = segments > 0 ? maps.width : 0;
  // Coefficients: a thread sums some of a segment's entries for a channel; the parts are added in order.
  const int together = max(1, min(channels, kStepThreads)), sum_parts = kStepThreads / together, sum_part = thread / together;
  // What depends on no other kernel is on its way before the last one is waited for.
  float4 ahead[kInFlight];
  #pragma unroll
  for (int i = 0; i < kInFlight; ++i) ahead[i] = 16 * i < channels && 8 * warp < dim ? maps.reader.quad((i * (dim / 8) + warp) * 32 + lane) : float4{};
  wait_for_last_kernel();
  if (thread < 32 * kBlockColumns) {  // a warp a column
    constexpr int kPerLane = (kMaxEntries + 31) / 32;
    float state_tops[kPerLane], state_sums[kPerLane], state_weights[scale_groups][kPerLane], top = -INFINITY, sum = 0.0F;
    #pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int entry = lane + 32 * i;
      const float* state = state_of(min(entry, entries - 1));
      state_tops[i] = entry < entries ? state[warp] : -INFINITY;
      state_sums[i] = entry < entries ? state[kBlockColumns + warp] : 0.0F;
      state_weights[0][i] = entry < coded ? state[2 * kBlockColumns + warp] : 0.0F;
      if constexpr (scale_groups == 2) state_weights[1][i] = entry < coded ? state[(3 + channels) * kBlockColumns + warp] : 0.0F;
      top = fmaxf(top, state_tops[i]);
    }
    for (int distance = 16; distance > 0; distance /= 2) top = fmaxf(top, __shfl_xor_sync(~0U, top, distance));
    #pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int entry = lane + 32 * i;
      const float factor = state_tops[i] > -INFINITY ? exp2f(state_tops[i] - top) : 0.0F;
      sum = fmaf(factor, state_sums[i], sum);
      if (entry >= entries) continue;
      reinterpret_cast<float*>(factors + entry)[warp] = factor;
      weighted[0][entry][warp] = factor * state_sums[i];
      #pragma unroll
      for (int group = 0; group < scale_groups; ++group) weighted[1 + group][entry][warp] = factor * state_weights[group][i];
    }
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0U, sum, distance);
    if (lane == 0) {
      tops[warp] = top;
      sums[warp] = sum;
    }
  }
  __syncthreads();
  float4 totals[kBlocksPerWarp][2] = {};  // channels 2t and 2t + 1 of each block of eight, all columns
  for (int index = 0; index < segments; ++index) {
    if (index > 0) {
      range = tables.segment(slot, coded_rows, index, range.first_split + range.splits);
      maps = tables.maps[range.epoch * tables.num_heads + head].value;
    }
    const int per_part = (range.splits + sum_parts - 1) / sum_parts, last_entry = range.first_split + range.splits, first_entry = range.first_split + sum_part * per_part;
    const int end_entry = sum_part < sum_parts ? min(last_entry, first_entry + per_part) : first_entry;
    if (thread < 32 * kBlockColumns) {
      float total[1 + scale_groups] = {};
      for (int entry = range.first_split + lane; entry < last_entry; entry += 32) {
        #pragma unroll
        for (int i = 0; i <= scale_groups; ++i) total[i] += weighted[i][entry][warp];
      }
      for (int distance = 16; distance > 0; distance /= 2) {
        #pragma unroll
        for (int i = 0; i <= scale_groups; ++i) total[i] += __shfl_xor_sync(~0U, total[i], distance);
      }
      #pragma unroll
      for (int i = 0; i <= scale_groups; ++i) {
        if (lane == i) segment_sums[i][warp] = total[i];
      }
    }
    if (channels == 0) __syncthreads();  // values may have a mean and no bits
    for (int base = 0; base < channels; base += together) {  // once, unless there are more channels than threads
      const int own = base + thread % together;
      float4 total = {0.0F, 0.0F, 0.0F, 0.0F};
      const float* state = coded_states + (3 + own) * kBlockColumns;
      for (int entry = first_entry; entry < end_entry && own < channels; entry += kInFlight) {
        float4 values[kInFlight];
        #pragma unroll
        for (int i = 0; i < kInFlight; ++i) values[i] = entry + i < end_entry ? *reinterpret_cast<const float4*>(state + static_cast<std::size_t>(entry + i) * apart) : float4{};
        #pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          if (entry + i < end_entry) detail::add_scaled(total, factors[entry + i], values[i]);
        }
      }
      parts[thread] = total;
      __syncthreads();
      if (sum_part == 0 && own < channels) {
        for (int i = 1; i < sum_parts; ++i) detail::add_scaled(total, 1.0F, parts[thread + i * together]);
        if (form == CodedForm::codes) {  // mid-rise: a plane of w bits is centred at (2^w - 1) / 2
          const int bits = tables.compressed[head].value_widths[own / kCodeUnit];
          const float centre = -0.5F * static_cast<float>(((1 << bits) - 1) * value_weight(bits, own));
          const int group = scale_groups == 2 && own / kCodeUnit >= tables.compressed[head].first_value_units ? 2 : 1;
          detail::add_scaled(total, centre, {segment_sums[group][0], segment_sums[group][1], segment_sums[group][2], segment_sums[group][3]});
        }
        coefficients[own] = total;
      }
      __syncthreads();
    }
    #pragma unroll
    for (int i = 0; i < kBlocksPerWarp; ++i) {
      const int channel_block = warp + i * (kStepThreads / 32);
      if (8 * channel_block >= dim) break;
      const auto add = [&](int step_of_16, const float4& map) {
        const float4 low = coefficients[16 * step_of_16 + g], high = coefficients[16 * step_of_16 + 8 + g];
        detail::add_scaled(totals[i][0], map.x, low);
        detail::add_scaled(totals[i][0], map.z, high);
        detail::add_scaled(totals[i][1], map.y, low);
        detail::add_scaled(totals[i][1], map.w, high);
      };
      const bool fetched = i == 0 && index == 0;
      #pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        if (16 * k < channels) add(k, fetched ? ahead[k] : maps.reader.quad((k * (dim / 8) + channel_block) * 32 + lane));
      }
      // More channels are those of joint values: as many loads on their way at once.
      const auto add_all = [&](const auto* data, auto&& widen) {
        for (int first = kInFlight; 16 * first < channels; first += kInFlight) {
          std::remove_cvref_t<decltype(*data)> words[kInFlight];
          #pragma unroll
          for (int k = 0; k < kInFlight; ++k) words[k] = __ldg(data + (min(first + k, channels / 16 - 1) * (dim / 8) + channel_block) * 32 + lane);
          #pragma unroll
          for (int k = 0; k < kInFlight; ++k) {
            if (16 * (first + k) < channels) add(first + k, widen(words[k]));
          }
        }
      };
      if (maps.reader.type == DType::f32) add_all(static_cast<const float4*>(maps.reader.data), [](const float4& map) { return map; });
      else add_all(static_cast<const uint2*>(maps.reader.data), [&](const uint2& words) { return maps.reader.widened(words); });
      if (g == 0 && maps.mean != nullptr) {
        const float4 weights = {segment_sums[0][0], segment_sums[0][1], segment_sums[0][2], segment_sums[0][3]};
        detail::add_scaled(totals[i][0], maps.mean[8 * channel_block + 2 * t], weights);
        detail::add_scaled(totals[i][1], maps.mean[8 * channel_block + 2 * t + 1], weights);
      }
    }
    __syncthreads();
  }
  #pragma unroll
  for (int i = 0; i < kBlocksPerWarp; ++i) {
    const int first_channel = 8 * (warp + i * (kStepThreads / 32));
    if (first_channel >= dim) break;
    for (int entry = coded + g; entry < entries; entry += 8) {
      const float4* state = reinterpret_cast<const float4*>(state_of(entry)) + 3 + first_channel + 2 * t;
      detail::add_scaled(totals[i][0], factors[entry], state[0]);
      detail::add_scaled(totals[i][1], factors[entry], state[1]);
    }
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 total = detail::sum_over_rows(totals[i][half]);
      if (g >= kBlockColumns) continue;  // lane (g, t) writes column g
      const int index = block * kBlockColumns + g, channel = first_channel + 2 * t + half;
      if (index >= step.columns()) continue;
      const std::int64_t token = first_row + static_cast<std::int64_t>(blockIdx.z) * step.m + index / step.group;
      const int query_head = head * step.group + index % step.group;
      const float own = g == 0 ? total.x : g == 1 ? total.y : g == 2 ? total.z : total.w;
      if (out.data != nullptr) out.data[token * out.token_stride + query_head * out.head_stride + channel] = out.sum != nullptr ? own : own / sums[g];
      if (out.lse == nullptr || channel != 0) continue;
      out.lse[token * out.lse_stride + query_head] = 0.69314718F * (out.sum != nullptr ? tops[g] : tops[g] + log2f(sums[g]));
      if (out.sum != nullptr) out.sum[token * out.lse_stride + query_head] = sums[g];
    }
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
