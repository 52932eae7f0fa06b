// SPDX-License-Identifier: Apache-2.0
/// @file cuda/store/merge_segments.cuh  Merges a segment into its successor: re-projects the older
/// coefficients onto the newer basis, C' = C (decoder_old encoder_new).
///
/// Means do not move, so nothing else is added. A row loses its part outside the newer basis, and
/// is rounded to the stored type once more.
#pragma once

#include <cstdint>
#include <limits>

#include "lowrankkv/cuda/epochs/host_epochs.cuh"
#include "lowrankkv/cuda/store/store_rows.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

namespace detail {

/// Element (row, channel) of a plain tile.
__device__ inline float plain_element(const std::uint8_t* tile, const HeadTiles& layout, Part part,
                                      DType type, int row, int channel) {
  return from_bits(
      type, *reinterpret_cast<const std::uint16_t*>(tile + layout.plain_byte(part, row, channel)));
}

}  // namespace detail

inline constexpr int kTransitionColumns = 16;  ///< new coefficients of a block of transition_kernel

/// @brief transitions [sequence, head, part, most, most] = decoder_old encoder_new. Grid: pieces of
/// kTransitionColumns new coefficients x heads x (sequences x 2).
/// @param most  the largest rank
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    transition_kernel(LayerView tables, MergePlans plans, int most, float* transitions) {
  __shared__ float encoder[kTransitionColumns][kMaxHeadDim];
  const int head = static_cast<int>(blockIdx.y), dim = tables.head_dim,
            first = static_cast<int>(blockIdx.x) * kTransitionColumns,
            sequence = static_cast<int>(blockIdx.z) / 2;
  const MergePlan plan = plans.of(sequence);
  if (const int2 rows = plans.rows_of(tables, plan, head); rows.x >= rows.y) return;
  const Part part = blockIdx.z % 2 == 0 ? Part::key : Part::value;
  const PartMaps& from = tables.maps[plan.from * tables.num_heads + head].of(part);
  const PartMaps& to = tables.maps[plan.into * tables.num_heads + head].of(part);
  for (int item = static_cast<int>(threadIdx.x); item < kTransitionColumns * dim;
       item += kStoreThreads) {
    const int channel = first + item / dim;
    encoder[item / dim][item % dim] =
        channel < to.rank ? to.encoder.element(channel, item % dim, dim) : 0.0F;
  }
  __syncthreads();
  float* target = transitions + static_cast<std::size_t>((sequence * tables.num_heads + head) * 2 +
                                                         static_cast<int>(part)) *
                                    static_cast<std::size_t>(most * most);
  for (int channel = static_cast<int>(threadIdx.x); channel < from.rank; channel += kStoreThreads) {
    float sums[kTransitionColumns] = {};
    for (int d = 0; d < dim; ++d) {
      const float value = from.decoder.element(channel, d, dim);
#pragma unroll
      for (int i = 0; i < kTransitionColumns; ++i) sums[i] = fmaf(value, encoder[i][d], sums[i]);
    }
    for (int i = 0; i < kTransitionColumns && first + i < most; ++i)
      target[channel * most + first + i] = sums[i];
  }
}

/// @brief Shared memory of merge_kernel in bytes.
/// @param coded_groups  as of merge_kernel
/// @param most          the largest rank
/// @param tile_bytes    of the largest tile of codes
inline std::size_t merge_bytes(int coded_groups, int most, int tile_bytes) {
  const int old_rows = 4 * kStoreRows * (most + 1),
            new_rows = coded_groups > 0 ? old_rows + 4 * kStoreRows * coded_groups +
                                              kMaxUnits * kCodeUnit *
                                                  static_cast<int>(sizeof(detail::CodePlan)) +
                                              tile_bytes
                                        : 2 * kStoreRows * plain_stride(most);
  return static_cast<std::size_t>(old_rows + new_rows);
}

