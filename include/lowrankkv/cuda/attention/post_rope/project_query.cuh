// SPDX-License-Identifier: Apache-2.0
/// @file cuda/attention/post_rope/project_query.cuh  Projects queries with the key maps and writes
/// them as operands of the kernels that attend to compressed rows.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/attention/post_rope/query_operands.cuh"
#include "lowrankkv/cuda/tiles/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Most columns of a block of project_query_kernel.
inline constexpr int kProjectColumns = 16;
/// @brief Operands of the map that a lane has in flight before the queries arrive: all of them, up
/// to 128 channels with head_dim 128.
inline constexpr int kMapTiles = 8;

/// @brief Shared memory of project_query_kernel in bytes, for `columns` columns per block.
inline std::size_t project_query_bytes(int columns, int head_dim, int channels) {
  const std::size_t blocks =
      static_cast<std::size_t>((columns + kBlockColumns - 1) / kBlockColumns);
  return sizeof(float4) * (blocks * static_cast<std::size_t>(head_dim + channels) +
                           static_cast<std::size_t>(kStepWarps * 16));
}

namespace detail {

/// Which operands of a map [channels / 16, head_dim / 8] a warp multiplies: one block of 16
/// channels, and some of the steps of 8 over head_dim.
struct MapShare {
  int channel_blocks, steps, parts, first, end, channel_block;
  __device__ MapShare(int width, int head_dim)
      : channel_blocks(width / 16),
        steps(head_dim / 8),
        parts(max(1, kStepWarps / max(1, channel_blocks))) {
    const int warp = static_cast<int>(threadIdx.x) / 32, per_part = (steps + parts - 1) / parts,
              part = warp / max(1, channel_blocks);
    channel_block = parts == 1 ? warp : warp % max(1, channel_blocks);
    first = parts == 1 ? 0 : min(steps, part * per_part);
    end = parts == 1 ? steps : part < parts ? min(steps, first + per_part) : first;
  }
};

/// coded [blocks, channels] = queries times the map, on tensor cores, to f32 accuracy: both factors
/// are sums of two tf32 numbers. All threads call it and are synchronised at the end.
///
/// A block runs through this once, and fetching instructions takes longer than executing them. So
/// loops that most blocks run once are not unrolled.
/// @param map  the first kMapTiles operands of this warp's share. Those of channels beyond 256
///   replace them.
/// @tparam wide  the map is f32; else 16 bits
template <bool wide>
__device__ inline void project_columns(const float* plain, int blocks, int head_dim, int channels,
                                       const MapShare& share, const PartMaps& maps,
                                       MapWords<wide> (&map)[kMapTiles], float4* scratch,
                                       float* coded, int* largest) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4,
            width = 16 * share.channel_blocks, steps = share.end - share.first;
#pragma unroll 1
  // One pass, unless there are more than 256 channels.
  for (int base = 0; base < share.channel_blocks; base += kStepWarps) {
    const int own = base + share.channel_block;
    const auto* words = static_cast<const MapWords<wide>*>(maps.reader.data) +
                        (own * share.steps + share.first) * 32 + lane;
    if (base > 0 && own < share.channel_blocks) {
#pragma unroll
      for (int i = 0; i < kMapTiles; ++i)
        map[i] = i < steps ? __ldg(words + 32 * i) : MapWords<wide>{};
    }
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      float sums[4] = {};
      if (own < share.channel_blocks) {
        const float* query =
            plain + (block * head_dim + 8 * share.first + 2 * t) * kBlockColumns + g % 4;
        const auto add = [&](const MapWords<wide>& word, int step) {
          float4 a;
          if constexpr (wide)
            a = word;
          else
            a = maps.reader.widened(word);
          // Columns 0 to 3 are the queries rounded to tf32, columns 4 to 7 their remainders.
          const float q0 = query[8 * kBlockColumns * step],
                      q1 = query[(8 * step + 1) * kBlockColumns];
          const float b0 = g < 4 ? q0 : beyond_tf32(q0), b1 = g < 4 ? q1 : beyond_tf32(q1);
          mma_tf32(sums, {beyond_tf32(a.x), beyond_tf32(a.z), beyond_tf32(a.y), beyond_tf32(a.w)},
                   b0, b1);
          mma_tf32(sums, {a.x, a.z, a.y, a.w}, b0, b1);
        };
#pragma unroll
        for (int i = 0; i < kMapTiles; ++i) {
          if (i < steps) add(map[i], i);
        }
#pragma unroll 1
        for (int i = kMapTiles; i < steps; ++i) add(__ldg(words + 32 * i), i);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[i] += __shfl_xor_sync(~0U, sums[i], 2);  // columns 2t and 2t + 1 for t < 2
      if (t < 2) {
        float2* target = reinterpret_cast<float2*>(scratch + threadIdx.x / 32 * 16);
        target[2 * g + t] = {sums[0], sums[1]};
        target[2 * (g + 8) + t] = {sums[2], sums[3]};
      }
      __syncthreads();
      const int used = min(width - 16 * base, 16 * kStepWarps) * kBlockColumns,
                part_stride = min(share.channel_blocks, kStepWarps) * 16 * kBlockColumns;
      const float* parts = reinterpret_cast<const float*>(scratch);
#pragma unroll 1
      // A multiple of 64 items.
      for (int item = static_cast<int>(threadIdx.x); item < used; item += kStepThreads) {
        float total = parts[item];
#pragma unroll 1
        for (int part = 1; part < share.parts; ++part) total += parts[part * part_stride + item];
        coded[(block * channels + 16 * base) * kBlockColumns + item] = total;
        float top = fabsf(total);  // lanes of equal lane % 4 have the same column
#pragma unroll
        for (int distance = 16; distance >= kBlockColumns; distance /= 2)
          top = fmaxf(top, __shfl_xor_sync(~0U, top, distance));
        if (lane < kBlockColumns && top > 0.0F)
          atomicMax(largest + block * kBlockColumns + lane, __float_as_int(top));
      }
      __syncthreads();
    }
  }
}

}  // namespace detail

