// SPDX-License-Identifier: Apache-2.0
/// @file cuda/attend_codes.cuh  Decode attention straight from tiles of codes: integers all the way, f32 sums of tiles.
///
/// A warp takes tiles of 64 rows from its ring. Logits are products of codes and 16-bit queries, high and low bytes in neighbouring
/// columns; weights become 16-bit integers too, relative to the largest of their tile, so that products are exact and a
/// lane owns whole logits of one column. The error is that of the two roundings: 2^-16 of the largest query
/// channel, 2^-16 of the largest weight of a tile.
/// Floor: the tiles' bytes, once, at the memory's rate.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/attention_step.cuh"
#include "lowrankkv/cuda/code_products.cuh"
#include "lowrankkv/cuda/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Halves of tiles, keys and values in turn, that a warp's ring holds.
inline constexpr int kCodeStages = 3;
/// @brief Blocks that are to share a multiprocessor: registers are cut to fit. Three where little is read for what is done, measured.
constexpr int code_blocks(int max_units, int column_blocks, int stage_bytes) { return max_units * column_blocks <= 4 ? (stage_bytes <= 2304 ? 3 : 2) : max_units * column_blocks <= 8 ? 2 : 1; }

/// @brief Partial states of the compressed lists. Grid: (splits x column groups) x heads x sequences.
/// @tparam max_units      units of values that a head may have
/// @tparam column_blocks  blocks of columns that a warp serves at once
/// @tparam resident       blocks that are to share a multiprocessor
template <int max_units, int column_blocks, int resident>
__global__ void __launch_bounds__(kAttendThreads, resident) attend_codes_kernel(Tables tables, AttentionStep step, Batch batch, int first_sequence) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  std::uint8_t* memory = shared_memory;
  __shared__ __align__(8) std::uint64_t barriers[kAttendWarps][kCodeStages];
  __shared__ uint2 shared_query[kMaxUnits * column_blocks * 32];
  __shared__ float2 gains[kAttendWarps][kCodeRows];
  __shared__ HeadTiles layout;
  __shared__ __align__(16) float factors[kAttendWarps * kBlockColumns];
  const int groups = (step.blocks + column_blocks - 1) / column_blocks;
  const int split = static_cast<int>(blockIdx.x) / groups, first_block = static_cast<int>(blockIdx.x) % groups * column_blocks;
  const int head = static_cast<int>(blockIdx.y), sequence = first_sequence + static_cast<int>(blockIdx.z), slot = batch.slots[blockIdx.z];
  const int rows = tables.num_rows(RowList::compressed, slot, head), splits = splits_of(rows);
  if (split >= splits) {
    wait_for_last_kernel();  // kernels after this one rely on it
    return;
  }
  copy_tiles(tables.compressed + head, &layout);
  __syncthreads();
  const std::int32_t* table = tables.page_table(RowList::compressed, slot, head);
  const int tiles = (rows + kCodeRows - 1) / kCodeRows, per_split = (tiles + splits - 1) / splits;
  const int first = split * per_split, last = min(tiles, first + per_split);
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const std::size_t row = static_cast<std::size_t>(sequence) * static_cast<std::size_t>(tables.num_heads) + static_cast<std::size_t>(head);
  const bool wide_gains = layout.gain_bytes() == 2;
  const int key_units = layout.key_units, used_blocks = min(column_blocks, step.blocks - first_block);
  const int key_pattern = layout.key_pattern, value_pattern = layout.value_pattern, key_bytes = layout.value_offset, value_bytes = layout.bytes - key_bytes;  // gains go with keys
  TileRing<kCodeStages> ring(memory + warp * kCodeStages * max(key_bytes, value_bytes), barriers[warp], max(key_bytes, value_bytes));
  PageWalk walk(tables, table, layout, first + warp);
  const auto tile_at = [&](int tile) { return tile < last ? walk.next(warps) : nullptr; };  // called for every warps-th tile in turn
  const std::uint8_t* next = nullptr;  // the tile of which a half was fetched last
  int next_tile = first + warp;
  const auto fetch_keys = [&] {
    next = tile_at(next_tile);
    next_tile += warps;
    ring.fetch(next, key_bytes);
  };
  const auto fetch_values = [&] { ring.fetch(next == nullptr ? nullptr : next + key_bytes, value_bytes); };
  #pragma unroll
  for (int stage = 0; stage < kCodeStages; ++stage) {
    if (stage % 2 == 0) fetch_keys();
    else fetch_values();
  }
  wait_for_last_kernel();  // for the queries; the tiles were there
  release_next_kernel();
  const std::size_t block_row = step.query_row(sequence, tables.num_heads, head, 0) + static_cast<std::size_t>(first_block);
  load_queries<column_blocks>(step.coded_queries + block_row * static_cast<std::size_t>(step.coded_units) * 32, key_units, step.coded_units, used_blocks, shared_query);
  __syncthreads();
  ColumnScale scale[column_blocks];
  float out[column_blocks][max_units][2][2] = {};
  float top[column_blocks], sum[column_blocks] = {}, weight[column_blocks] = {}, units[column_blocks];
  #pragma unroll
  for (int block = 0; block < column_blocks; ++block) {
    scale[block] = block < used_blocks ? step.coded_scales[(block_row + static_cast<std::size_t>(block)) * kBlockColumns + static_cast<std::size_t>(t)] : ColumnScale{};
    units[block] = scale[block].unit;
    top[block] = -INFINITY;
  }
  for (int tile = first + warp; tile < last; tile += warps) {
    const std::uint8_t* here = ring.wait();
    if (wide_gains) {
      const __half* stored = reinterpret_cast<const __half*>(here);
      #pragma unroll
      for (int i = 0; i < 2; ++i) gains[warp][lane + 32 * i] = {__half2float(stored[lane + 32 * i]), __half2float(stored[kCodeRows + lane + 32 * i])};
    }
    #pragma unroll
    for (int i = 0; i < 2 && !wide_gains; ++i) {
      const int key_gain = here[lane + 32 * i], value_gain = here[kCodeRows + lane + 32 * i];
      gains[warp][lane + 32 * i] = {key_gain == 0 ? 0.0F : exp2_fast((static_cast<float>(key_gain) - 128.0F) * 0.0625F),
                                    value_gain == 0 ? 0.0F : exp2_fast((static_cast<float>(value_gain) - 128.0F) * 0.0625F)};
    }
    __syncwarp();
    float s[column_blocks][4][2];
    #pragma unroll
    for (int block = 0; block < column_blocks; ++block) {
      #pragma unroll
      for (int m = 0; m < 4; ++m) s[block][m][0] = s[block][m][1] = scale[block].constant;
    }
    const std::uint8_t* at = here + layout.key_offset;
    const uint2* query = shared_query + lane;
    const bool known_keys = detail::with_pattern(key_pattern, [&](auto pattern) {
      using P = decltype(pattern);
      detail::key_products<8, column_blocks>(at, detail::Constant<P::count(8)>{}, query, units, s);
      detail::key_products<4, column_blocks>(at, detail::Constant<P::count(4)>{}, query, units, s);
      detail::key_products<2, column_blocks>(at, detail::Constant<P::count(2)>{}, query, units, s);
      detail::key_products<1, column_blocks>(at, detail::Constant<P::count(1)>{}, query, units, s);
    });
    if (!known_keys) {
      detail::key_products<8, column_blocks>(at, key_pattern & 0xff, query, units, s);
      detail::key_products<4, column_blocks>(at, key_pattern >> 8 & 0xff, query, units, s);
      detail::key_products<2, column_blocks>(at, key_pattern >> 16 & 0xff, query, units, s);
      detail::key_products<1, column_blocks>(at, key_pattern >> 24, query, units, s);
    }
    __syncwarp();
    if (kCodeStages % 2 == 0) fetch_keys();
    else fetch_values();
    const int valid = rows - tile * kCodeRows;
    std::uint32_t p[column_blocks][4];
    float from_integer[column_blocks];
    #pragma unroll
    for (int block = 0; block < column_blocks; ++block) {
      float best = top[block], value_gain[4][2];
      #pragma unroll
      for (int m = 0; m < 4; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float2 gain = gains[warp][16 * m + 8 * r + g];
          s[block][m][r] *= gain.x;
          value_gain[m][r] = gain.y;
        }
      }
      if (valid < kCodeRows) {
        #pragma unroll
        for (int m = 0; m < 4; ++m) {
          #pragma unroll
          for (int r = 0; r < 2; ++r) s[block][m][r] = 16 * m + 8 * r + g < valid ? s[block][m][r] : -INFINITY;
        }
      }
      #pragma unroll
      for (int m = 0; m < 4; ++m) best = fmaxf(best, fmaxf(s[block][m][0], s[block][m][1]));
      best = column_max(best);  // finite: a tile has a row
      if (__any_sync(~0U, best > top[block])) {
        const float correction = exp2_fast(top[block] - best);
        sum[block] *= correction;
        weight[block] *= correction;
        top[block] = best;
        #pragma unroll
        for (int unit = 0; unit < max_units; ++unit) {
          #pragma unroll
          for (int i = 0; i < 4; ++i) out[block][unit][i / 2][i % 2] *= correction;
        }
      }
      float largest = 0.0F;
      #pragma unroll
      for (int m = 0; m < 4; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float e = exp2_fast(s[block][m][r] - top[block]);
          sum[block] += e;
          s[block][m][r] = e * value_gain[m][r];
          largest = fmaxf(largest, s[block][m][r]);
        }
      }
      largest = fmaxf(column_max(largest), 1e-30F);
      const float to_integer = __fdividef(32512.0F, largest);
      from_integer[block] = largest * (1.0F / 32512.0F);
      #pragma unroll
      for (int m = 0; m < 4; ++m) p[block][m] = detail::weight_bytes(s[block][m][0], s[block][m][1], to_integer);
      int c[4];  // the sum of the weights as the values meet them
      mma_codes_new(c, 0x01010101U, 0x01010101U, 0x01010101U, 0x01010101U, p[block][0], p[block][1]);
      mma_codes(c, 0x01010101U, 0x01010101U, 0x01010101U, 0x01010101U, p[block][2], p[block][3]);
      weight[block] = fmaf(static_cast<float>(c[0] * 256 + c[1]), from_integer[block], weight[block]);
    }
    at = ring.wait();
    const auto add_values = [&](int unit, auto bits) {
      float part[column_blocks][2][2];
      #pragma unroll
      for (int block = 0; block < column_blocks; ++block) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) part[block][i / 2][i % 2] = out[block][unit][i / 2][i % 2];
      }
      detail::value_products<column_blocks>(at, bits, p, from_integer, part);
      #pragma unroll
      for (int block = 0; block < column_blocks; ++block) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) out[block][unit][i / 2][i % 2] = part[block][i / 2][i % 2];
      }
      at += code_unit_bytes(bits);
    };
    const bool known_values = detail::with_pattern(value_pattern, [&](auto pattern) {
      using P = decltype(pattern);
      detail::for_each_unit<(P::units < max_units ? P::units : max_units)>([&](auto unit) { add_values(unit, detail::Constant<P::width(decltype(unit)::value)>{}); });
    });
    if (!known_values) {
      #pragma unroll
      for (int unit = 0; unit < max_units; ++unit) {
        if (unit < layout.value_units) add_values(unit, static_cast<int>(layout.value_widths[unit]));
      }
    }
    __syncwarp();
    if (kCodeStages % 2 == 0) fetch_values();
    else fetch_keys();
  }
  const int channels = layout.channels(Part::value);
  const std::size_t size = static_cast<std::size_t>(3 + channels) * kBlockColumns;
  float* states = reinterpret_cast<float*>(memory);
  #pragma unroll
  for (int block = 0; block < column_blocks; ++block) {
    __syncthreads();  // the rings are empty; later, the last block of columns is written
    float* state = states + static_cast<std::size_t>(warp) * size;
    const float total = column_sum(sum[block]);
    if (g == 0) {
      state[t] = top[block];
      state[kBlockColumns + t] = total;
      state[2 * kBlockColumns + t] = weight[block];
    }
    #pragma unroll
    for (int unit = 0; unit < max_units; ++unit) {
      if (unit < layout.value_units) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int channel = unit * kCodeUnit + 16 * (i / 2) + 8 * (i % 2) + g;
          state[(3 + channel) * kBlockColumns + t] = out[block][unit][i / 2][i % 2];
        }
      }
    }
    __syncthreads();
    if (block < used_blocks) {
      // The means shift every logit of a column alike; lane t has column t.
      merge_warps(states, channels, scale[block].shift, factors, step.state(row, step.first_entry(Source::compressed) + split, first_block + block));
    }
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
