// SPDX-License-Identifier: Apache-2.0
/// @file cuda/attend_turned_codes.cuh  Decode attention over tiles of codes whose keys are stored before their rotary embedding: lifted, turned (cuda/turned_keys.cuh), values as ever.
///
/// Keys are lifted in integers: codes times a map of 16 bits a number, relative to the largest of its channel, in two bytes; then k = (sum scale + constant) gain + mean.
/// Weights of values are 16-bit integers as in attend_codes.cuh.
/// Cost: 2 x planes x head_dim products a row and KV head; floor: the tiles' bytes.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/attend_codes.cuh"
#include "lowrankkv/cuda/attend_turned.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

namespace detail {

/// A unit of keys of codes of so many bits as operands of mma_codes for rows [16 m, 16 m + 16), every code in the low bits of its byte.
template <int bits>
__device__ __forceinline__ uint4 code_words(const std::uint8_t* unit, int m) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (bits == 8) {
    return reinterpret_cast<const uint4*>(unit)[32 * m + lane];
  } else if constexpr (bits == 4) {
    const uint4 w = reinterpret_cast<const uint4*>(unit)[32 * (m / 2) + lane];
    const int shift = 4 * (m % 2);
    return {w.x >> shift & 0x0f0f0f0fU, w.y >> shift & 0x0f0f0f0fU, w.z >> shift & 0x0f0f0f0fU, w.w >> shift & 0x0f0f0f0fU};
  } else if constexpr (bits == 2) {
    const uint4 w = reinterpret_cast<const uint4*>(unit)[lane];
    const int shift = 2 * m;
    return {w.x >> shift & 0x03030303U, w.y >> shift & 0x03030303U, w.z >> shift & 0x03030303U, w.w >> shift & 0x03030303U};
  } else {
    const uint2 w = reinterpret_cast<const uint2*>(unit)[lane];
    return {w.x >> (2 * m) & 0x01010101U, w.x >> (2 * m + 1) & 0x01010101U, w.y >> (2 * m) & 0x01010101U, w.y >> (2 * m + 1) & 0x01010101U};
  }
}

/// Sums of two blocks of eight channels over `units` units of one width, high and low bytes of the map apart.
template <int bits>
__device__ __forceinline__ void lift_units(const std::uint8_t*& at, int units, const uint2*& operands, int blocks, int a, int b, int (&x)[4][2][4], int (&y)[4][2][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  #pragma unroll 1
  for (int unit = 0; unit < units; ++unit) {
    const uint4 first = reinterpret_cast<const uint4*>(operands)[a * 32 + lane], second = reinterpret_cast<const uint4*>(operands)[b * 32 + lane];
    #pragma unroll
    for (int m = 0; m < 4; ++m) {
      const uint4 words = code_words<bits>(at, m);
      mma_codes(x[m][0], words.x, words.y, words.z, words.w, first.x, first.y);
      mma_codes(x[m][1], words.x, words.y, words.z, words.w, first.z, first.w);
      mma_codes(y[m][0], words.x, words.y, words.z, words.w, second.x, second.y);
      mma_codes(y[m][1], words.x, words.y, words.z, words.w, second.z, second.w);
    }
    at += code_unit_bytes(bits);
    operands += 2 * blocks * 32;
  }
}

/// Rows of eight channels of what their integers come to. @param gains  of this lane's rows
__device__ __forceinline__ void lifted_rows(const TurnShared& turn, int head_dim, int block, const int (&sums)[4][2][4], const float (&gains)[4][2], float (&x)[4][4]) {
  const float* numbers = turn.numbers + 8 * block + 2 * (static_cast<int>(threadIdx.x) % 4);
  const float2 scale = *reinterpret_cast<const float2*>(numbers), constant = *reinterpret_cast<const float2*>(numbers + head_dim), mean = *reinterpret_cast<const float2*>(numbers + 2 * head_dim);
  #pragma unroll
  for (int m = 0; m < 4; ++m) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float own_scale = i % 2 == 0 ? scale.x : scale.y, own_constant = i % 2 == 0 ? constant.x : constant.y, own_mean = i % 2 == 0 ? mean.x : mean.y;
      x[m][i] = fmaf(fmaf(static_cast<float>(256 * sums[m][0][i] + sums[m][1][i]), own_scale, own_constant), gains[m][i / 2], own_mean);
    }
  }
}

}  // namespace detail

