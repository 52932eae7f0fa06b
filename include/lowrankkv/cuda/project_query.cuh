// SPDX-License-Identifier: Apache-2.0
/// @file cuda/project_query.cuh  Queries meet compressed rows as coefficients: projected by the maps, as operands of the attention kernels.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/query_operands.cuh"
#include "lowrankkv/cuda/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Columns of a block of project_query_kernel, at most.
inline constexpr int kProjectColumns = 16;
/// @brief Its warps, and operands of the map that a warp has in flight before the queries arrive.
inline constexpr int kStepWarps = kStepThreads / 32, kMapTiles = 8;

/// @brief Shared memory of project_query_kernel in bytes, for so many columns a block.
inline std::size_t project_query_bytes(int columns, int head_dim, int channels) {
  const std::size_t blocks = static_cast<std::size_t>((columns + kBlockColumns - 1) / kBlockColumns);
  return sizeof(float4) * (blocks * static_cast<std::size_t>(head_dim + channels) + static_cast<std::size_t>(kStepWarps * 16));
}

namespace detail {

/// Which operands of a map [channels / 16, head_dim / 8] a warp multiplies: those of one block of 16 channels, some of the steps over head_dim.
struct MapShare {
  int channel_blocks, steps, parts, first, end, channel_block;
  __device__ MapShare(int width, int head_dim) : channel_blocks(width / 16), steps(head_dim / 8), parts(max(1, kStepWarps / max(1, channel_blocks))) {
    const int warp = static_cast<int>(threadIdx.x) / 32, per_part = (steps + parts - 1) / parts, part = warp / max(1, channel_blocks);
    channel_block = parts == 1 ? warp : warp % max(1, channel_blocks);
    first = parts == 1 ? 0 : min(steps, part * per_part);
    end = parts == 1 ? steps : part < parts ? min(steps, first + per_part) : first;
  }
};

/// coded [blocks, channels] = queries times the map: on tensor cores, both as sums of two tf32, so that f32 is what it comes to. `map` holds
/// the first kMapTiles operands of this warp's share. All threads call it and are synchronised at the end.
__device__ inline void project_columns(const float* plain, int blocks, int head_dim, int channels, const MapShare& share, const PartMaps& maps, const float4 (&map)[kMapTiles], float4* scratch,
                                       float* coded, int* largest) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4, width = 16 * share.channel_blocks, steps = share.end - share.first;
  for (int base = 0; base < share.channel_blocks; base += kStepWarps) {  // once, unless there are more than 256 channels
    const int own = base + share.channel_block;
    const auto operand = [&](int step) { return maps.reader.quad((own * share.steps + share.first + step) * 32 + lane); };
    for (int block = 0; block < blocks; ++block) {
      float sums[4] = {};
      if (own < share.channel_blocks) {
        const float* query = plain + (block * head_dim + 8 * share.first + 2 * t) * kBlockColumns + g % 4;
        const auto add = [&](const float4& a, int step) {
          // Columns 0 to 3 are the queries' first bits, 4 to 7 what is left.
          const float q0 = query[8 * kBlockColumns * step], q1 = query[(8 * step + 1) * kBlockColumns];
          const float b0 = g < 4 ? q0 : beyond_tf32(q0), b1 = g < 4 ? q1 : beyond_tf32(q1);
          mma_tf32(sums, {beyond_tf32(a.x), beyond_tf32(a.z), beyond_tf32(a.y), beyond_tf32(a.w)}, b0, b1);
          mma_tf32(sums, {a.x, a.z, a.y, a.w}, b0, b1);
        };
        #pragma unroll
        for (int i = 0; i < kMapTiles; ++i) {
          if (i < steps) add(base == 0 ? map[i] : operand(i), i);
        }
        #pragma unroll 4
        for (int i = kMapTiles; i < steps; ++i) add(operand(i), i);
      }
      #pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] += __shfl_xor_sync(~0U, sums[i], 2);  // columns 2t and 2t + 1 of t < 2
      if (t < 2) {
        float2* target = reinterpret_cast<float2*>(scratch + threadIdx.x / 32 * 16);
        target[2 * g + t] = {sums[0], sums[1]};
        target[2 * (g + 8) + t] = {sums[2], sums[3]};
      }
      __syncthreads();
      const int used = min(width - 16 * base, 16 * kStepWarps) * kBlockColumns, apart = min(share.channel_blocks, kStepWarps) * 16 * kBlockColumns;
      const float* parts = reinterpret_cast<const float*>(scratch);
      for (int item = static_cast<int>(threadIdx.x); item < used; item += kStepThreads) {  // a multiple of 64
        float total = parts[item];
        for (int part = 1; part < share.parts; ++part) total += parts[part * apart + item];
        coded[(block * channels + 16 * base) * kBlockColumns + item] = total;
        float top = fabsf(total);  // of this lane's column: lanes that are four apart have the same
        for (int distance = 16; distance >= kBlockColumns; distance /= 2) top = fmaxf(top, __shfl_xor_sync(~0U, top, distance));
        if (lane < kBlockColumns && top > 0.0F) atomicMax(largest + block * kBlockColumns + lane, __float_as_int(top));
      }
      __syncthreads();
    }
  }
}

}  // namespace detail

