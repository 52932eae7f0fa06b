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
#include "lowrankkv/cuda/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Tiles of a warp's ring.
inline constexpr int kCodeStages = 2;

namespace detail {

/// A number known when the kernel is compiled, where a number is asked for.
template <int number>
struct Constant {
  static constexpr int value = number;
  __host__ __device__ constexpr operator int() const { return number; }
};

/// How many units of 8, 4, 2 and 1 bits the keys, or the values, of a head have, in this order.
template <int n8, int n4, int n2, int n1>
struct Pattern {
  static constexpr int units = n8 + n4 + n2 + n1;
  __host__ __device__ static constexpr int width(int unit) { return unit < n8 ? 8 : unit < n8 + n4 ? 4 : unit < n8 + n4 + n2 ? 2 : 1; }
  __host__ __device__ static constexpr int count(int bits) { return bits == 8 ? n8 : bits == 4 ? n4 : bits == 2 ? n2 : n1; }
};

/// Calls f with the pattern of which `packed` is the number (code_pattern), if it is one of those that are compiled on their own: a
/// third fewer instructions a tile than loops over any units. Returns whether it did.
template <class Function>
__device__ __forceinline__ bool with_pattern(int packed, Function&& function) {
  switch (packed) {
    case code_pattern(0, 1, 3, 0): function(Pattern<0, 1, 3, 0>{}); return true;
    case code_pattern(0, 0, 4, 0): function(Pattern<0, 0, 4, 0>{}); return true;
    case code_pattern(0, 2, 2, 0): function(Pattern<0, 2, 2, 0>{}); return true;
    case code_pattern(0, 0, 3, 0): function(Pattern<0, 0, 3, 0>{}); return true;
    case code_pattern(0, 1, 2, 0): function(Pattern<0, 1, 2, 0>{}); return true;
    case code_pattern(0, 0, 2, 0): function(Pattern<0, 0, 2, 0>{}); return true;
    case code_pattern(0, 1, 1, 0): function(Pattern<0, 1, 1, 0>{}); return true;
    case code_pattern(0, 4, 0, 0): function(Pattern<0, 4, 0, 0>{}); return true;
    default: return false;
  }
}

/// logits[b][m][r] += products of `units` units of keys of one width: rows 16 m + 8 r + lane / 4, column lane % 4 of column block b.
template <int bits, int column_blocks, class Count>
__device__ __forceinline__ void key_products(const std::uint8_t*& unit, Count units, const uint2*& query, const float (&scale)[column_blocks], float (&logits)[column_blocks][4][2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (units == 0) return;
  int c[column_blocks][4][4];
  const auto add = [&](auto first) {
    uint2 b[column_blocks];
    #pragma unroll
    for (int block = 0; block < column_blocks; ++block) b[block] = query[block * 32];
    uint4 words[bits == 8 ? 4 : bits == 4 ? 2 : 1];
    if constexpr (bits == 1) {
      words[0] = {reinterpret_cast<const uint2*>(unit)[lane].x, reinterpret_cast<const uint2*>(unit)[lane].y, 0, 0};
    } else {
      #pragma unroll
      for (int j = 0; j < bits / 2; ++j) words[j] = reinterpret_cast<const uint4*>(unit)[32 * j + lane];
    }
    #pragma unroll
    for (int m = 0; m < 4; ++m) {
      uint4 a;
      if constexpr (bits == 8) {
        a = words[m];
      } else if constexpr (bits == 4) {
        const std::uint32_t mask = m % 2 == 0 ? 0x0f0f0f0fU : 0xf0f0f0f0U;
        a = {words[m / 2].x & mask, words[m / 2].y & mask, words[m / 2].z & mask, words[m / 2].w & mask};
      } else if constexpr (bits == 2) {
        const std::uint32_t mask = 0x03030303U << (2 * m);
        a = {words[0].x & mask, words[0].y & mask, words[0].z & mask, words[0].w & mask};
      } else {
        const std::uint32_t low = 0x01010101U << (2 * m), high = 0x02020202U << (2 * m);
        a = {words[0].x & low, words[0].x & high, words[0].y & low, words[0].y & high};
      }
      #pragma unroll
      for (int block = 0; block < column_blocks; ++block) {
        if constexpr (decltype(first)::value == 1) mma_codes_new(c[block][m], a.x, a.y, a.z, a.w, b[block].x, b[block].y);
        else mma_codes(c[block][m], a.x, a.y, a.z, a.w, b[block].x, b[block].y);
      }
    }
    unit += code_unit_bytes(bits);
    query += 32 * column_blocks;
  };
  add(Constant<1>{});
  #pragma unroll
  for (int i = 1; i < units; ++i) add(Constant<0>{});
  #pragma unroll
  for (int block = 0; block < column_blocks; ++block) {
    #pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int shift = bits == 8 ? 0 : bits == 4 ? 4 * (m % 2) : 2 * m;
      const float factor = 1.0F / static_cast<float>(1 << shift);
      logits[block][m][0] = fmaf(static_cast<float>(c[block][m][0] * 256 + c[block][m][1]), factor * scale[block], logits[block][m][0]);
      logits[block][m][1] = fmaf(static_cast<float>(c[block][m][2] * 256 + c[block][m][3]), (bits == 1 ? 0.5F : 1.0F) * factor * scale[block], logits[block][m][1]);
    }
  }
}

/// out[b][half][r] += weights x one unit of values: channels 16 half + 8 r + lane / 4. Channels at bit p of their bytes count 2^p times.
template <int column_blocks>
__device__ __forceinline__ void value_products(const std::uint8_t* unit, int bits, const std::uint32_t (&weights)[column_blocks][4], const float (&scale)[column_blocks],
                                               float (&out)[column_blocks][2][2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint4* words = reinterpret_cast<const uint4*>(unit) + lane;
  const auto add = [&](int block, int half, const int (&c)[4], float factor) {
    out[block][half][0] = fmaf(static_cast<float>(c[0] * 256 + c[1]), factor * scale[block], out[block][half][0]);
    out[block][half][1] = fmaf(static_cast<float>(c[2] * 256 + c[3]), factor * scale[block], out[block][half][1]);
  };
  if (bits == 2) {
    const uint4 w = words[0];
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t low = 0x03030303U << (4 * half), high = 0x0c0c0c0cU << (4 * half);
      #pragma unroll
      for (int block = 0; block < column_blocks; ++block) {
        int c[4];
        mma_codes_new(c, w.x & low, w.x & high, w.y & low, w.y & high, weights[block][0], weights[block][1]);
        mma_codes(c, w.z & low, w.z & high, w.w & low, w.w & high, weights[block][2], weights[block][3]);
        add(block, half, c, 1.0F);
      }
    }
  } else if (bits == 4) {
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 w = words[32 * half];
      #pragma unroll
      for (int block = 0; block < column_blocks; ++block) {
        int c[4];
        mma_codes_new(c, w.x & 0x0f0f0f0fU, w.x & 0xf0f0f0f0U, w.y & 0x0f0f0f0fU, w.y & 0xf0f0f0f0U, weights[block][0], weights[block][1]);
        mma_codes(c, w.z & 0x0f0f0f0fU, w.z & 0xf0f0f0f0U, w.w & 0x0f0f0f0fU, w.w & 0xf0f0f0f0U, weights[block][2], weights[block][3]);
        add(block, half, c, 1.0F);
      }
    }
  } else if (bits == 8) {
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 w = words[64 * half], x = words[64 * half + 32];
      #pragma unroll
      for (int block = 0; block < column_blocks; ++block) {
        int c[4];
        mma_codes_new(c, w.x, w.y, w.z, w.w, weights[block][0], weights[block][1]);
        mma_codes(c, x.x, x.y, x.z, x.w, weights[block][2], weights[block][3]);
        add(block, half, c, 1.0F);
      }
    }
  } else {
    const uint2 w = reinterpret_cast<const uint2*>(unit)[lane];
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      #pragma unroll
      for (int step = 0; step < 2; ++step) {
        const std::uint32_t low = 0x01010101U << (4 * step + 2 * half), high = 0x02020202U << (4 * step + 2 * half);
        #pragma unroll
        for (int block = 0; block < column_blocks; ++block) {
          int c[4];
          mma_codes_new(c, w.x & low, w.x & high, w.y & low, w.y & high, weights[block][2 * step], weights[block][2 * step + 1]);
          add(block, half, c, step == 0 ? 1.0F : 0.0625F);
        }
      }
    }
  }
}

