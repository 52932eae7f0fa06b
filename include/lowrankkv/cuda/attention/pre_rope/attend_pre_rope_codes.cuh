// SPDX-License-Identifier: Apache-2.0
/// @file cuda/attention/pre_rope/attend_pre_rope_codes.cuh  Decode attention over tiles of codes
/// with pre-RoPE keys.
///
/// Keys are up-projected and rotated on read (cuda/attention/pre_rope/rope_on_read.cuh). Codes of
/// keys become f16 numbers about their centre, exactly, and are up-projected:
/// k = gain * sum + mean, with gains rounded to f16. A plane is 8, 4, 2 or 1 bits of a channel's
/// codes: a code of 3 bits lies in two planes. Two kinds of heads are up-projected and rotated part
/// by part: those with more than 128 planes, and those with two scale groups, each with its own
/// gain. Weights of values are 16-bit integers, as in attend_codes.cuh. Cost: planes x head_dim
/// products per row, KV head and block of columns. Floor: the tiles' bytes, once for a block of
/// columns.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/attention/post_rope/attend_codes.cuh"
#include "lowrankkv/cuda/attention/pre_rope/attend_pre_rope.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

namespace detail {

/// kLevelUnits: units of 32 codes whose levels a warp holds in registers. kLevelSteps: groups of 16
/// rows that it prepares together.
inline constexpr int kLevelUnits = 4, kLevelSteps = 2;

/// Two codes of a word as f16 about their centre, exactly. Below 8 bits the result is twice that,
/// and codes must stand at bit 1 of their bytes.
template <int bits>
__device__ __forceinline__ std::uint32_t two_levels(std::uint32_t bytes, std::uint32_t selector) {
  const std::uint32_t word = __byte_perm(bytes, 0x64646464U, selector);  // 1024 + byte
  const __half2 numbers = *reinterpret_cast<const __half2*>(&word);
  const __half2 levels =
      bits == 8 ? __hsub2(__hsub2(numbers, __float2half2_rn(1024.0F)), __float2half2_rn(127.5F))
                : __hsub2(numbers, __float2half2_rn(1023.0F + static_cast<float>(1 << bits)));
  return *reinterpret_cast<const std::uint32_t*>(&levels);
}

/// One unit of keys of `bits`-bit codes as two operands of mma_half, for rows [16 m, 16 m + 16).
/// `first` takes the codes in the words of the first half, `second` those of the second.
template <int bits>
__device__ __forceinline__ void unit_levels(const std::uint8_t* unit, int m, uint4& first,
                                            uint4& second) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  constexpr std::uint32_t mask = bits == 8 ? ~0U : 0x01010101U * (((1U << bits) - 1U) << 1);
  const auto at = [](std::uint32_t word, int shift) {
    return (bits == 8 ? word : shift == 0 ? word << 1 : word >> (shift - 1)) & mask;
  };
  uint4 w;
  if constexpr (bits == 1) {
    const uint2 two = reinterpret_cast<const uint2*>(unit)[lane];
    w = {at(two.x, 2 * m), at(two.x, 2 * m + 1), at(two.y, 2 * m), at(two.y, 2 * m + 1)};
  } else {
    const int shift = bits == 4 ? 4 * (m % 2) : 2 * m;
    w = reinterpret_cast<const uint4*>(unit)[32 * (bits == 8 ? m : bits == 4 ? m / 2 : 0) + lane];
    w = {at(w.x, shift), at(w.y, shift), at(w.z, shift), at(w.w, shift)};
  }
  first = {two_levels<bits>(w.x, 0x4140), two_levels<bits>(w.y, 0x4140),
           two_levels<bits>(w.x, 0x4342), two_levels<bits>(w.y, 0x4342)};
  second = {two_levels<bits>(w.z, 0x4140), two_levels<bits>(w.w, 0x4140),
            two_levels<bits>(w.z, 0x4342), two_levels<bits>(w.w, 0x4342)};
}

