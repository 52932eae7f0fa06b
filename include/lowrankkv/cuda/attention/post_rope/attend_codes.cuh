// SPDX-License-Identifier: Apache-2.0
/// @file cuda/attention/post_rope/attend_codes.cuh  Decode attention straight from tiles of codes,
/// with integer products and f32 sums over tiles.
///
/// A warp takes tiles of 64 rows from its ring. Logits are products of codes and 16-bit integer
/// queries, whose high and low bytes stand in neighbouring columns. Weights are 16-bit integers
/// relative to the largest weight of their tile. So products are exact, and a lane owns whole
/// logits of one column. The error is that of the two roundings: 2^-16 of the largest query
/// channel, and 2^-16 of the largest weight of a tile. Floor: the tiles' bytes, read once.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/attention/post_rope/reduce_states.cuh"
#include "lowrankkv/cuda/state/attention_step.cuh"
#include "lowrankkv/cuda/tiles/code_products.cuh"
#include "lowrankkv/cuda/tiles/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief What one stage of a warp's ring holds.
///
/// `tiles`: a tile, fetched by one copy; two stages. `halves`, for large tiles: the keys and the
/// values of a tile alternately; three stages, or two where halves are large as well.
enum class CodeRing : std::uint8_t { tiles, halves };
__host__ __device__ constexpr int code_stages(CodeRing kind) {
  return kind == CodeRing::tiles ? 2 : 3;
}
/// @brief Bytes beyond which a tile is large: then more bytes must be in flight at a time.
/// Measured.
inline constexpr int kLargeTile = 4608;
/// @brief A state's maximum is raised only when a weight would exceed 2^kHeadroom.
inline constexpr float kHeadroom = 8.0F;
/// @brief Blocks that share a multiprocessor; the compiler limits registers accordingly.
constexpr int code_blocks(int max_units, int column_blocks, int groups) {
  return max_units * column_blocks <= 8 && groups * column_blocks < 4 ? 2 : 1;
}
/// @brief Floats per lane of the running state that a warp keeps in shared memory while it attends
/// to whole splits alone.
///
/// 0: the state is too large for that, and the warps of a block share splits.
__host__ __device__ constexpr int running_floats(int max_units, int column_blocks) {
  return max_units * column_blocks <= 8 ? 4 * max_units * column_blocks : 0;
}

namespace detail {

/// The gain that a byte c encodes (quantizer/code_layout.hpp): 0 for c = 0, else 2^(c / 16 - 8).
/// @param selector  places the byte in the mantissa of 2^23
__device__ __forceinline__ float gain_of_byte(std::uint32_t bytes, std::uint32_t selector) {
  const std::uint32_t number = __byte_perm(bytes, 0x4B000000U, selector);  // 2^23 + c
  return number == 0x4B000000U ? 0.0F
                               : exp2_fast(fmaf(__uint_as_float(number), 0.0625F, -524296.0F));
}

}  // namespace detail

