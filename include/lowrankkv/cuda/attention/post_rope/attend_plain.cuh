// SPDX-License-Identifier: Apache-2.0
/// @file cuda/attention/post_rope/attend_plain.cuh  Decode attention over plain tiles: rows at full
/// rank, the tail, and coefficients in f16 or bf16.
///
/// A warp takes tiles of 16 to 64 rows from its ring. Queries and weights enter the products as a
/// high and a low 16-bit part in neighbouring columns. So only the stored rows are rounded to 16
/// bits, and the result is that of f32 arithmetic to about 2^-20. Codes of rows in 8 bits convert
/// to 16-bit numbers exactly (cuda/tiles/int8_tiles.cuh): the step of a row's key multiplies its
/// logit, the step of its value enters its weight as a logarithm. Floor: the tiles' bytes, read
/// once.
#pragma once

#include <cstdint>
#include <type_traits>

#include "lowrankkv/cuda/attention/post_rope/query_operands.cuh"
#include "lowrankkv/cuda/tiles/int8_tiles.cuh"
#include "lowrankkv/cuda/tiles/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Most tiles of a warp's ring.
inline constexpr int kPlainStages = 3;

/// @brief Which rows one launch attends to: compressed rows in plain tiles; the tails and the full
/// rows; or a prompt's own rows.
enum class PlainRows : std::uint8_t { compressed, recent, prompt };

/// @brief Partial states of plain rows. Grid: splits x column groups, heads, sequences.
///
/// Splits of `recent`: 1 for the tail, then those of the full rows. Of `prompt`: 1. Rows at full
/// rank are multiplied with the queries themselves, so recent rows and a prompt's own need no other
/// kernel. Compressed rows wait for the kernel before this one, which projects the queries.
/// @tparam type  of the tiles
/// @tparam which  rows
/// @tparam max_units  units of values that a tile may have
/// @tparam column_blocks  blocks of columns that a warp serves at once
/// @tparam scaled  full rows in pages are in 8 bits
/// @param stages  tiles of a warp's ring. If tiles of the tail are larger than those in pages, the
///   tail uses as many as fit the same memory.
template <DType type, PlainRows which, int max_units, int column_blocks, bool scaled = false>
__global__ void __launch_bounds__(kAttendThreads)
    attend_plain_kernel(LayerView tables, AttentionStep step, Batch batch, StepQueries raw_queries,
                        int first_sequence, int stages) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  std::uint8_t* memory = shared_memory;
  __shared__ __align__(8) std::uint64_t barriers[kAttendWarps][kPlainStages];
  __shared__ uint2 shared_query[max_units * column_blocks * 32];
  __shared__ __align__(16) float factors[kAttendWarps * kBlockColumns];
  __shared__ float raw[which == PlainRows::compressed
                           ? 1
                           : column_blocks * max_units * kPlainUnit * kBlockColumns];
  __shared__ int largest[which == PlainRows::compressed ? 1 : column_blocks * kBlockColumns];
  const int groups = (step.blocks + column_blocks - 1) / column_blocks;
  const int entry = static_cast<int>(blockIdx.x) / groups,
            first_block = static_cast<int>(blockIdx.x) % groups * column_blocks;
  const int head = static_cast<int>(blockIdx.y),
            sequence = first_sequence + static_cast<int>(blockIdx.z), slot = batch.slot(blockIdx.z);
  constexpr bool coded = which == PlainRows::compressed, prompt = which == PlainRows::prompt;
  const bool tail =
      which == PlainRows::recent && entry == 0;  // later entries: splits of the full rows
  const RowList list = coded ? RowList::compressed : RowList::full;
  if (slot < 0) {
    end_after_last_kernel();
    return;
  }
  const DeviceLengths lengths = tables.lengths[slot];
  const HeadTiles layout = coded ? tables.compressed[head] : prompt ? tables.full : tables.listed;
  const int tile_bytes = scaled && tail ? tables.full.bytes : layout.bytes;
  if (scaled && tail) stages = max(1, stages * layout.bytes / tile_bytes);
  // A prompt's queries see the rows up to their own token. The last token of these columns sees the
  // most rows.
  const int last_token =
      min((first_block + column_blocks) * kBlockColumns - 1, step.columns() - 1) / step.group;
  const int list_rows = tail     ? tables.ring_rows()
                        : prompt ? step.prompt_first + last_token + 1
                                 : tables.num_rows(list, slot, head);
  // Number of the split within its list.
  const int place = which == PlainRows::recent && !tail ? entry - 1 : entry;
  SegmentRows range{0, 0, list_rows, 0, tail || prompt ? 1 : full_splits_of(list_rows, false)};
  int segment = 0;
  if constexpr (coded) range = tables.segment_of_split(slot, head, list_rows, place, segment);
  const int rows = range.end, splits = range.splits, split = place - range.first_split;
  if (split >= splits) {
    end_after_last_kernel();
    return;
  }
  const std::int32_t* table = tables.page_table(list, slot, head);
  const std::uint8_t* tail_tiles = tables.tail(slot, head);
  constexpr int steps = plain_steps(max_units);  // times 16 rows of a tile
  constexpr int tile_rows = steps * kPlainRows;
  const int first_tile = range.begin / tile_rows, tiles = (rows + tile_rows - 1) / tile_rows,
            per_split = (tiles - first_tile + splits - 1) / splits;
  const int first = first_tile + split * per_split, last = min(tiles, first + per_split);
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const std::size_t row =
      static_cast<std::size_t>(sequence) * static_cast<std::size_t>(tables.num_heads) +
      static_cast<std::size_t>(head);
  const int key_units = layout.key_units, value_units = layout.value_units,
            used_blocks = min(column_blocks, step.blocks - first_block);
  TileRing<kPlainStages> ring(memory + warp * stages * tile_bytes, barriers[warp], tile_bytes,
                              stages);
  // A prompt's tiles are not in pages.
  PageWalk walk(tables, table, prompt ? tables.listed : layout, first + warp);
  // The first tile at `tile`, tile + warps, ... that holds a row; a tail may have empty tiles.
  const auto with_rows = [&](int tile) {
    const auto empty = [&](int place) {
      const int index = (place - lengths.tail_first + rows) % rows;
      return index >= lengths.tail_length &&
             (index + tile_rows <= rows || lengths.tail_length == 0);
    };
    while (tail && tile < last && empty(tile * tile_rows)) tile += warps;
    return tile;
  };
  int fetched = first + warp;
  const auto next_tile = [&]() -> const std::uint8_t* {
    const int tile = with_rows(fetched);
    fetched = tile + warps;
    if (tile >= last) return nullptr;
    if (prompt)
      return step.prompt +
             (static_cast<std::size_t>(head) * static_cast<std::size_t>(step.prompt_tiles) +
              static_cast<std::size_t>(tile)) *
                 static_cast<std::size_t>(tile_bytes);
    return tail ? tail_tiles + static_cast<std::size_t>(tile) * static_cast<std::size_t>(tile_bytes)
                : walk.next(warps);
  };
  for (int stage = 0; stage < stages; ++stage) ring.fetch(next_tile(), tile_bytes);
  if (coded) wait_for_last_kernel();  // for the queries; tiles are in flight already
  release_next_kernel();
  const std::size_t block_row = coded ? step.query_row(sequence, tables.num_heads, head, segment) +
                                            static_cast<std::size_t>(first_block)
                                      : 0;
  if constexpr (coded) {
    load_queries<column_blocks>(
        step.coded_queries + block_row * static_cast<std::size_t>(step.coded_units) * 32, key_units,
        step.coded_units, used_blocks, shared_query);
    __syncthreads();
  } else {
    make_plain_queries<type, column_blocks>(raw_queries, step, static_cast<int>(blockIdx.z), head,
                                            first_block, tables.head_dim, raw, largest,
                                            shared_query);
  }
  ColumnScale scale[column_blocks];
  float out[column_blocks][max_units][4] = {};
  float top[column_blocks], sum[column_blocks] = {};
  // Rows of the tail, or of the prompt, that a column sees: those up to its own token. With a
  // prompt, the rows of the tail are packed in front of it, so the tail itself is not attended to.
  int limit[column_blocks];