/// @brief Sequences that one block of project_query_kernel projects for: several, if they fit one
/// block of columns and all sequences share their maps.
__host__ __device__ constexpr int project_sequences(int columns, bool segmented) {
  return segmented ? 1 : kBlockColumns / columns > 1 ? kBlockColumns / columns : 1;
}

/// @brief Writes a step's operands and scales for the compressed rows, for every segment. Grid: (KV
/// heads x segments) x groups of project_sequences() x groups of kProjectColumns columns.
/// @tparam wide  maps are f32; else 16 bits
/// @tparam packs  project_sequences() is more than one
/// @param channels  largest number of key channels of a head's tiles
template <DType coded_type, CodedForm form, bool wide, bool packs>
__global__ void __launch_bounds__(kStepThreads, 2)
    project_query_kernel(LayerView tables, AttentionStep step, Batch batch, StepQueries queries,
                         int channels, int first_sequence) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  release_next_kernel();  // it may fetch its tiles meanwhile
  const int heads = tables.num_heads, head = static_cast<int>(blockIdx.x) % heads,
            index = static_cast<int>(blockIdx.x) / heads, head_dim = tables.head_dim;
  // Loads without dependencies are issued before the first synchronisation. If sequences have no
  // epochs of their own, the list's length is not read: queries are then projected for empty lists
  // too.
  const bool segmented = tables.max_segments > 1;
  const int together = packs ? project_sequences(step.columns(), segmented) : 1,
            first_in_batch = static_cast<int>(blockIdx.y) * together;
  const int sequences = packs ? min(together, batch.count - first_in_batch) : 1,
            slot = batch.slot(static_cast<unsigned>(first_in_batch));
  if (segmented && slot < 0) return;
  const int list_rows = segmented ? tables.num_rows(RowList::compressed, slot, head) : 0;
  if (segmented && index >= tables.num_segments(slot, list_rows)) return;
  const int first_column = static_cast<int>(blockIdx.z) * kProjectColumns,
            own_columns = min(kProjectColumns, step.columns() - first_column),
            columns = sequences * own_columns;
  const int blocks = (columns + kBlockColumns - 1) / kBlockColumns,
            thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  float4* scratch = reinterpret_cast<float4*>(shared_memory);  // [warps, 16]
  float* plain =
      reinterpret_cast<float*>(scratch + kStepWarps * 16);   // [blocks, head_dim, columns]
  float* coded = plain + blocks * head_dim * kBlockColumns;  // [blocks, channels, columns]
  __shared__ int largest[kProjectColumns];                   // bits of non-negative f32
  __shared__ float shifts[kProjectColumns][kMaxHeadDim / 16];
  // By scale group. At most 256 channels x 32512 x 255, which 31 bits hold.
  __shared__ int twice_centres[2][kProjectColumns];
  __shared__ HeadTiles layout;
  copy_tiles(tables.compressed + head, &layout);
  const PartMaps maps =
      tables.maps[tables.segment(slot, head, list_rows, index, 0).epoch * heads + head].key;
  if (thread < kProjectColumns) {
    largest[thread] = 0;
    twice_centres[0][thread] = twice_centres[1][thread] = 0;
  }
  const detail::MapShare share(maps.width, head_dim);
  detail::MapWords<wide> map[kMapTiles];
  const auto* words = static_cast<const detail::MapWords<wide>*>(maps.reader.data) +
                      (share.channel_block * share.steps + share.first) * 32 + lane;