/// @brief Writes the operands and scales of a step for the compressed rows, for every segment. Grid: (KV heads x segments) x sequences x groups of
/// kProjectColumns columns.
/// @param channels  largest number of key channels of a head's tiles
template <DType coded_type>
__global__ void __launch_bounds__(kStepThreads) project_query_kernel(Tables tables, AttentionStep step, Batch batch, StepQueries queries, int channels, CodedForm form, int first_sequence) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  release_next_kernel();  // it fetches tiles while this one runs
  const int heads = tables.num_heads, head = static_cast<int>(blockIdx.x) % heads, index = static_cast<int>(blockIdx.x) / heads, slot = batch.slots[blockIdx.y], head_dim = tables.head_dim;
  const int list_rows = tables.num_rows(RowList::compressed, slot, head);
  if (index >= tables.num_segments(slot, list_rows)) {
    wait_for_last_kernel();
    return;
  }
  const int first_column = static_cast<int>(blockIdx.z) * kProjectColumns, columns = min(kProjectColumns, step.columns() - first_column);
  const int blocks = (columns + kBlockColumns - 1) / kBlockColumns, thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  float4* scratch = reinterpret_cast<float4*>(shared_memory);                            // [warps, 16]
  float* plain = reinterpret_cast<float*>(scratch + kStepWarps * 16);                    // [blocks, head_dim, columns]
  float* coded = plain + blocks * head_dim * kBlockColumns;                              // [blocks, channels, columns]
  __shared__ int largest[kProjectColumns];                                               // bits of numbers that are not negative
  __shared__ float shifts[kProjectColumns][kMaxHeadDim / 16];
  __shared__ unsigned long long twice_centres[2][kProjectColumns];  // by scale group
  __shared__ HeadTiles layout;
  // Everything that depends on nothing is on its way before anything is waited for.
  copy_tiles(tables.compressed + head, &layout);
  const PartMaps maps = tables.maps[tables.segment(slot, list_rows, index, 0).epoch * heads + head].key;
  if (thread < kProjectColumns) {
    largest[thread] = 0;
    twice_centres[0][thread] = twice_centres[1][thread] = 0;
  }
  const detail::MapShare share(maps.width, head_dim);
  float4 map[kMapTiles];
  #pragma unroll
  for (int i = 0; i < kMapTiles; ++i) {
    const bool mine = share.channel_block < share.channel_blocks && share.first + i < share.end;
    map[i] = mine ? maps.reader.quad((share.channel_block * share.steps + share.first + i) * 32 + lane) : float4{};
  }
  for (int item = thread; item < blocks * kBlockColumns * head_dim; item += kStepThreads) {  // sixteen lanes have one column: head_dim is a multiple
    const int own = item / head_dim, channel = item % head_dim;
    const float value = own < columns ? queries.at(step, static_cast<int>(blockIdx.y), head, first_column + own, channel) : 0.0F;
    plain[(own / kBlockColumns * head_dim + channel) * kBlockColumns + own % kBlockColumns] = value;
    if (maps.mean == nullptr) continue;
    float product = value * maps.mean[channel];
    for (int distance = 8; distance > 0; distance /= 2) product += __shfl_xor_sync(~0U, product, distance);
    if (lane % 16 == 0) shifts[own][channel / 16] = product;
  }
  __syncthreads();
  detail::project_columns(plain, blocks, head_dim, channels, share, maps, map, scratch, coded, largest);
  const std::size_t block_row = step.query_row(first_sequence + static_cast<int>(blockIdx.y), heads, head, index) + static_cast<std::size_t>(first_column / kBlockColumns);
  uint2* target = step.coded_queries + block_row * static_cast<std::size_t>(step.coded_units) * 32;
  for (int item = thread; item < blocks * layout.key_units * 32; item += kStepThreads) {
    const int unit = item / 32 % layout.key_units, block = item / 32 / layout.key_units;
    const float* values = coded + block * channels * kBlockColumns;
    uint2& operand = target[(block * step.coded_units + unit) * 32 + lane];
    if (form == CodedForm::plain) {
      operand = detail::plain_operand<coded_type>(values, maps.width, unit, lane, largest + block * kBlockColumns);
    } else {
      int sum = 0;
      operand = detail::code_operand(values, unit, lane, largest + block * kBlockColumns, sum);
      // Codes are mid-rise: a plane of w bits is centred at (2^w - 1) / 2. Summed over the integers that the products use, in any order.
      sum += __shfl_xor_sync(~0U, sum, 1);
      sum += __shfl_xor_sync(~0U, sum, 2);
      const long long twice = -static_cast<long long>(sum) * ((1 << layout.key_widths[unit]) - 1);
      if (lane % 8 == 0) atomicAdd(twice_centres[unit < layout.first_key_units ? 0 : 1] + block * kBlockColumns + lane / 8, static_cast<unsigned long long>(twice));
    }
  }
  __syncthreads();
  if (thread < blocks * kBlockColumns) {
    ColumnScale scale;
    scale.unit = __int_as_float(largest[thread]);
    for (int i = 0; maps.mean != nullptr && i < head_dim / 16; ++i) scale.shift += shifts[thread][i];
    if (form == CodedForm::codes) {
      scale.unit /= 32512.0F;
      scale.constant = 0.5F * static_cast<float>(static_cast<long long>(twice_centres[0][thread])) * scale.unit;
      scale.second_constant = 0.5F * static_cast<float>(static_cast<long long>(twice_centres[1][thread])) * scale.unit;
    }
    step.coded_scales[block_row * kBlockColumns + static_cast<std::size_t>(thread)] = scale;
  }
  wait_for_last_kernel();  // rows at full rank are attended to at the same time; what comes after this kernel comes after that one too
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