/// @brief Partial states of the compressed lists. Grid: (blocks x column groups) x heads x
/// sequences.
///
/// A split consists of as many chunks as a block has warps; the states of its chunks are folded in
/// order. A block attends to every blocks-th split of a list, in one of two ways. If it has about
/// as many splits as warps or more, each warp takes whole splits, chunk after chunk, and never
/// waits for another warp. Otherwise the warps share one split after the other, one chunk per warp.
/// The results are the same bit for bit.
/// @tparam max_units  units of values that a head may have
/// @tparam column_blocks  blocks of columns that a warp serves at once
/// @tparam kind  what a ring holds
/// @tparam groups  scale groups of the channels: a row has one gain per group for its key and one
///   for its value
/// @tparam segmented  rows may be of several epochs: a block attends to one split of one segment,
///   one chunk per warp
template <int max_units, int column_blocks, CodeRing kind, int groups, bool segmented>
__global__ void __launch_bounds__(kAttendThreads, code_blocks(max_units, column_blocks, groups))
    attend_codes_kernel(LayerView tables, AttentionStep step, Batch batch, int first_sequence,
                        int blocks, int stages, int stage_bytes) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  constexpr int most_stages = code_stages(kind);
  constexpr int running_values = running_floats(max_units, column_blocks);
  __shared__ __align__(8) std::uint64_t barriers[kAttendWarps][most_stages];
  __shared__ uint2 shared_query[kMaxUnits * column_blocks * 32];
  __shared__ __align__(16) float2 gains[kAttendWarps][groups][kCodeRows];
  __shared__ HeadTiles layout;
  __shared__ __align__(16) float factors[2 * kAttendWarps * kBlockColumns];
  const int column_groups = (step.blocks + column_blocks - 1) / column_blocks;
  const int block_index = static_cast<int>(blockIdx.x) / column_groups,
            first_block = static_cast<int>(blockIdx.x) % column_groups * column_blocks;
  const int head = static_cast<int>(blockIdx.y),
            sequence = first_sequence + static_cast<int>(blockIdx.z), slot = batch.slot(blockIdx.z);
  if (slot < 0) {
    wait_for_last_kernel();  // later kernels rely on it
    return;
  }
  const int list_rows = tables.num_rows(RowList::compressed, slot, head);
  SegmentRows range{0, 0, list_rows, 0, splits_of(list_rows)};
  [[maybe_unused]] int segment = 0;
  if constexpr (segmented)
    range = tables.segment_of_split(slot, head, list_rows, block_index, segment);
  const int rows = range.end, splits = range.splits;
  if (block_index - range.first_split >= splits) {
    wait_for_last_kernel();  // later kernels rely on it
    return;
  }
  copy_tiles(tables.compressed + head, &layout);
  __syncthreads();
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int first_tile = segmented ? range.begin / kCodeRows : 0,
            tiles = (rows + kCodeRows - 1) / kCodeRows,
            per_split = (tiles - first_tile + splits - 1) / splits,
            per_chunk = (per_split + warps - 1) / warps;
  // Rounds of splits, one split per warp.
  const int own_splits = (splits - block_index + blocks - 1) / blocks,
            rounds = (own_splits + warps - 1) / warps;
  // A split shared by all warps costs the time of about one and a half tiles more.
  const bool alone = !segmented && running_values > 0 &&
                     2 * rounds * warps * per_chunk <= own_splits * (2 * per_chunk + 3);
  const int first_split = block_index - range.first_split + (alone ? warp * blocks : 0),
            end_split = segmented ? first_split + 1 : splits,
            split_step = alone ? warps * blocks : blocks, first_chunk = alone ? 0 : warp,
            last_chunk = alone ? warps - 1 : warp;
  // Tiles [tile, end) of one chunk of a split. Fetching and using visit splits and chunks in the
  // same order.
  struct Chunk {
    int split, chunk, tile, end;
  };
  const auto find_tiles = [&](Chunk& at) {
    at.tile = first_tile + at.split * per_split + at.chunk * per_chunk;
    at.end = min(at.tile + per_chunk, min(first_tile + (at.split + 1) * per_split, tiles));
  };
  const auto next_chunk = [&](Chunk& at) {
    if (at.chunk++ == last_chunk) {
      at.chunk = first_chunk;
      at.split += split_step;
    }
    find_tiles(at);
  };
  const std::size_t row =
      static_cast<std::size_t>(sequence) * static_cast<std::size_t>(tables.num_heads) +
      static_cast<std::size_t>(head);
  // Heads without any bits: all rows have the same logit and the mean as value, so no tile is read.
  if (groups == 1 && !segmented && layout.key_units == 0 && layout.value_units == 0) {
    wait_for_last_kernel();
    release_next_kernel();
    const ColumnScale* scales =
        step.coded_scales + (step.query_row(sequence, tables.num_heads, head, 0) +
                             static_cast<std::size_t>(first_block)) *
                                kBlockColumns;
    const int columns = min(column_blocks, step.blocks - first_block) * kBlockColumns;
    for (int item = static_cast<int>(threadIdx.x); item < own_splits * columns;
         item += static_cast<int>(blockDim.x)) {
      const int split = block_index + item / columns * blocks, column = item % columns,
                count = max(0, min(rows, (split + 1) * per_split * kCodeRows) -
                                   split * per_split * kCodeRows);
      float* const target = step.state(row, step.first_entry(Source::compressed) + split,
                                       first_block + column / kBlockColumns) +
                            column % kBlockColumns;
      target[0] = count > 0 ? scales[column].shift : -INFINITY;
      target[kBlockColumns] = target[2 * kBlockColumns] = static_cast<float>(count);
    }
    return;
  }
  const bool wide_gains = groups == 2 || layout.gain_bytes() == 2;
  const int key_units = layout.key_units,
            used_blocks = min(column_blocks, step.blocks - first_block);
  // Gains are fetched with the keys.
  const int key_pattern = layout.key_pattern, value_pattern = layout.value_pattern,
            key_bytes = layout.value_offset, value_bytes = layout.bytes - key_bytes;
  TileRing<most_stages> ring(shared_memory + warp * stages * stage_bytes, barriers[warp],
                             stage_bytes, kind == CodeRing::tiles ? most_stages : stages);
  // States of the warps lie behind the rings.
  float* const states = reinterpret_cast<float*>(shared_memory + warps * stages * stage_bytes);
  float* const running = states + warp * running_values * 32 + lane;
  PageWalk walk(tables, tables.page_table(RowList::compressed, slot, head), layout, 0);
  Chunk fetched{first_split, first_chunk, 0, 0};
  find_tiles(fetched);
  walk.seek(fetched.tile);
  const std::uint8_t* next = nullptr;  // tile fetched last
  // Fetches the next tile or, with halves, its keys.
  const auto fetch_tile = [&] {
    while (fetched.tile >= fetched.end && fetched.split < end_split) {
      next_chunk(fetched);
      if (fetched.chunk == first_chunk)
        walk.seek(fetched.tile);  // chunks of one split are contiguous
    }
    next = fetched.split < end_split ? walk.next(1) : nullptr;
    ++fetched.tile;
    ring.fetch(next, kind == CodeRing::tiles ? key_bytes + value_bytes : key_bytes);
  };
  const auto fetch_values = [&] {
    ring.fetch(next == nullptr ? nullptr : next + key_bytes, value_bytes);
  };
  fetch_tile();
  if constexpr (kind == CodeRing::halves) fetch_values();
  if (kind == CodeRing::tiles || stages == most_stages) fetch_tile();
  wait_for_last_kernel();  // for the queries; tiles are in flight already
  release_next_kernel();
  const std::size_t block_row = step.query_row(sequence, tables.num_heads, head, segment) +
                                static_cast<std::size_t>(first_block);
  load_queries<column_blocks>(
      step.coded_queries + block_row * static_cast<std::size_t>(step.coded_units) * 32, key_units,
      step.coded_units, used_blocks, shared_query);
  __syncthreads();
  const auto scale_of = [&](int block) {
    return step.coded_scales[(block_row + static_cast<std::size_t>(block)) * kBlockColumns +
                             static_cast<std::size_t>(t)];
  };
  float constants[groups][column_blocks], units[column_blocks];