#pragma unroll
  for (int i = 0; i < kMapTiles; ++i) {
    if (share.channel_block < share.channel_blocks && share.first + i < share.end)
      map[i] = __ldg(words + 32 * i);
  }
#pragma unroll 1
  // Sixteen neighbouring lanes have one column: head_dim is a multiple of 16.
  for (int item = thread; item < blocks * kBlockColumns * head_dim; item += kStepThreads) {
    const int own = item / head_dim, channel = item % head_dim;
    const float value =
        own < columns ? queries.at(step, first_in_batch + (packs ? own / own_columns : 0), head,
                                   first_column + (packs ? own % own_columns : own), channel)
                      : 0.0F;
    plain[(own / kBlockColumns * head_dim + channel) * kBlockColumns + own % kBlockColumns] = value;
    if (maps.mean == nullptr) continue;
    float product = value * maps.mean[channel];
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2)
      product += __shfl_xor_sync(~0U, product, distance);
    if (lane % 16 == 0) shifts[own][channel / 16] = product;
  }
  __syncthreads();
  detail::project_columns<wide>(plain, blocks, head_dim, channels, share, maps, map, scratch, coded,
                                largest);
  // Attention expects blocks of columns per sequence. Without packing these are the sequence's own
  // blocks. With packing each sequence gets one block, whose columns beyond its own are zeros.
  const int targets = packs ? sequences : blocks;
  const auto block_row = [&](int target) {
    const int sequence = first_sequence + first_in_batch + (packs ? target : 0);
    return step.query_row(sequence, heads, head, index) +
           static_cast<std::size_t>(first_column / kBlockColumns + (packs ? 0 : target));
  };
  const auto column_of = [&](int target, int column) {
    return !packs                 ? target * kBlockColumns + column
           : column < own_columns ? target * own_columns + column
                                  : -1;
  };
#pragma unroll 1
  for (int item = thread; item < targets * layout.key_units * 32; item += kStepThreads) {
    const int unit = item / 32 % layout.key_units, target = item / 32 / layout.key_units,
              column = column_of(target, lane / 8), block = packs ? 0 : target;
    const float* values = coded + block * channels * kBlockColumns;
    // The lane that holds this operand in the packed block.
    const int source = packs ? max(0, column) * 8 + lane % 8 : lane;
    uint2 operand;
    if constexpr (form == CodedForm::plain) {
      operand = detail::plain_operand<coded_type>(values, maps.width, unit, source,
                                                  largest + block * kBlockColumns);
    } else {
      int sum = 0;
      operand = detail::code_operand(values, unit, source, largest + block * kBlockColumns, sum);
      // Codes are mid-rise: a plane of w bits is centred at (2^w - 1) / 2. The sum is over the same
      // integers that the products use, so its order does not matter.
      sum += __shfl_xor_sync(~0U, sum, 1);
      sum += __shfl_xor_sync(~0U, sum, 2);
      if (lane % 8 == 0 && column >= 0)
        atomicAdd(twice_centres[unit < layout.first_key_units ? 0 : 1] + column,
                  -sum * ((1 << layout.key_widths[unit]) - 1));
    }
    step.coded_queries[(block_row(target) * static_cast<std::size_t>(step.coded_units) +
                        static_cast<std::size_t>(unit)) *
                           32 +
                       static_cast<std::size_t>(lane)] = column < 0 ? uint2{0, 0} : operand;
  }
  __syncthreads();
  if (thread < targets * kBlockColumns) {
    const int column = column_of(thread / kBlockColumns, thread % kBlockColumns);
    ColumnScale scale;
    if (column >= 0) {
      scale.unit = __int_as_float(largest[column]);
#pragma unroll 1
      for (int i = 0; maps.mean != nullptr && i < head_dim / 16; ++i)
        scale.shift += shifts[column][i];
    }
    if (form == CodedForm::codes && column >= 0) {
      scale.unit /= 32512.0F;
      scale.constant = 0.5F * static_cast<float>(twice_centres[0][column]) * scale.unit;
      scale.second_constant = 0.5F * static_cast<float>(twice_centres[1][column]) * scale.unit;
    }
    step.coded_scales[block_row(thread / kBlockColumns) * kBlockColumns +
                      static_cast<std::size_t>(thread % kBlockColumns)] = scale;
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
