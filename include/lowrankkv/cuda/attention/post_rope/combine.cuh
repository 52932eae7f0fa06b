// SPDX-License-Identifier: Apache-2.0
/// @file cuda/attention/post_rope/combine.cuh  Merges partial states in a fixed order and expands
/// coefficients to outputs with the maps of their epoch.
#pragma once

#include <cstdint>
#include <type_traits>

#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cuda/state/attention_step.cuh"
#include "lowrankkv/cuda/tiles/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Most entries that a block can merge: the splits of two lists, one more split per segment,
/// the tail, a prompt.
inline constexpr int kMaxEntries = 2 * kMaxSplits + kMaxSegments + 2;

/// @brief Operands of a map that a lane loads before it uses the first.
inline constexpr int kInFlight = 8;
/// @brief Entries whose values a thread loads before the factors are known.
inline constexpr int kEntriesAhead = 4;

/// @brief Outputs as kernels see them; null where not wanted.
///
/// With `sum`, outputs are unnormalised, `sum` takes the sums of weights, and `lse` takes the
/// maxima.
struct DeviceOutput {
  float* data = nullptr;
  std::int64_t token_stride = 0, head_stride = 0;
  float* lse = nullptr;
  std::int64_t lse_stride = 0;
  float* sum = nullptr;
};

/// @brief Shared memory of combine_kernel in bytes.
inline std::size_t combine_bytes(int width) {
  return sizeof(float4) * static_cast<std::size_t>(width + kStepThreads);
}

namespace detail {

__device__ inline void add_scaled(float4& total, const float4& factor, const float4& value) {
  total = {fmaf(factor.x, value.x, total.x), fmaf(factor.y, value.y, total.y),
           fmaf(factor.z, value.z, total.z), fmaf(factor.w, value.w, total.w)};
}
__device__ inline void add_scaled(float4& total, float factor, const float4& value) {
  add_scaled(total, float4{factor, factor, factor, factor}, value);
}
__device__ inline void add_scaled(float& total, float factor, float value) {
  total = fmaf(factor, value, total);
}
/// The sum over lanes that hold the same t = lane % 4.
__device__ inline float4 sum_over_rows(float4 x) {
  return {column_sum(x.x), column_sum(x.y), column_sum(x.z), column_sum(x.w)};
}
__device__ inline float sum_over_rows(float x) { return column_sum(x); }
/// One float per column in use.
template <int columns>
using Columns = std::conditional_t<columns == 1, float, float4>;
/// The element of column `index`.
__device__ inline float of_column(float x, int) { return x; }
__device__ inline float of_column(const float4& x, int index) {
  return index == 0 ? x.x : index == 1 ? x.y : index == 2 ? x.z : x.w;
}

/// Writes what attention to no rows gives, to the columns of a block: outputs of 0, lse -inf.
/// @param first  row of the outputs of the sequence's first query token
__device__ inline void write_no_rows(const AttentionStep& step, const DeviceOutput& out,
                                     std::int64_t first, int head, int block, int dim) {
  const int columns = min(kBlockColumns, step.columns() - block * kBlockColumns);
  for (int item = static_cast<int>(threadIdx.x); item < columns * dim;
       item += static_cast<int>(blockDim.x)) {
    const int column = block * kBlockColumns + item / dim, channel = item % dim;
    const std::int64_t token = first + column / step.group;
    const int query_head = head * step.group + column % step.group;
    if (out.data != nullptr)
      out.data[token * out.token_stride + query_head * out.head_stride + channel] = 0.0F;
    if (channel > 0 || out.lse == nullptr) continue;
    out.lse[token * out.lse_stride + query_head] = -INFINITY;
    if (out.sum != nullptr) out.sum[token * out.lse_stride + query_head] = 0.0F;
  }
}

}  // namespace detail