namespace detail {

/// Decodes rows [from, until) of a tile of codes to f32 coefficients, rows [64, stride]; gains and
/// steps are in them.
/// @tparam scale_groups  of the channels
template <Part part, int scale_groups>
__device__ void decode_tile(const std::uint8_t* tile, const HeadTiles& layout, const PartMaps& maps,
                            int from, int until, float* rows, int stride) {
  int* codes = reinterpret_cast<int*>(rows);
  for (int item = static_cast<int>(threadIdx.x); item < (until - from) * maps.rank;
       item += kStoreThreads)
    codes[(from + item / maps.rank) * stride + item % maps.rank] = 0;
  const std::uint8_t* at = tile + layout.offset(part);
  __syncthreads();
  for (int unit = 0; unit < layout.units(part); ++unit) {
    const int bits = layout.width(part, unit);
    for (int item = static_cast<int>(threadIdx.x); item < (until - from) * kCodeUnit;
         item += kStoreThreads) {
      const int row = from + item / kCodeUnit, channel = item % kCodeUnit;
      const TileChannel place = maps.channels[unit * kCodeUnit + channel];
      if (place.source < 0) continue;
      const CodePlace own =
          part == Part::key ? key_place(bits, row, channel) : value_place(bits, row, channel);
      const std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(at + own.word);
      atomicAdd(codes + row * stride + place.source,
                static_cast<int>((word >> own.shift & ((1U << bits) - 1U))
                                 << place.shift));  // planes of one code may be in one unit
    }
    at += code_unit_bytes(bits);
  }
  __syncthreads();
  for (int item = static_cast<int>(threadIdx.x); item < (until - from) * maps.rank;
       item += kStoreThreads) {
    const int row = from + item / maps.rank, channel = item % maps.rank, bits = maps.bits[channel];
    const float level = bits == 0 ? 0.0F
                                  : static_cast<float>(codes[row * stride + channel]) -
                                        0.5F * static_cast<float>((1 << bits) - 1);
    const float step =
        maps.inverse_steps == nullptr ? 1.0F : 1.0F / __ldg(maps.inverse_steps + channel);
    rows[row * stride + channel] =
        level *
        stored_gain(tile, layout, part, row,
                    scale_groups == 2 && channel >= maps.first_coded ? 1 : 0) *
        step;
  }
}

}  // namespace detail