/// Levels of rows [16 first, 16 (first + kLevelSteps)) of up to kLevelUnits units of keys before
/// unit `end`; zeros for units from `end` on. `at` moves behind the units read.
__device__ __forceinline__ void unpack_keys(const HeadTiles& layout, int first_unit, int end,
                                            const std::uint8_t*& at, int first,
                                            uint4 (&keys)[kLevelSteps][2 * kLevelUnits]) {
#pragma unroll
  for (int unit = 0; unit < kLevelUnits; ++unit) {
    const int bits = first_unit + unit < end ? layout.key_widths[first_unit + unit] : 0;
#pragma unroll
    for (int i = 0; i < kLevelSteps; ++i) {
      uint4 &low = keys[i][2 * unit], &high = keys[i][2 * unit + 1];
      if (bits == 2)
        unit_levels<2>(at, first + i, low, high);
      else if (bits == 4)
        unit_levels<4>(at, first + i, low, high);
      else if (bits == 1)
        unit_levels<1>(at, first + i, low, high);
      else if (bits == 8)
        unit_levels<8>(at, first + i, low, high);
      else
        low = high = uint4{};
    }
    at += code_unit_bytes(bits);
  }
}

/// Gain of row 16 m + 8 r + lane / 4 of a tile of codes, for one scale group.
__device__ __forceinline__ float row_gain(const HeadTiles& layout, const std::uint8_t* tile,
                                          Part part, int m, int r, int group = 0) {
  const std::uint8_t* at =
      tile +
      layout.gain_place(part, 16 * m + 8 * r + static_cast<int>(threadIdx.x) % 32 / 4, group);
  return layout.gains == ScaleKind::norm_log8 ? gain_of_byte(*at, 0x7650)
                                              : __half2float(*reinterpret_cast<const __half*>(at));
}

/// Logits of a tile of codes, as pre_rope_logits() returns them.
///
/// A key is processed in parts, each of one scale group. The units of a part follow each other in
/// the map without a gap. With two scale groups a part has as many units as remain in its group, up
/// to kLevelUnits. With one, every part has kLevelUnits units and needs no branches.
/// @param operands  of the up-projection map
template <int scale_groups, bool scattered>
__device__ __forceinline__ void code_logits(const Rotary& rotary, const RopeShared& rope,
                                            const HeadTiles& layout, const std::uint8_t* tile,
                                            const uint4* operands, int head_dim,
                                            std::uint32_t* rotated, const TilePlaces<4>& places,
                                            float (&s)[4][4]) {
  pre_rope_logits<4, kLevelSteps, scattered>(
      rotary, rope, head_dim, rotated, places,
      [&](int first_step, auto&& use) {
        __half2 gains[2 * kLevelSteps];
        const std::uint8_t* at = tile + layout.key_offset;
        const uint4* map = operands;
        // At least one pass: codes may have no bits, and keys are then their mean.
        for (int unit = 0, count = kLevelUnits; unit == 0 || unit < layout.key_units;
             unit += count, map += 2 * count * (head_dim / (2 * kRopePairs)) * 32) {
          const int group = scale_groups == 2 && unit >= layout.first_key_units ? 1 : 0,
                    end =
                        scale_groups == 2 && group == 0 ? layout.first_key_units : layout.key_units;
          if constexpr (scale_groups == 2) count = min(kLevelUnits, end - unit);
          if (scale_groups == 2 || unit == 0) {
#pragma unroll
            for (int i = 0; i < 2 * kLevelSteps; ++i)
              gains[i] = __float2half2_rn(
                  row_gain(layout, tile, Part::key, first_step + i / 2, i % 2, group));
          }
          uint4 keys[kLevelSteps][2 * kLevelUnits];
          unpack_keys(layout, unit, end, at, first_step, keys);
          use([&](int own, std::uint32_t(&x)[kLevelSteps][2], std::uint32_t(&y)[kLevelSteps][2]) {
            up_project_pairs<kLevelSteps, 2 * kLevelUnits, scale_groups == 1>(
                map, head_dim, [&](int i, int k) { return keys[i][k]; }, 2 * count, own, uint2{}, x,
                y);
            const uint2 mean =
                unit == 0 ? rope.means[4 * own + static_cast<int>(threadIdx.x) % 4] : uint2{};
#pragma unroll
            for (int i = 0; i < 2 * kLevelSteps; ++i) {
              const __half2 gain_of_row = gains[i];
              const auto with_gain = [&](std::uint32_t& word, const std::uint32_t& onto) {
                *reinterpret_cast<__half2*>(&word) =
                    __hfma2(*reinterpret_cast<__half2*>(&word), gain_of_row,
                            *reinterpret_cast<const __half2*>(&onto));
              };
              with_gain(x[i / 2][i % 2], mean.x);
              with_gain(y[i / 2][i % 2], mean.y);
            }
          });
        }
      },
      s);
}

}  // namespace detail