#pragma unroll
  for (int block = 0; block < column_blocks; ++block) {
    const ColumnScale scale = block < used_blocks ? scale_of(block) : ColumnScale{};
    constants[0][block] = scale.constant;
    if constexpr (groups == 2) constants[1][block] = scale.second_constant;
    units[block] = scale.unit;
  }
  float running_top[column_blocks], running_sum[column_blocks],
      running_weight[groups][column_blocks];
  Chunk used{first_split, first_chunk, 0, 0};
  for (find_tiles(used); used.split < end_split; next_chunk(used)) {
    float out[column_blocks][max_units][2][2] = {};
    float top[column_blocks], sum[column_blocks] = {}, weight[groups][column_blocks] = {};
#pragma unroll
    for (int block = 0; block < column_blocks; ++block) top[block] = -INFINITY;
    for (int tile = used.tile; tile < used.end; ++tile) {
      const std::uint8_t* here = ring.wait();
#pragma unroll
      for (int group = 0; group < groups; ++group) {
        float4 two;  // key and value gains of rows 2 lane and 2 lane + 1
        const int key_place = group * kCodeRows / 2 + lane,
                  value_place = (groups + group) * kCodeRows / 2 + lane;
        if (wide_gains) {
          const float2 key = __half22float2(reinterpret_cast<const __half2*>(here)[key_place]),
                       value = __half22float2(reinterpret_cast<const __half2*>(here)[value_place]);
          two = {key.x, value.x, key.y, value.y};
        } else {
          const std::uint32_t key = reinterpret_cast<const std::uint16_t*>(here)[key_place],
                              value = reinterpret_cast<const std::uint16_t*>(here)[value_place];
          two = {detail::gain_of_byte(key, 0x7650), detail::gain_of_byte(value, 0x7650),
                 detail::gain_of_byte(key, 0x7651), detail::gain_of_byte(value, 0x7651)};
        }
        reinterpret_cast<float4*>(gains[warp][group])[lane] = two;
      }
      __syncwarp();
      // Index 0 holds the logits from the first scale group's channels, then the logits from all
      // channels. Later all entries hold the weights times the value gains of their scale group.
      float all_logits[groups][column_blocks][4][2];
#pragma unroll
      for (int group = 0; group < groups; ++group) {
#pragma unroll
        for (int block = 0; block < column_blocks; ++block) {
#pragma unroll
          for (int m = 0; m < 4; ++m)
            all_logits[group][block][m][0] = all_logits[group][block][m][1] =
                constants[group][block];
        }
      }
      auto& s = all_logits[0];
      const std::uint8_t* at = here + layout.key_offset;
      const uint2* query = shared_query + lane;
      const auto multiply = [&](int pattern, auto& logits) {
        detail::key_products<8, column_blocks>(at, pattern & 0xff, query, units, logits);
        detail::key_products<4, column_blocks>(at, pattern >> 8 & 0xff, query, units, logits);
        detail::key_products<2, column_blocks>(at, pattern >> 16 & 0xff, query, units, logits);
        detail::key_products<1, column_blocks>(at, pattern >> 24, query, units, logits);
      };
      if constexpr (groups == 2) {
        multiply(layout.first_key_pattern, all_logits[0]);
        multiply(key_pattern - layout.first_key_pattern, all_logits[1]);
      } else {
        const bool known_keys = detail::with_pattern(key_pattern, [&](auto pattern) {
          using P = decltype(pattern);
          detail::key_products<8, column_blocks>(at, detail::Constant<P::count(8)>{}, query, units,
                                                 s);
          detail::key_products<4, column_blocks>(at, detail::Constant<P::count(4)>{}, query, units,
                                                 s);
          detail::key_products<2, column_blocks>(at, detail::Constant<P::count(2)>{}, query, units,
                                                 s);
          detail::key_products<1, column_blocks>(at, detail::Constant<P::count(1)>{}, query, units,
                                                 s);
        });
        if (!known_keys) multiply(key_pattern, s);
      }
      if constexpr (kind == CodeRing::halves) {
        __syncwarp();
        if (stages == most_stages)
          fetch_values();  // of the tile whose keys were fetched last
        else
          fetch_tile();
      }
      // Rows of the tile before `passed` belong to earlier segments.
      const int valid = rows - tile * kCodeRows,
                passed = segmented ? range.begin - tile * kCodeRows : 0;
      std::uint32_t p[groups][column_blocks][4];
      float from_integer[groups][column_blocks];
#pragma unroll
      for (int block = 0; block < column_blocks; ++block) {
        // Logits are relative to a maximum that stays while no weight exceeds 2^kHeadroom. So lanes
        // need not exchange maxima for every tile.
        const float base = top[block] > -INFINITY ? top[block] : 0.0F;
        float highest = -INFINITY, value_gain[groups][4][2];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float2 gain = gains[warp][0][16 * m + 8 * r + g];
            s[block][m][r] = fmaf(s[block][m][r], gain.x, -base);
            value_gain[0][m][r] = gain.y;
            if constexpr (groups == 2) {
              const float2 second = gains[warp][1][16 * m + 8 * r + g];
              s[block][m][r] = fmaf(all_logits[1][block][m][r], second.x, s[block][m][r]);
              value_gain[1][m][r] = second.y;
            }
          }
        }
        if (valid < kCodeRows || (segmented && passed > 0)) {
#pragma unroll
          for (int m = 0; m < 4; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
              s[block][m][r] =
                  16 * m + 8 * r + g < valid && (!segmented || 16 * m + 8 * r + g >= passed)
                      ? s[block][m][r]
                      : -INFINITY;
          }
        }
#pragma unroll
        for (int m = 0; m < 4; ++m) highest = fmaxf(highest, fmaxf(s[block][m][0], s[block][m][1]));
        const bool first = top[block] == -INFINITY;
        if (__any_sync(~0U, first || highest > kHeadroom)) {
          highest = column_max(highest);                    // finite: a tile has at least one row
          const bool moves = first || highest > kHeadroom;  // uniform over the lanes of a column
          const float by = moves ? highest : 0.0F, correction = first ? 0.0F : exp2_fast(-by);
          sum[block] *= correction;
#pragma unroll
          for (int group = 0; group < groups; ++group) weight[group][block] *= correction;
          top[block] = base + by;
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            s[block][m][0] -= by;
            s[block][m][1] -= by;
          }
#pragma unroll
          for (int unit = 0; unit < max_units; ++unit) {
#pragma unroll
            for (int i = 0; i < 4; ++i) out[block][unit][i / 2][i % 2] *= correction;
          }
        }
        float largest[groups] = {};