/// Calls f(0), ..., f(count - 1) with constants.
template <int count, class Function>
__device__ __forceinline__ void for_each_unit(Function&& function) {
  if constexpr (count > 0) {
    for_each_unit<count - 1>(function);
    function(Constant<count - 1>{});
  }
}

/// What the place of a channel in its byte multiplied its sums by.
__device__ inline float value_factor(int bits, int half, int r) {
  const int shift = bits == 8 ? 0 : bits == 4 ? 4 * r : bits * (2 * half + r);
  return 1.0F / static_cast<float>(1 << shift);
}

/// Weights of a tile, relative to `largest`, as bytes: high parts in even columns, low ones in odd; operands of mma_codes.
__device__ __forceinline__ std::uint32_t weight_bytes(float first, float second, float to_integer) {
  // Adding 1.5 x 2^23 leaves the rounded integer in the low bits; 128 more, and the low byte is signed about the high one.
  const std::uint32_t y0 = __float_as_uint(fmaf(first, to_integer, 12582912.0F + 128.0F)), y1 = __float_as_uint(fmaf(second, to_integer, 12582912.0F + 128.0F));
  return transposed(__byte_perm(y0, y1, 0x4051) ^ 0x80800000U);
}

}  // namespace detail

/// @brief Partial states of the compressed lists. Grid: (splits x column groups) x heads x sequences.
/// @tparam max_units      units of values that a head may have
/// @tparam column_blocks  blocks of columns that a warp serves at once
template <int max_units, int column_blocks>
__global__ void __launch_bounds__(kAttendThreads) attend_codes_kernel(Tables tables, AttentionStep step, Batch batch, int first_sequence) {
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
  const int key_units = layout.key_units, used_blocks = min(column_blocks, step.blocks - first_block);
  const int2 patterns = {code_pattern(layout.key_widths, key_units), code_pattern(layout.value_widths, layout.value_units)};
  TileRing<kCodeStages> ring(memory + warp * kCodeStages * layout.bytes, barriers[warp], layout.bytes);
  PageWalk walk(tables, table, layout, first + warp);
  const auto tile_at = [&](int tile) { return tile < last ? walk.next(warps) : nullptr; };  // called for every warps-th tile in turn
  for (int stage = 0; stage < kCodeStages; ++stage) ring.fetch(tile_at(first + warp + stage * warps));
  wait_for_last_kernel();  // for the queries; the tiles were there
  release_next_kernel();
  const std::size_t block_row = row * static_cast<std::size_t>(step.blocks) + static_cast<std::size_t>(first_block);
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
    const std::uint8_t* next = tile_at(tile + kCodeStages * warps);
    const std::uint8_t* here = ring.wait();
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
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
    const bool known_keys = detail::with_pattern(patterns.x, [&](auto pattern) {
      using P = decltype(pattern);
      detail::key_products<8, column_blocks>(at, detail::Constant<P::count(8)>{}, query, units, s);
      detail::key_products<4, column_blocks>(at, detail::Constant<P::count(4)>{}, query, units, s);
      detail::key_products<2, column_blocks>(at, detail::Constant<P::count(2)>{}, query, units, s);
      detail::key_products<1, column_blocks>(at, detail::Constant<P::count(1)>{}, query, units, s);
    });
    if (!known_keys) {
      detail::key_products<8, column_blocks>(at, patterns.x & 0xff, query, units, s);
      detail::key_products<4, column_blocks>(at, patterns.x >> 8 & 0xff, query, units, s);
      detail::key_products<2, column_blocks>(at, patterns.x >> 16 & 0xff, query, units, s);
      detail::key_products<1, column_blocks>(at, patterns.x >> 24, query, units, s);
    }
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
    at = here + layout.value_offset;
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
    const bool known_values = detail::with_pattern(patterns.y, [&](auto pattern) {
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
    ring.fetch(next);
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
          state[(3 + channel) * kBlockColumns + t] = out[block][unit][i / 2][i % 2] * detail::value_factor(layout.value_widths[unit], i / 2, i % 2);
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