/// @brief Most warps of a block.
inline constexpr int kPreRopeCodeWarps = 8;

/// @brief Partial states of the compressed lists. Grid: (blocks x blocks of columns) x heads x
/// sequences; a block attends to every blocks-th split.
/// @tparam max_units  units of values that a head may have
/// @tparam copied  up-projection maps are copied to shared memory
/// @tparam segmented  rows may be of several epochs; a split is of one epoch
/// @tparam scattered  rows may stand in any order
/// @tparam scale_groups  of the channels: a row has one gain per group for its key and one for its
///   value
/// @param stage_bytes, key_up_units  as of attend_pre_rope_kernel
template <int max_units, bool copied, bool segmented, bool scattered, int scale_groups>
__global__ void __launch_bounds__(32 * kPreRopeCodeWarps)
    attend_pre_rope_codes_kernel(LayerView tables, AttentionStep step, Batch batch,
                                 StepQueries queries, int first_sequence, int blocks,
                                 int stage_bytes, int ring_bytes, int key_up_units) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  __shared__ __align__(8) std::uint64_t barriers[kPreRopeCodeWarps][kPreRopeStages];
  __shared__ __align__(16) float factors[kPreRopeCodeWarps * kBlockColumns];
  __shared__ HeadTiles layout;
  const int first_split = static_cast<int>(blockIdx.x) / step.blocks,
            block = static_cast<int>(blockIdx.x) % step.blocks;
  const int head = static_cast<int>(blockIdx.y),
            sequence = first_sequence + static_cast<int>(blockIdx.z), slot = batch.slot(blockIdx.z);
  if (slot < 0) {
    wait_for_last_kernel();  // later kernels rely on it
    return;
  }
  const int rows = tables.num_rows(RowList::compressed, slot, head),
            splits = segmented ? tables.list_splits(slot, head, rows) : splits_of(rows);
  if (first_split >= splits) {
    wait_for_last_kernel();  // later kernels rely on it
    return;
  }
  copy_tiles(tables.compressed + head, &layout);
  __syncthreads();
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32,
            g = static_cast<int>(threadIdx.x) % 32 / 4;
  // Gains are fetched with the keys.
  const int head_dim = tables.head_dim, key_bytes = layout.value_offset,
            value_bytes = layout.bytes - key_bytes;
  TileRing<kPreRopeStages> ring(shared_memory + warp * kPreRopeStages * stage_bytes, barriers[warp],
                                stage_bytes);
  PageWalk walk(tables, tables.page_table(RowList::compressed, slot, head), layout, 0);
  SegmentRows rows_of{0, 0, rows, 0, splits};  // rows of the split's segment
  int first = 0, last = 0;                     // the split's tiles
  const std::uint8_t* next = nullptr;
  // Starts a split: its first tiles are in flight afterwards.
  const auto begin = [&](int split) {
    [[maybe_unused]] int segment = 0;
    if constexpr (segmented) rows_of = tables.segment_of_split(slot, head, rows, split, segment);
    const int first_tile = segmented ? rows_of.begin / kCodeRows : 0,
              tiles = (rows_of.end + kCodeRows - 1) / kCodeRows,
              per_split = (tiles - first_tile + rows_of.splits - 1) / rows_of.splits;
    first = first_tile + (split - rows_of.first_split) * per_split;
    last = min(tiles, first + per_split);
    walk.seek(first + warp);
    next = first + warp < last ? walk.next(warps) : nullptr;
    ring.fetch(next, key_bytes);
    ring.fetch(next == nullptr ? nullptr : next + key_bytes, value_bytes);
  };
  begin(first_split);
  release_next_kernel();
  const KeyUpMap key_up = tables.maps[head].key_up;
  const uint4* operands = key_up.operands;  // in global memory
  [[maybe_unused]] int epoch = -1;          // epoch of the map, if there are several
  RopeShared rope(shared_memory + ring_bytes, tables.rotary, head_dim, &key_up);
  const int copied_units = copied ? cuda::key_up_units(true, layout.key_units) : 0;
  if constexpr (!segmented) rope.copy_map(operands, head_dim, copied_units);
  // Holds rotated queries during a split and states at its end.
  std::uint8_t* const states =
      shared_memory + ring_bytes + rope_block_bytes(head_dim, key_up_units);
  std::uint32_t* const rotated =
      reinterpret_cast<std::uint32_t*>(states + warp * rope_warp_bytes(head_dim));
  rope.load_queries(queries, tables.rotary, step, static_cast<int>(blockIdx.z), head, block,
                    head_dim);
  float unit_of_logits = rope.largest[threadIdx.x % 4] * __ldg(key_up.scales).y;
  detail::PreRopeRows range;
  range.read_shifts(tables.rotary, slot);
  range.rows = rows;
  range.read_compressed(tables, slot, head);
  for (int split = first_split; split < splits; split += blocks) {
    float out[max_units][4] = {}, top = -INFINITY, sum = 0.0F, weight[scale_groups] = {};
    const int end = rows_of.end;
    [[maybe_unused]] const int first_row = rows_of.begin;
    if constexpr (segmented) {
      range.rows = end;
      // Uniform over the block; no thread reads the previous map any more.
      if (rows_of.epoch != epoch) {
        epoch = rows_of.epoch;
        const KeyUpMap& own = tables.maps[epoch * tables.num_heads + head].key_up;
        operands = own.operands;
        rope.copy_map(operands, head_dim, copied_units);
        rope.copy_means(own.means, head_dim);
        unit_of_logits = rope.largest[threadIdx.x % 4] * __ldg(own.scales).y;
        __syncthreads();
      }
    }
    for (int tile = first + warp; tile < last; tile += warps) {
      next = tile + warps < last ? walk.next(warps) : nullptr;
      const std::uint8_t* here = ring.wait();
      float value_gains[scale_groups][4][2], s[4][4];
      TilePlaces<4> places;
      range.find(tile * kCodeRows, places);
      detail::code_logits<scale_groups, scattered>(tables.rotary, rope, layout, here,
                                                   copied ? rope.operands : operands, head_dim,
                                                   rotated, places, s);
#pragma unroll
      for (int i = 0; i < 8 * scale_groups; ++i)
        value_gains[i / 8][i % 8 / 2][i % 2] =
            detail::row_gain(layout, here, Part::value, i % 8 / 2, i % 2, i / 8);
      __syncwarp();
      ring.fetch(next, key_bytes);
      // Rows [before, valid) of the tile are of this epoch.
      const int valid = end - tile * kCodeRows,
                before = segmented ? first_row - tile * kCodeRows : 0;
      float logits[4][2], best = top;
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          logits[m][r] = (s[m][2 * r] + s[m][2 * r + 1]) * unit_of_logits;
          if (valid < kCodeRows && 16 * m + 8 * r + g >= valid) logits[m][r] = -INFINITY;
          if (segmented && 16 * m + 8 * r + g < before) logits[m][r] = -INFINITY;
          best = fmaxf(best, logits[m][r]);
        }
      }
      best = column_max(best);  // finite: a tile has at least one row
      if (__any_sync(~0U, best > top)) {
        const float correction = detail::state_factor(top, best);
        sum *= correction;
#pragma unroll
        for (int group = 0; group < scale_groups; ++group) weight[group] *= correction;
        top = best;
#pragma unroll
        for (int unit = 0; unit < max_units; ++unit) {
#pragma unroll
          for (int i = 0; i < 4; ++i) out[unit][i] *= correction;
        }
      }
      float weights[scale_groups][4][2], largest[scale_groups] = {};
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float e = exp2_fast(logits[m][r] - top);
          sum += e;