#pragma unroll
        for (int m = 0; m < 4; ++m) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float e = exp2_fast(s[block][m][r]);
            sum[block] += e;
#pragma unroll
            for (int group = 0; group < groups; ++group) {
              all_logits[group][block][m][r] = e * value_gain[group][m][r];
              largest[group] = fmaxf(largest[group], all_logits[group][block][m][r]);
            }
          }
        }
#pragma unroll
        for (int group = 0; group < groups; ++group) {
          largest[group] = fmaxf(column_max(largest[group]), 1e-30F);
          const float to_integer = __fdividef(32512.0F, largest[group]);
          from_integer[group][block] = largest[group] * (1.0F / 32512.0F);
#pragma unroll
          for (int m = 0; m < 4; ++m)
            p[group][block][m] = detail::weight_bytes(all_logits[group][block][m][0],
                                                      all_logits[group][block][m][1], to_integer);
          // Sum of the weights as rounded for the products with values.
          int c[4];
          mma_codes_new(c, 0x01010101U, 0x01010101U, 0x01010101U, 0x01010101U, p[group][block][0],
                        p[group][block][1]);
          mma_codes(c, 0x01010101U, 0x01010101U, 0x01010101U, 0x01010101U, p[group][block][2],
                    p[group][block][3]);
          weight[group][block] = fmaf(static_cast<float>(c[0] * 256 + c[1]),
                                      from_integer[group][block], weight[group][block]);
        }
      }
      at = kind == CodeRing::tiles ? here + key_bytes : ring.wait();
      const auto add_values = [&](int unit, auto bits) {
        float part[column_blocks][2][2];
#pragma unroll
        for (int block = 0; block < column_blocks; ++block) {
#pragma unroll
          for (int i = 0; i < 4; ++i) part[block][i / 2][i % 2] = out[block][unit][i / 2][i % 2];
        }
        detail::value_products<column_blocks>(at, bits, p[0], from_integer[0], part);
#pragma unroll
        for (int block = 0; block < column_blocks; ++block) {
#pragma unroll
          for (int i = 0; i < 4; ++i) out[block][unit][i / 2][i % 2] = part[block][i / 2][i % 2];
        }
        at += code_unit_bytes(bits);
      };
      bool known_values = false;
      if constexpr (groups == 1) {
        known_values = detail::with_pattern(value_pattern, [&](auto pattern) {
          using P = decltype(pattern);
          detail::for_each_unit<(P::units < max_units ? P::units : max_units)>([&](auto unit) {
            add_values(unit, detail::Constant<P::width(decltype(unit)::value)>{});
          });
        });
      }
      if (!known_values) {
#pragma unroll
        for (int unit = 0; unit < max_units; ++unit) {
          if constexpr (groups == 2) {
            // From this unit on, the weights of the second scale group apply.
            if (unit == layout.first_value_units) {
#pragma unroll
              for (int block = 0; block < column_blocks; ++block) {
                from_integer[0][block] = from_integer[1][block];
#pragma unroll
                for (int m = 0; m < 4; ++m) p[0][block][m] = p[1][block][m];
              }
            }
          }
          if (unit < layout.value_units)
            add_values(unit, static_cast<int>(layout.value_widths[unit]));
        }
      }
      __syncwarp();
      if (kind == CodeRing::tiles || stages == most_stages)
        fetch_tile();
      else
        fetch_values();
    }
    const int channels = layout.channels(Part::value);
    const auto for_each_value = [&](int block, auto&& function) {
#pragma unroll
      for (int unit = 0; unit < max_units; ++unit) {
        if (unit < layout.value_units) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            function(unit * kCodeUnit + 16 * (i / 2) + 8 * (i % 2) + g,
                     (block * max_units + unit) * 4 + i, out[block][unit][i / 2][i % 2]);
        }
      }
    };
    if (alone) {
      // The first chunk's state is taken as it is; folding it would give the same. After the last
      // chunk the folded state is written to global memory.
      const bool begins = used.chunk == 0, ends = used.chunk == last_chunk;
#pragma unroll
      for (int block = 0; block < column_blocks; ++block) {
        const float total = column_sum(sum[block]),
                    best = begins ? top[block] : fmaxf(running_top[block], top[block]);
        const float a = begins ? 0.0F : detail::state_factor(running_top[block], best),
                    b = begins ? 1.0F : detail::state_factor(top[block], best);
        running_top[block] = best;
        running_sum[block] = begins ? total : detail::fold(running_sum[block], a, total, b);
#pragma unroll
        for (int group = 0; group < groups; ++group)
          running_weight[group][block] =
              begins ? weight[group][block]
                     : detail::fold(running_weight[group][block], a, weight[group][block], b);
        if (!ends && begins) {
          for_each_value(block, [&](int, int place, float value) { running[place * 32] = value; });
        } else if (!ends) {
          for_each_value(block, [&](int, int place, float value) {
            running[place * 32] = detail::fold(running[place * 32], a, value, b);
          });
        } else if (block < used_blocks) {
          float* target = step.state(row, step.first_entry(Source::compressed) + used.split,
                                     first_block + block);
          for_each_value(block, [&](int channel, int place, float value) {
            target[(3 + channel) * kBlockColumns + t] =
                begins ? value : detail::fold(running[place * 32], a, value, b);
          });
          if (g == 0) {
            // The key mean shifts all logits of a column equally.
            target[t] = running_top[block] + scale_of(block).shift;
            target[kBlockColumns + t] = running_sum[block];
            target[2 * kBlockColumns + t] = running_weight[0][block];
            if constexpr (groups == 2)
              target[(3 + channels) * kBlockColumns + t] = running_weight[1][block];
          }
        }
      }
      continue;
    }
#pragma unroll
    for (int block = 0; block < column_blocks; ++block) {
      __syncthreads();  // the states of the previous column block were folded
      float* state = states + static_cast<std::size_t>(warp) *
                                  static_cast<std::size_t>((2 + groups + channels) * kBlockColumns);
      const float total = column_sum(sum[block]);
      if (g == 0) {
        state[t] = top[block];
        state[kBlockColumns + t] = total;
        state[2 * kBlockColumns + t] = weight[0][block];
        if constexpr (groups == 2) state[(3 + channels) * kBlockColumns + t] = weight[1][block];
      }
      for_each_value(block, [&](int channel, int, float value) {
        state[(3 + channel) * kBlockColumns + t] = value;
      });
      __syncthreads();
      if (block < used_blocks) {
        detail::fold_warps(
            states, channels + groups - 1, scale_of(block).shift, factors,
            step.state(row, step.first_entry(Source::compressed) + range.first_split + used.split,
                       first_block + block));  // lane t has column t
      }
    }
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