/// @brief Rewrites the rows of each sequence's plan under the newer epoch. Grid: 64-row pieces x
/// heads x sequences.
/// @tparam coded_groups  scale groups of tiles of codes; 0: plain tiles, of `type`
/// @param most         the largest rank
/// @param transitions  of transition_kernel
template <int coded_groups>
__global__ void __launch_bounds__(kStoreThreads)
    merge_kernel(LayerEdit tables, MergePlans plans, int most, const float* transitions,
                 DType type) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  constexpr bool codes = coded_groups > 0;
  constexpr int scale_groups = codes ? coded_groups : 1;
  const int head = static_cast<int>(blockIdx.y), sequence = static_cast<int>(blockIdx.z),
            stride = plain_stride(most);
  const MergePlan plan = plans.of(sequence);
  const int2 rows = plans.rows_of(tables, plan, head);
  const int tile_row = (rows.x / kStoreRows + static_cast<int>(blockIdx.x)) * kStoreRows,
            from = max(rows.x - tile_row, 0), until = min(rows.y - tile_row, kStoreRows);
  if (from >= until) return;
  float* old_rows = reinterpret_cast<float*>(shared_memory);  // [kStoreRows, most + 1]
  [[maybe_unused]] std::uint16_t* new_rows =
      reinterpret_cast<std::uint16_t*>(old_rows + kStoreRows * (most + 1));
  __shared__ std::uint8_t* tiles[kStoreRows / kPlainRows];
  const HeadTiles& layout = tables.compressed[head];
  const HeadMaps &maps = tables.maps[plan.into * tables.num_heads + head],
                 &old_maps = tables.maps[plan.from * tables.num_heads + head];
  const std::int32_t* table = tables.page_table(RowList::compressed, plan.slot, head);
  if (threadIdx.x < static_cast<unsigned>(kStoreRows / layout.rows) &&
      static_cast<int>(threadIdx.x) * layout.rows < until) {
    tiles[threadIdx.x] =
        tables.tile(table, layout, tile_row / layout.rows + static_cast<int>(threadIdx.x));
  }
  detail::CodeMemory memory{};
  if constexpr (codes) {
    memory.coefficients = reinterpret_cast<float*>(new_rows);
    memory.inverse_gains = memory.coefficients + kStoreRows * (most + 1);
    memory.plan =
        reinterpret_cast<detail::CodePlan*>(memory.inverse_gains + scale_groups * kStoreRows);
    memory.tile = reinterpret_cast<std::uint32_t*>(memory.plan + kMaxUnits * kCodeUnit);
  }
  __syncthreads();
  if constexpr (codes) {
    for (int word = static_cast<int>(threadIdx.x); word < layout.bytes / 4; word += kStoreThreads)
      memory.tile[word] = reinterpret_cast<const std::uint32_t*>(tiles[0])[word];
    __syncthreads();
  }
  for (const Part part : {Part::key, Part::value}) {
    const PartMaps& own = maps.of(part);
    const int rank = own.rank;
    const float* transition =
        transitions + static_cast<std::size_t>((sequence * tables.num_heads + head) * 2 +
                                               static_cast<int>(part)) *
                          static_cast<std::size_t>(most * most);
    const auto new_coefficient = [&](int row, int channel) {
      float sum = 0.0F;
#pragma unroll 8
      for (int k = 0; k < rank; ++k)
        sum = fmaf(old_rows[row * (most + 1) + k], transition[k * most + channel], sum);
      return sum;
    };
    if constexpr (codes) {
      const std::uint8_t* tile = reinterpret_cast<const std::uint8_t*>(memory.tile);
      if (part == Part::key)
        detail::decode_tile<Part::key, scale_groups>(tile, layout, old_maps.key, from, until,
                                                     old_rows, most + 1);
      else
        detail::decode_tile<Part::value, scale_groups>(tile, layout, old_maps.value, from, until,
                                                       old_rows, most + 1);
      detail::load_plan(own, memory.plan);
      __syncthreads();
      for (int item = static_cast<int>(threadIdx.x); item < (until - from) * rank;
           item += kStoreThreads) {
        const int row = from + item / rank, channel = item % rank;
        memory.coefficients[row * (rank + 1) + channel] =
            new_coefficient(row, channel) *
            (own.inverse_steps == nullptr ? 1.0F : __ldg(own.inverse_steps + channel));
      }
      __syncthreads();
      detail::store_gains<scale_groups>(layout, own, part, memory, from, until);
      __syncthreads();
      if (part == Part::key)
        detail::store_codes<Part::key, scale_groups, true>(layout, memory, rank + 1, from, until);
      else
        detail::store_codes<Part::value, scale_groups, true>(layout, memory, rank + 1, from, until);
    } else {
      for (int item = static_cast<int>(threadIdx.x); item < (until - from) * rank;
           item += kStoreThreads) {
        const int row = from + item / rank, channel = item % rank;
        old_rows[row * (most + 1) + channel] = detail::plain_element(
            tiles[row / layout.rows], layout, part, type, row % layout.rows, channel);
      }
      __syncthreads();
      const int channels = layout.channels(part);
      for (int item = static_cast<int>(threadIdx.x); item < (until - from) * channels;
           item += kStoreThreads) {
        const int row = from + item / channels, channel = item % channels;
        new_rows[row * stride + channel] =
            channel < rank ? to_bits(type, new_coefficient(row, channel)) : std::uint16_t{0};
      }
      __syncthreads();
      detail::store_plain(layout, tiles, part, new_rows, stride, from, until, false);
    }
    __syncthreads();
  }
  if constexpr (codes) {
    for (int word = static_cast<int>(threadIdx.x); word < layout.bytes / 4; word += kStoreThreads)
      reinterpret_cast<std::uint32_t*>(tiles[0])[word] = memory.tile[word];
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