/// @brief Writes out and lse of every column. Grid: column blocks x KV heads x sequences.
///
/// Entries are merged in the order in which they are stored, so results repeat bit for bit. A warp
/// makes eight output channels at a time: lane (g, t) adds up coefficients g and g + 8 of every 16,
/// and every eighth full-rank entry, for channels 2t and 2t + 1. Most of this code runs once per
/// block, and fetching instructions takes longer than executing them. So loops are unrolled only as
/// far as loads should be in flight together.
/// @tparam scale_groups  of tiles of codes
/// @tparam columns  columns of a block in use: one if a KV head has one query row, else all
/// @tparam blocks_per_warp  blocks of eight channels of a head, divided by the warps
/// @tparam wide  maps are f32; else 16 bits
template <int scale_groups, int columns, int blocks_per_warp, bool wide>
__global__ void __launch_bounds__(kStepThreads, columns == 1 ? 2 : 1)
    combine_kernel(LayerView tables, AttentionStep step, CodedForm form, Batch batch,
                   DeviceOutput out, std::int64_t first_row, int first_sequence) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  using Sums = detail::Columns<columns>;
  // [width, or joint_width]: sums over the compressed rows of a segment, by channel.
  Sums* coefficients = reinterpret_cast<Sums*>(shared_memory);
  Sums* parts = coefficients + max(step.width, step.joint_width);  // [threads]
  __shared__ Sums factors[kMaxEntries];                            // factor of each entry's state
  // [0]: factor times the entry's sum; [1 and above]: factor times its sums of weights with gains,
  // by scale group.
  __shared__ float weighted[1 + scale_groups][kMaxEntries][columns];
  __shared__ float tops[columns], sums[columns];
  __shared__ Sums segment_sums[1 + scale_groups];
  const int block = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y),
            sequence = first_sequence + static_cast<int>(blockIdx.z), slot = batch.slot(blockIdx.z);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32,
            g = lane / 4, t = lane % 4, dim = tables.head_dim;
  const std::size_t row =
      static_cast<std::size_t>(sequence) * static_cast<std::size_t>(tables.num_heads) +
      static_cast<std::size_t>(head);
  if (slot < 0) {
    wait_for_last_kernel();  // what wrote the output before is done
    detail::write_no_rows(step, out, first_row + std::int64_t{blockIdx.z} * step.m, head, block,
                          dim);
    return;
  }
  const int coded_rows =
                form == CodedForm::none ? 0 : tables.num_rows(RowList::compressed, slot, head),
            segments = form == CodedForm::none ? 0 : tables.num_segments(slot, coded_rows);
  const bool joint = step.joint_states != nullptr;  // a head then has one compressed state
  SegmentRows range;
  int coded = 0;
  for (int i = 0; i < segments; ++i)
    coded += joint ? 1 : tables.segment(slot, head, coded_rows, i, coded).splits;
  const int full = full_splits_of(tables.num_rows(RowList::full, slot, head),
                                  tables.rotary.pre_rope()),
            entries = coded + full + (step.prompt == nullptr ? 1 : 2);
  // Entries are ordered compressed, full, tail, prompt. Between two entries of a list lie the other
  // blocks of columns.
  const std::size_t entry_stride = static_cast<std::size_t>(step.blocks) * step.state_floats();
  const float* coded_states = joint ? step.joint_state(row, block)
                                    : step.state(row, step.first_entry(Source::compressed), block);
  const float* full_states = step.state(row, step.first_entry(Source::full), block);
  const float* tail_state = step.state(row, step.first_entry(Source::tail), block);
  const auto state_of = [&](int entry) {
    const float* first = entry < coded          ? coded_states
                         : entry < coded + full ? full_states
                                                : tail_state;
    return first + static_cast<std::size_t>(entry < coded          ? entry
                                            : entry < coded + full ? entry - coded
                                                                   : entry - coded - full) *
                       entry_stride;
  };
  PartMaps maps;
  if (segments > 0) {
    range = tables.segment(slot, head, coded_rows, 0, 0);
    if (joint) range.splits = 1;
    maps = tables.maps[range.epoch * tables.num_heads + head].value;
  }
  const int channels = segments > 0 ? maps.width : 0;
  // Coefficients: thread i sums part i / together of a segment's entries for channel i % together.
  // The parts are then added in order.
  const int together = max(1, min(channels, kStepThreads)), sum_parts = kStepThreads / together;
  // Loads that depend on no other kernel are issued before the wait for the last kernel.
  detail::MapWords<wide> ahead[kInFlight];
  const auto fetch_maps = [&](int channel_block) {
    const auto* data = static_cast<const detail::MapWords<wide>*>(maps.reader.data);
    const int first = channel_block * 32 + lane;
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (16 * k < channels) ahead[k] = __ldg(data + (first + k * (dim / 8) * 32));
    }
  };
  if (8 * warp < dim) fetch_maps(warp);
  wait_for_last_kernel();
  // Values are in flight while the factors are computed.
  Sums coded_ahead[kEntriesAhead];
  const auto first_of = [&](int part) {
    return range.first_split +
           min(range.splits, part * ((range.splits + sum_parts - 1) / sum_parts));
  };
  const auto end_of = [&](int part) { return part < sum_parts ? first_of(part + 1) : 0; };
  const auto coded_values = [&](int entry, int channel) {
    return *reinterpret_cast<const Sums*>(coded_states +
                                          static_cast<std::size_t>(entry) * entry_stride +
                                          (3 + channel) * kBlockColumns);
  };
  const int first_entry = first_of(thread / together), end_entry = end_of(thread / together);