#pragma unroll
          for (int group = 0; group < scale_groups; ++group) {
            weights[group][m][r] = e * value_gains[group][m][r];
            largest[group] = fmaxf(largest[group], weights[group][m][r]);
          }
        }
      }
      std::uint32_t p[scale_groups][1][4];
      float from_integer[scale_groups][1];
#pragma unroll
      for (int group = 0; group < scale_groups; ++group) {
        largest[group] = fmaxf(column_max(largest[group]), 1e-30F);
        const float to_integer = __fdividef(32512.0F, largest[group]);
        from_integer[group][0] = largest[group] * (1.0F / 32512.0F);
#pragma unroll
        for (int m = 0; m < 4; ++m)
          p[group][0][m] =
              detail::weight_bytes(weights[group][m][0], weights[group][m][1], to_integer);
        // Sum of the weights as rounded for the products with values.
        int c[4];
        mma_codes_new(c, 0x01010101U, 0x01010101U, 0x01010101U, 0x01010101U, p[group][0][0],
                      p[group][0][1]);
        mma_codes(c, 0x01010101U, 0x01010101U, 0x01010101U, 0x01010101U, p[group][0][2],
                  p[group][0][3]);
        weight[group] =
            fmaf(static_cast<float>(c[0] * 256 + c[1]), from_integer[group][0], weight[group]);
      }
      const std::uint8_t* at = ring.wait();