#pragma unroll
  for (int block = 0; block < column_blocks; ++block) {
    if constexpr (coded) {
      scale[block] =
          block < used_blocks
              ? step.coded_scales[(block_row + static_cast<std::size_t>(block)) * kBlockColumns +
                                  static_cast<std::size_t>(t)]
              : ColumnScale{};
    } else {
      scale[block].unit = __int_as_float(largest[block * kBlockColumns + t]);
    }
    top[block] = -INFINITY;
    const int token = min(((first_block + block) * kBlockColumns + t) / step.group, step.m - 1);
    limit[block] = prompt                   ? step.prompt_first + token + 1
                   : step.prompt != nullptr ? 0
                   : step.sees_all          ? lengths.tail_length
                                            : lengths.tail_length - step.m + token + 1;
  }
  // Rows of a prompt that all columns of the block see.
  const int all_see = step.prompt_first + first_block * kBlockColumns / step.group + 1;
  const auto visible = [&](int at, int block) {
    if (prompt) return at < limit[block];
    if (!tail) return at < rows && at >= range.begin;
    const int index = (at - lengths.tail_first + rows) % rows;
    return index < limit[block];
  };
  const auto attend_tiles = [&](auto bytes) {
    constexpr bool in_bytes = decltype(bytes)::value;
    for (int tile = with_rows(first + warp); tile < last; tile = with_rows(tile + warps)) {
      const std::uint8_t* next = next_tile();
      const std::uint8_t* here = ring.wait();
      // A tensor-core operand of the tile.
      const auto operand = [&](Part part, int unit) {
        if constexpr (in_bytes)
          return detail::scaled_words<type>(
              reinterpret_cast<const uint2*>(here + layout.offset(part))[32 * unit + lane]);
        else
          return reinterpret_cast<const uint4*>(
              here + (scaled ? tables.full : layout).offset(part))[32 * unit + lane];
      };
      float s[column_blocks][steps][4] = {};
#pragma unroll
      for (int i = 0; i < steps; ++i) {
#pragma unroll 4
        for (int unit = 0; unit < key_units; ++unit) {
          const uint4 a = operand(Part::key, i * key_units + unit);
#pragma unroll
          for (int block = 0; block < column_blocks; ++block) {
            const uint2 b = shared_query[(unit * column_blocks + block) * 32 + lane];
            mma_plain<type>(s[block][i], a, b.x, b.y);
          }
        }
      }
      std::uint32_t p[column_blocks][steps][2];
      // Quantizer steps of the rows. Steps of keys multiply logits. Steps of values multiply
      // weights, as logarithms added to logits.
      float key_steps[steps][2], value_steps[steps][2];
#pragma unroll
      for (int i = 0; i < 2 * steps && in_bytes; ++i) {
        key_steps[i / 2][i % 2] = detail::step_of(layout, here, Part::key, 8 * i + g);
        value_steps[i / 2][i % 2] =
            fmaxf(detail::step_of(layout, here, Part::value, 8 * i + g), kLeastStep);
      }
      const bool whole = !tail && tile * tile_rows >= range.begin &&
                         (tile + 1) * tile_rows <= (prompt ? all_see : rows);
#pragma unroll
      for (int block = 0; block < column_blocks; ++block) {
        float logits[steps][2], best = top[block];
#pragma unroll
        for (int i = 0; i < steps; ++i) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            logits[i][r] = (s[block][i][2 * r] + s[block][i][2 * r + 1]) * scale[block].unit;
            if (in_bytes)
              logits[i][r] = fmaf(logits[i][r], key_steps[i][r], __log2f(value_steps[i][r]));
            if (!whole && !visible(tile * tile_rows + 16 * i + 8 * r + g, block))
              logits[i][r] = -INFINITY;
            best = fmaxf(best, logits[i][r]);
          }
        }
        best = column_max(best);
        if (__any_sync(~0U, best > top[block])) {
          const float correction = top[block] == best ? 1.0F : exp2_fast(top[block] - best);
          sum[block] *= correction;
          top[block] = best;
#pragma unroll
          for (int unit = 0; unit < max_units; ++unit) {
#pragma unroll
            for (int i = 0; i < 4; ++i) out[block][unit][i] *= correction;
          }
        }
        const float base = best == -INFINITY ? 0.0F : best;  // a column may see no row of this tile
#pragma unroll
        for (int i = 0; i < steps; ++i) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float e = exp2_fast(logits[i][r] - base);
            sum[block] += in_bytes ? __fdividef(e, value_steps[i][r]) : e;
            p[block][i][r] = transposed(split_in_two<type>(e));
          }
        }
      }