#pragma unroll
  for (int i = 0; i < kEntriesAhead; ++i) {
    if (first_entry + i < end_entry && thread % together < channels)
      coded_ahead[i] = coded_values(first_entry + i, thread % together);
  }
  // Channels 2t and 2t + 1 of each block of eight, all columns.
  Sums totals[blocks_per_warp][2] = {}, full_ahead[2] = {};
  const auto full_value = [&](int entry, int channel_block, int half) {
    return *reinterpret_cast<const Sums*>(state_of(entry) +
                                          (3 + 8 * channel_block + 2 * t + half) * kBlockColumns);
  };
  if (8 * warp < dim && coded + g < entries) {
    full_ahead[0] = full_value(coded + g, warp, 0);
    full_ahead[1] = full_value(coded + g, warp, 1);
  }
  if (thread < 32 * columns) {  // one warp per column
    float top = -INFINITY, sum = 0.0F;
#pragma unroll 1
    for (int entry = lane; entry < entries; entry += 32) top = fmaxf(top, state_of(entry)[warp]);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      top = fmaxf(top, __shfl_xor_sync(~0U, top, distance));
#pragma unroll 1
    for (int entry = lane; entry < entries; entry += 32) {
      const float* state = state_of(entry);
      const float own = state[warp], factor = own > -INFINITY ? exp2f(own - top) : 0.0F,
                  weight = factor * state[kBlockColumns + warp];
      sum += weight;
      reinterpret_cast<float*>(factors + entry)[warp] = factor;
      if (entry >= coded) continue;
      weighted[0][entry][warp] = weight;
      weighted[1][entry][warp] = factor * state[2 * kBlockColumns + warp];
      if constexpr (scale_groups == 2)
        weighted[2][entry][warp] = factor * state[(3 + channels) * kBlockColumns + warp];
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0U, sum, distance);
    if (lane == 0) {
      tops[warp] = top;
      sums[warp] = sum;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < blocks_per_warp; ++i) {
    const int channel_block = warp + i * kStepWarps;
    if (8 * channel_block >= dim) break;
#pragma unroll 1
    for (int entry = coded + g; entry < entries; entry += 8) {
      const bool fetched = i == 0 && entry == coded + g;
      detail::add_scaled(totals[i][0], factors[entry],
                         fetched ? full_ahead[0] : full_value(entry, channel_block, 0));
      detail::add_scaled(totals[i][1], factors[entry],
                         fetched ? full_ahead[1] : full_value(entry, channel_block, 1));
    }
  }
#pragma unroll 1
  for (int index = 0; index < segments; ++index) {
    if (index > 0) {
      range = tables.segment(slot, head, coded_rows, index, range.first_split + range.splits);
      maps = tables.maps[range.epoch * tables.num_heads + head].value;
    }
    const int last_entry = range.first_split + range.splits;
    if (thread < 32 * columns) {
#pragma unroll
      for (int i = 0; i <= scale_groups; ++i) {
        float total = 0.0F;
#pragma unroll 1
        for (int entry = range.first_split + lane; entry < last_entry; entry += 32)
          total += weighted[i][entry][warp];
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
          total += __shfl_xor_sync(~0U, total, distance);
        if (lane == i) reinterpret_cast<float*>(segment_sums + i)[warp] = total;
      }
    }
    if (channels == 0) __syncthreads();  // values may have a mean but no bits
#pragma unroll 1
    // One pass, unless there are more channels than threads.
    for (int base = 0; base < channels; base += together) {
      const int own = base + thread % together, end = end_of(thread / together);
      Sums part = {};
      if (own < channels) {
        int entry = first_of(thread / together);
        if (index == 0 && base == 0) {
#pragma unroll
          for (int i = 0; i < kEntriesAhead; ++i) {
            if (entry + i < end) detail::add_scaled(part, factors[entry + i], coded_ahead[i]);
          }
          entry += kEntriesAhead;
        }
#pragma unroll 4
        for (; entry < end; ++entry)
          detail::add_scaled(part, factors[entry], coded_values(entry, own));
      }
      parts[thread] = part;
      __syncthreads();
      if (thread < together && own < channels) {
        const auto summed = [&](int channel) {
          Sums sum = parts[channel];
#pragma unroll 1
          for (int i = 1; i < sum_parts; ++i)
            detail::add_scaled(sum, 1.0F, parts[channel + i * together]);
          return sum;
        };
        Sums total = summed(thread);
        // Codes are mid-rise: a plane of w bits is centred at (2^w - 1) / 2.
        if (form == CodedForm::codes) {
          const int bits = tables.compressed[head].value_widths[own / kCodeUnit];
          const float centre =
              -0.5F * static_cast<float>(((1 << bits) - 1) * value_weight(bits, own));
          const int group =
              scale_groups == 2 && own / kCodeUnit >= tables.compressed[head].first_value_units ? 2
                                                                                                : 1;
          if (channel_below(bits, own) >= 0)
            detail::add_scaled(total, -1.0F, summed(channel_below(bits, thread)));
          detail::add_scaled(total, centre, segment_sums[group]);
        }
        coefficients[own] = total;
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < blocks_per_warp; ++i) {
      const int channel_block = warp + i * kStepWarps;
      if (8 * channel_block >= dim) break;
      if (i > 0 || index > 0) fetch_maps(channel_block);
      const auto add = [&](int step_of_16, const float4& map) {
        const Sums low = coefficients[16 * step_of_16 + g],
                   high = coefficients[16 * step_of_16 + 8 + g];
        detail::add_scaled(totals[i][0], map.x, low);
        detail::add_scaled(totals[i][0], map.z, high);
        detail::add_scaled(totals[i][1], map.y, low);
        detail::add_scaled(totals[i][1], map.w, high);
      };
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        if (16 * k >= channels) break;
        if constexpr (wide)
          add(k, ahead[k]);
        else
          add(k, maps.reader.widened(ahead[k]));
      }
#pragma unroll 4
      for (int k = kInFlight; k < channels / 16; ++k)
        add(k, maps.reader.template quad_of<wide>((k * (dim / 8) + channel_block) * 32 + lane));
      if (g == 0 && maps.mean != nullptr) {
        detail::add_scaled(totals[i][0], maps.mean[8 * channel_block + 2 * t], segment_sums[0]);
        detail::add_scaled(totals[i][1], maps.mean[8 * channel_block + 2 * t + 1], segment_sums[0]);
      }
    }
    __syncthreads();
  }
  // Lane (g, t) writes column g.
  const int index = block * kBlockColumns + g;
  const bool writes = g < columns && index < step.columns();
  const std::int64_t token =
      first_row + static_cast<std::int64_t>(blockIdx.z) * step.m + index / step.group;
  const int query_head = head * step.group + index % step.group;
  const float scale = out.sum != nullptr ? 1.0F : 1.0F / sums[g % columns];
#pragma unroll
  for (int i = 0; i < blocks_per_warp; ++i) {
    const int first_channel = 8 * (warp + i * kStepWarps);
    if (first_channel >= dim) break;
    float* target = out.data == nullptr ? nullptr
                                        : out.data + token * out.token_stride +
                                              query_head * out.head_stride + first_channel + 2 * t;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float own = detail::of_column(detail::sum_over_rows(totals[i][half]), g);
      if (writes && target != nullptr) target[half] = scale * own;
    }
  }
  if (writes && thread < 32 && t == 0 && out.lse != nullptr) {
    out.lse[token * out.lse_stride + query_head] =
        0.69314718F * (out.sum != nullptr ? tops[g] : tops[g] + log2f(sums[g]));
    if (out.sum != nullptr) out.sum[token * out.lse_stride + query_head] = sums[g];
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