#pragma unroll
      for (int unit = 0; unit < max_units; ++unit) {
        if constexpr (scale_groups == 2) {
          // From this unit on, the weights of the second scale group apply.
          if (unit == layout.first_value_units) {
            from_integer[0][0] = from_integer[1][0];
#pragma unroll
            for (int m = 0; m < 4; ++m) p[0][0][m] = p[1][0][m];
          }
        }
        if (unit < layout.value_units) {
          const int bits = layout.value_widths[unit];
          float part[1][2][2] = {{{out[unit][0], out[unit][1]}, {out[unit][2], out[unit][3]}}};
          detail::value_products<1>(at, bits, p[0], from_integer[0], part);
#pragma unroll
          for (int i = 0; i < 4; ++i) out[unit][i] = part[0][i / 2][i % 2];
          at += code_unit_bytes(bits);
        }
      }
      __syncwarp();
      ring.fetch(next == nullptr ? nullptr : next + key_bytes, value_bytes);
    }
    const std::size_t row =
        static_cast<std::size_t>(sequence) * static_cast<std::size_t>(tables.num_heads) +
        static_cast<std::size_t>(head);
    if (split + blocks < splits) begin(split + blocks);
    detail::finish_rotation(
        states, top, column_sum(sum), weight, out, layout.value_units, layout.channels(Part::value),
        [&](int unit, int i) { return unit * kCodeUnit + 8 * i + g; }, factors,
        step.state(row, step.first_entry(Source::compressed) + split, block));
    __syncthreads();  // states were merged; queries may overwrite them
  }
  // Kernels after this one then also come after the kernel before it.
  wait_for_last_kernel();
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