/// @brief Partial states of the compressed lists. Grid: (blocks x blocks of columns) x heads x sequences; a block has every blocks-th split.
/// @tparam max_units   units of values that a head may have
/// @param  stage_bytes, lift_operands  as of attend_turned_kernel
/// @tparam copied  lifting maps are copied to shared memory
template <int max_units, bool copied>
__global__ void __launch_bounds__(32 * kTurnedWarps) attend_turned_codes_kernel(Tables tables, AttentionStep step, Batch batch, StepQueries queries, int first_sequence, int blocks, int stage_bytes, int ring_bytes, int lift_operands) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  __shared__ __align__(8) std::uint64_t barriers[kTurnedWarps][kTurnedStages];
  __shared__ __align__(16) float factors[kTurnedWarps * kBlockColumns];
  __shared__ HeadTiles layout;
  const int first_split = static_cast<int>(blockIdx.x) / step.blocks, block = static_cast<int>(blockIdx.x) % step.blocks;
  const int head = static_cast<int>(blockIdx.y), sequence = first_sequence + static_cast<int>(blockIdx.z), slot = batch.slots[blockIdx.z];
  const int rows = tables.num_rows(RowList::compressed, slot, head), splits = splits_of(rows);
  if (first_split >= splits) {
    wait_for_last_kernel();  // kernels after this one rely on it
    return;
  }
  copy_tiles(tables.compressed + head, &layout);
  __syncthreads();
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32, g = static_cast<int>(threadIdx.x) % 32 / 4;
  const int tiles = (rows + kCodeRows - 1) / kCodeRows, per_split = (tiles + splits - 1) / splits;
  const int head_dim = tables.head_dim, key_pattern = layout.key_pattern, key_bytes = layout.value_offset, value_bytes = layout.bytes - key_bytes;  // gains go with keys
  TileRing<kTurnedStages> ring(shared_memory + warp * kTurnedStages * stage_bytes, barriers[warp], stage_bytes);
  release_next_kernel();
  const LiftMap lift = tables.maps[head].lift;
  TurnShared turn(shared_memory + ring_bytes, tables.rotary, head_dim, &lift, copied ? 2 * layout.key_units : 0);
  float* const turned = reinterpret_cast<float*>(shared_memory + ring_bytes) + turn_floats(head_dim, lift_operands) + warp * turned_floats(head_dim);
  turn.load_queries(queries, tables.rotary, step, static_cast<int>(blockIdx.z), head, block, head_dim, 1.0F);
  __syncthreads();
  detail::TurnedRows range;
  range.read_shifts(tables.rotary, slot);
  range.rows = rows;
  range.first_position = range.num_others = tables.num_rows(RowList::full, slot, head);
  range.listed = tables.row_positions(RowList::compressed, slot, head);
  range.others = range.listed == nullptr ? tables.row_positions(RowList::full, slot, head) : nullptr;
  for (int split = first_split; split < splits; split += blocks) {
    const int first = split * per_split, last = min(tiles, first + per_split);
    PageWalk walk(tables, tables.page_table(RowList::compressed, slot, head), layout, first + warp);
    const std::uint8_t* next = first + warp < last ? walk.next(warps) : nullptr;
    ring.fetch(next, key_bytes);
    ring.fetch(next == nullptr ? nullptr : next + key_bytes, value_bytes);
    float out[max_units][4] = {}, top = -INFINITY, sum = 0.0F, weight = 0.0F;
    for (int tile = first + warp; tile < last; tile += warps) {
      next = tile + warps < last ? walk.next(warps) : nullptr;
      const std::uint8_t* here = ring.wait();
      const auto gain = [&](Part part, int m, int r) {
        const std::uint8_t* at = here + layout.gain_place(part, 16 * m + 8 * r + g);
        return layout.gains == ScaleKind::norm_log8 ? detail::gain_of_byte(*at, 0x7650) : __half2float(*reinterpret_cast<const __half*>(at));
      };
      float gains[4][2], value_gains[4][2], s[4][4];
      #pragma unroll
      for (int m = 0; m < 4; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          gains[m][r] = gain(Part::key, m, r);
          value_gains[m][r] = gain(Part::value, m, r);
        }
      }
      int places[4][2];
      range.find<4>(tile * kCodeRows, places);
      turned_logits<4, 1>(tables.rotary, turn, head_dim, turned, places, [&](int a, float (&x)[4][4], float (&y)[4][4]) {
        const int b = a + head_dim / 16;
        int first_sums[4][2][4] = {}, second_sums[4][2][4] = {};
        const std::uint8_t* at = here + layout.key_offset;
        const uint2* operands = copied ? turn.operands : lift.operands;
        detail::lift_units<8>(at, key_pattern & 0xff, operands, head_dim / 8, a, b, first_sums, second_sums);
        detail::lift_units<4>(at, key_pattern >> 8 & 0xff, operands, head_dim / 8, a, b, first_sums, second_sums);
        detail::lift_units<2>(at, key_pattern >> 16 & 0xff, operands, head_dim / 8, a, b, first_sums, second_sums);
        detail::lift_units<1>(at, key_pattern >> 24, operands, head_dim / 8, a, b, first_sums, second_sums);
        detail::lifted_rows(turn, head_dim, a, first_sums, gains, x);
        detail::lifted_rows(turn, head_dim, b, second_sums, gains, y);
      }, s);
      __syncwarp();
      ring.fetch(next, key_bytes);
      const int valid = rows - tile * kCodeRows;
      float logits[4][2], best = top;
      #pragma unroll
      for (int m = 0; m < 4; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          logits[m][r] = 16 * m + 8 * r + g < valid ? s[m][2 * r] + s[m][2 * r + 1] : -INFINITY;
          best = fmaxf(best, logits[m][r]);
        }
      }
      best = column_max(best);  // finite: a tile has a row
      if (__any_sync(~0U, best > top)) {
        const float correction = detail::state_factor(top, best);
        sum *= correction;
        weight *= correction;
        top = best;
        #pragma unroll
        for (int unit = 0; unit < max_units; ++unit) {
          #pragma unroll
          for (int i = 0; i < 4; ++i) out[unit][i] *= correction;
        }
      }
      float largest = 0.0F;
      #pragma unroll
      for (int m = 0; m < 4; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float e = exp2_fast(logits[m][r] - top);
          sum += e;
          logits[m][r] = e * value_gains[m][r];
          largest = fmaxf(largest, logits[m][r]);
        }
      }
      largest = fmaxf(column_max(largest), 1e-30F);
      const float to_integer = __fdividef(32512.0F, largest), from_integer[1] = {largest * (1.0F / 32512.0F)};
      std::uint32_t p[1][4];
      #pragma unroll
      for (int m = 0; m < 4; ++m) p[0][m] = detail::weight_bytes(logits[m][0], logits[m][1], to_integer);
      int c[4];  // the sum of the weights as the values meet them
      mma_codes_new(c, 0x01010101U, 0x01010101U, 0x01010101U, 0x01010101U, p[0][0], p[0][1]);
      mma_codes(c, 0x01010101U, 0x01010101U, 0x01010101U, 0x01010101U, p[0][2], p[0][3]);
      weight = fmaf(static_cast<float>(c[0] * 256 + c[1]), from_integer[0], weight);
      const std::uint8_t* at = ring.wait();
      #pragma unroll
      for (int unit = 0; unit < max_units; ++unit) {
        if (unit < layout.value_units) {
          const int bits = layout.value_widths[unit];
          float part[1][2][2] = {{{out[unit][0], out[unit][1]}, {out[unit][2], out[unit][3]}}};
          detail::value_products<1>(at, bits, p, from_integer, part);
          #pragma unroll
          for (int i = 0; i < 4; ++i) out[unit][i] = part[0][i / 2][i % 2];
          at += code_unit_bytes(bits);
        }
      }
      __syncwarp();
      ring.fetch(next == nullptr ? nullptr : next + key_bytes, value_bytes);
    }
    const std::size_t row = static_cast<std::size_t>(sequence) * static_cast<std::size_t>(tables.num_heads) + static_cast<std::size_t>(head);
    detail::finish_turned(shared_memory, top, column_sum(sum), weight, out, layout.value_units, layout.channels(Part::value), [&](int unit, int i) { return unit * kCodeUnit + 8 * i + g; }, factors,
                          step.state(row, step.first_entry(Source::compressed) + split, block));
    release_to_copies();
    __syncthreads();  // the states were merged; tiles may take their place
  }
  wait_for_last_kernel();  // what comes after this kernel comes after the one before it too
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