#pragma unroll
      for (int i = 0; i < steps; ++i) {
#pragma unroll
        for (int unit = 0; unit < max_units; ++unit) {
          if (unit < value_units) {
            const uint4 a = operand(Part::value, i * value_units + unit);
#pragma unroll
            for (int block = 0; block < column_blocks; ++block)
              mma_plain<type>(out[block][unit], a, p[block][i][0], p[block][i][1]);
          }
        }
      }
      __syncwarp();
      ring.fetch(next, tile_bytes);
    }
  };
  if constexpr (scaled) {
    if (tail)
      attend_tiles(std::false_type{});
    else
      attend_tiles(std::true_type{});
  } else {
    attend_tiles(std::false_type{});
  }
  const int channels = layout.channels(Part::value);
  const std::size_t size = static_cast<std::size_t>(3 + channels) * kBlockColumns;
  float* states = reinterpret_cast<float*>(memory);
#pragma unroll
  for (int block = 0; block < column_blocks; ++block) {
    __syncthreads();  // rings are empty; for later blocks: the last block's states were merged
    float* state = states + static_cast<std::size_t>(warp) * size;
    const float total = column_sum(sum[block]);
    if (g == 0) {
      state[t] = top[block];
      state[kBlockColumns + t] = total;
      state[2 * kBlockColumns + t] = total;
    }
#pragma unroll
    for (int unit = 0; unit < max_units; ++unit) {
      if (unit < value_units) {
        state[(3 + unit * kPlainUnit + g) * kBlockColumns + t] =
            out[block][unit][0] + out[block][unit][1];
        state[(3 + unit * kPlainUnit + 8 + g) * kBlockColumns + t] =
            out[block][unit][2] + out[block][unit][3];
      }
    }
    __syncthreads();
    if (block < used_blocks) {
      const int target = coded    ? step.first_entry(Source::compressed) + place
                         : prompt ? step.first_entry(Source::prompt)
                         : tail   ? step.first_entry(Source::tail)
                                  : step.first_entry(Source::full) + place;
      merge_warps(states, channels, scale[block].shift, factors,
                  step.state(row, target, first_block + block));  // lane t has column t
    }
  }
  // Kernels after this one then also come after the kernel before it.
  if (!coded) end_after_last_kernel();
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
