// SPDX-License-Identifier: Apache-2.0
/// @file cuda/scores/pre_rope_scores.cuh  Attention scores of rows with pre-RoPE keys.
///
/// As cuda/scores/attention_scores.cuh and cuda/scores/compressed_scores.cuh, with keys that are
/// up-projected and rotated on read (cuda/attention/pre_rope/rope_on_read.cuh). A warp has a tile
/// of rows and multiplies it with four columns at a time. Their scores are added to those of the
/// rows in the order of the columns, so that every sum has one owner and one order. A prompt's own
/// keys are rotated once into a copy (cuda/scores/rotate_rows.cuh), as they are for SnapKV scores,
/// and are then scored like post-RoPE keys. Cost: that of the attention itself
/// (cuda/attention/pre_rope/logits.cuh), for the columns of one head. Floor: the keys' bytes once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "lowrankkv/cuda/attention/pre_rope/launch_pre_rope.cuh"
#include "lowrankkv/cuda/scores/attention_scores.cuh"
#include "lowrankkv/cuda/scores/compressed_scores.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

namespace detail {

/// Scores of a lane's rows from the columns of a block. All lanes of a warp call it.
/// @param lse  of the lane's column, in units of log2; infinite: no column
/// @param logit  (step, half) -> logit of the lane's row and column, in units of log2
/// @param sees  (step, half) -> whether the column sees the row
template <int steps, class Logit, class Sees>
__device__ __forceinline__ void received(float lse, Logit&& logit, Sees&& sees,
                                         float (&own)[steps][2]) {
#pragma unroll
  for (int i = 0; i < 2 * steps; ++i) {
    float weight =
        lse < INFINITY && sees(i / 2, i % 2) ? exp2_fast(logit(i / 2, i % 2) - lse) : 0.0F;
    weight += __shfl_xor_sync(~0U, weight, 1);
    own[i / 2][i % 2] = weight + __shfl_xor_sync(~0U, weight, 2);
  }
}

}  // namespace detail

/// @brief Scores of the compressed rows. With target.data, they are added there by position;
/// without it, to the accumulated scores of the list. Grid: blocks that divide a list's tiles x
/// heads x sequences.
/// @param step  only its columns are used
/// @tparam scale_groups  of tiles of codes; 0: plain tiles, of `type`
/// @tparam max_units  units of plain keys, or of values, that a head may have
/// @tparam copied  up-projection maps are copied to shared memory
template <int scale_groups, DType type, int max_units, bool copied>
__global__ void __launch_bounds__(32 * logit_warps(scale_groups, max_units))
    pre_rope_compressed_scores_kernel(LayerEdit tables, AttentionStep step, Batch batch,
                                      MeasuredQueries queries, DeviceScores target,
                                      int first_sequence, int key_up_units) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  constexpr bool codes = scale_groups > 0;
  constexpr int steps = codes ? kCodeRows / kPlainRows : rotated_steps(max_units),
                tile_rows = steps * kPlainRows;
  __shared__ HeadTiles layout;
  const int head = static_cast<int>(blockIdx.y), slot = batch.slots[blockIdx.z],
            head_dim = tables.head_dim, rows = tables.num_rows(RowList::compressed, slot, head),
            tiles = (rows + tile_rows - 1) / tile_rows;
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  if (static_cast<int>(blockIdx.x) * warps >= tiles) return;
  copy_tiles(tables.compressed + head, &layout);
  RopeShared rope(shared_memory, tables.rotary, head_dim, nullptr);
  __syncthreads();
  std::uint32_t* const rotated = reinterpret_cast<std::uint32_t*>(
      shared_memory + rope_block_bytes(head_dim, key_up_units) + warp * rope_warp_bytes(head_dim));
  const std::int32_t* table = tables.page_table(RowList::compressed, slot, head);
  const HeadRows lists = tables.rows[tables.index(slot, head)];
  for (int index = 0; index < tables.num_segments(slot, rows); ++index) {
    const SegmentRows segment = tables.segment(slot, head, rows, index, 0);
    const KeyUpMap key_up = tables.maps[segment.epoch * tables.num_heads + head].key_up;
    const uint4* const map = copied ? rope.operands : key_up.operands;
    __syncthreads();  // the previous epoch's maps are no longer read
    rope.copy_means(key_up.means, head_dim);
    if constexpr (copied)
      rope.copy_map(key_up.operands, head_dim, cuda::key_up_units(codes, layout.key_units));
    detail::PreRopeRows range;
    range.read_shifts(tables.rotary, slot);
    range.rows = segment.end;
    for (int block = 0; block < step.blocks; ++block) {
      __syncthreads();  // the previous queries are no longer read
      rope.load_queries({queries.rows, queries.first_row, queries.factor}, tables.rotary, step,
                        static_cast<int>(blockIdx.z), head, block, head_dim);
      const float unit = rope.largest[t] * __ldg(key_up.scales).y,
                  lse = detail::measured_column(queries, static_cast<int>(blockIdx.z), head,
                                                block * kBlockColumns + t)
                            .lse;
      range.read_compressed(tables, slot, head);
      range.before = -1;
      for (int tile = static_cast<int>(blockIdx.x) * warps + warp; tile * tile_rows < segment.end;
           tile += static_cast<int>(gridDim.x) * warps) {
        if ((tile + 1) * tile_rows <= segment.begin) continue;
        const std::uint8_t* here = tables.tile(table, layout, tile);
        TilePlaces<steps> places;
        range.find(tile * tile_rows, places);
        float s[steps][4], own[steps][2];
        if constexpr (codes)
          detail::code_logits<scale_groups, true>(tables.rotary, rope, layout, here, map, head_dim,
                                                  rotated, places, s);
        else
          detail::plain_logits<type, max_units, true>(tables.rotary, rope, here, layout.key_units,
                                                      map, head_dim, rotated, places, s);
        detail::received<steps>(
            lse, [&](int i, int r) { return (s[i][2 * r] + s[i][2 * r + 1]) * unit; },
            [](int, int) { return true; }, own);
#pragma unroll
        for (int i = 0; i < 2 * steps; ++i) {
          const int row = tile * tile_rows + 8 * i + g;
          if (t != 0 || row < segment.begin || row >= segment.end) continue;
          if (target.data == nullptr) {
            tables.row_scores(RowList::compressed, slot, head)[row] += own[i / 2][i % 2];
            continue;
          }
          const std::int32_t position =
              detail::position_of(tables, RowList::compressed, slot, head, lists, row);
          if (position < target.positions)
            target.row(first_sequence + static_cast<int>(blockIdx.z), tables.num_heads,
                       head)[position] += own[i / 2][i % 2];
        }
      }
    }
  }
}

/// @brief Scores of the rows at full rank. With target.data, they are added there by position;
/// without it, to the accumulated scores of the list. Grid: blocks x heads x sequences; the first
/// list_blocks blocks divide the full list's tiles, the others the ring's.
/// @param step  only its columns are used
/// @tparam type  of the rows
/// @tparam max_units  units of keys that a tile may have
/// @tparam scaled  full rows in pages are in 8 bits
template <DType type, int max_units, bool scaled>
__global__ void __launch_bounds__(32 * pre_rope_warps(max_units))
    pre_rope_scores_kernel(LayerEdit tables, AttentionStep step, Batch batch,
                           MeasuredQueries queries, DeviceScores target, int first_sequence,
                           int list_blocks) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  constexpr int steps = rotated_steps(max_units);
  const bool listed = static_cast<int>(blockIdx.x) < list_blocks;
  const int head = static_cast<int>(blockIdx.y), slot = batch.slots[blockIdx.z],
            head_dim = tables.head_dim, ring = tables.ring_rows(),
            index = static_cast<int>(blockIdx.x) - (listed ? 0 : list_blocks);
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const HeadTiles& layout = listed ? tables.listed : tables.full;
  const int rows = listed ? tables.num_rows(RowList::full, slot, head) : ring,
            tiles = (rows + layout.rows - 1) / layout.rows;  // in storage order
  const int first = index * warps + warp,
            tile_stride =
                (listed ? list_blocks : static_cast<int>(gridDim.x) - list_blocks) * warps;
  if (index * warps >= tiles) return;
  const DeviceLengths lengths = tables.lengths[slot];
  const HeadRows lists = tables.rows[tables.index(slot, head)];
  RopeShared rope(shared_memory, tables.rotary, head_dim, nullptr);
  std::uint32_t* const rotated = reinterpret_cast<std::uint32_t*>(
      shared_memory + rope_block_bytes(head_dim, 0) + warp * rope_warp_bytes(head_dim));
  detail::PreRopeRows range;
  range.read_shifts(tables.rotary, slot);
  range.lengths = lengths;
  range.tail = !listed;
  range.rows = rows;
  range.listed = listed ? tables.row_positions(RowList::full, slot, head) : nullptr;
  for (int block = 0; block < step.blocks; ++block) {
    __syncthreads();  // the previous queries are no longer read
    rope.load_queries({queries.rows, queries.first_row, queries.factor}, tables.rotary, step,
                      static_cast<int>(blockIdx.z), head, block, head_dim);
    const float lse = detail::measured_column(queries, static_cast<int>(blockIdx.z), head,
                                              block * kBlockColumns + t)
                          .lse;
    // Rows that a column sees; of the tail, those up to its own token.
    const int limit = listed ? rows
                             : lengths.tail_length - step.m +
                                   min((block * kBlockColumns + t) / step.group, step.m - 1) + 1;
    for (int tile = first; tile < tiles; tile += tile_stride) {
      const std::uint8_t* here =
          listed ? tables.tile(tables.page_table(RowList::full, slot, head), layout, tile)
                 : tables.tail_tile(slot, head, tile * layout.rows);
      TilePlaces<steps> places;
      range.find(tile * layout.rows, places);
      // Number of a row in its list or tail; beyond all rows where the tile has no such row.
      const auto index_of = [&](int i) {
        const int row = tile * layout.rows + 8 * i + g;
        return 8 * i + g >= layout.rows ? INT32_MAX
               : listed                 ? row
                                        : (row - lengths.tail_first + ring) % ring;
      };
      float own[steps][2];
      const auto accumulate = [&](auto bytes) {
        constexpr bool in_bytes = decltype(bytes)::value;
        float s[steps][4];
        pre_rope_logits<steps, steps, true>(
            tables.rotary, rope, head_dim, rotated, places,
            [&](int, auto&& use) {
              use([&](int at, std::uint32_t(&x)[steps][2], std::uint32_t(&y)[steps][2]) {
                read_pairs<type, steps, in_bytes>(tables.rotary, here + layout.key_offset,
                                                  layout.key_units, at, x, y,
                                                  layout.rows / kPlainRows);
              });
            },
            s);
        const float unit =
            rope.largest[t] * (in_bytes || type == DType::f16 ? 1.0F : 1.0F / kRotatedBFloat);
        detail::received<steps>(
            lse,
            [&](int i, int r) {
              const float logit = (s[i][2 * r] + s[i][2 * r + 1]) * unit;
              if constexpr (in_bytes)
                return logit * detail::step_of(layout, here, Part::key, 16 * i + 8 * r + g);
              else
                return logit;
            },
            [&](int i, int r) { return index_of(2 * i + r) < limit; }, own);
      };
      if constexpr (scaled) {
        if (listed)
          accumulate(std::true_type{});
        else
          accumulate(std::false_type{});
      } else {
        accumulate(std::false_type{});
      }
#pragma unroll
      for (int i = 0; i < 2 * steps; ++i) {
        const int at = index_of(i);
        if (t != 0 || at >= (listed ? rows : lengths.tail_length)) continue;
        const float accumulated = own[i / 2][i % 2];
        if (target.data == nullptr) {
          tables.row_scores(RowList::full, slot, head)[at] += accumulated;
          continue;
        }
        const std::int64_t position =
            listed ? detail::position_of(tables, RowList::full, slot, head, lists, at)
                   : lengths.tail_position + at;
        if (position < target.positions)
          target.row(first_sequence + static_cast<int>(blockIdx.z), tables.num_heads,
                     head)[position] += accumulated;
      }
    }
  }
}

namespace detail {

/// The columns that a score kernel processes.
inline AttentionStep score_step(const MeasuredQueries& queries) {
  AttentionStep step;
  step.group = queries.group;
  step.set_tokens(queries.m);
  return step;
}

/// Number of blocks, of `warps` warps each, that divide the tiles of a list. Results do not depend
/// on it.
inline int score_blocks(const LayerState& layer, const Batch& batch, std::int64_t rows,
                        int tile_rows, int warps) {
  const int most = static_cast<int>((rows + tile_rows * warps - 1) / (tile_rows * warps));
  return (std::min)(
      most, (std::max)(1, 2 * layer.multiprocessors() / (layer.tables().num_heads * batch.count)));
}

/// Enqueues the scores of the rows of full lists with pre-RoPE keys and, for a step, of the tails.
/// @param target  receives the scores of a step; without data, scores are added to those of the
///   lists
template <class State>
void enqueue_pre_rope_scores(const State& layer, const Batch& batch, const MeasuredQueries& queries,
                             const DeviceScores& target, int first_sequence, std::int64_t full_rows,
                             cudaStream_t stream) {
  const LayerEdit& tables = layer.tables();
  const AttentionStep step = score_step(queries);
  const auto start = [&](auto* kernel, int most_warps) {
    const PreRopeLaunch launch(kernel, layer, most_warps, 0, 0, 0);
    const auto blocks = [&](std::int64_t rows, const HeadTiles& tiles) {
      return score_blocks(layer, batch, rows, tiles.rows, launch.warps);
    };
    const int list_blocks = blocks(full_rows, tables.listed),
              all_blocks = list_blocks +
                           (target.data == nullptr ? 0 : blocks(tables.ring_rows(), tables.full));
    if (all_blocks == 0) return;
    const dim3 grid(static_cast<unsigned>(all_blocks), static_cast<unsigned>(tables.num_heads),
                    static_cast<unsigned>(batch.count));
    launch_kernel(kernel, grid, launch.warps * 32, static_cast<std::size_t>(launch.bytes),
                  "pre_rope_scores_kernel", stream, tables, step, batch, queries, target,
                  first_sequence, list_blocks);
  };
  with_type<typename State::Kernels>(tables.full_type, [&](auto type) {
    with_scaled<typename State::Kernels>(tables.listed.scaled, [&](auto scaled) {
      if (tables.full.key_units <= 8)
        start(pre_rope_scores_kernel<type(), 8, scaled()>, pre_rope_warps(8));
      else
        start(pre_rope_scores_kernel<type(), 16, scaled()>, pre_rope_warps(16));
    });
  });
}

/// enqueue_compressed_scores() for pre-RoPE keys.
template <int scale_groups, class State>
void enqueue_pre_rope_compressed_scores(const State& layer, const Batch& batch,
                                        const MeasuredQueries& queries, const DeviceScores& target,
                                        int first_sequence, std::int64_t most_rows,
                                        cudaStream_t stream) {
  if (most_rows == 0) return;
  constexpr bool codes = scale_groups > 0;
  const LayerEdit& tables = layer.tables();
  const AttentionStep step = score_step(queries);
  const int units = layer.tiles().max_units(Part::key);
  // Most units of keys or values; they determine how many rows a tile has.
  int tile_units = 0;
  for (const HeadTiles& tiles : layer.tiles().compressed)
    tile_units =
        (std::max)(tile_units, !tiles.keys ? 0
                                           : (std::max)(static_cast<int>(tiles.key_units),
                                                        static_cast<int>(tiles.value_units)));
  const auto start = [&](auto* kernel, int steps, const PreRopeLaunch& launch) {
    const dim3 grid(static_cast<unsigned>(
                        score_blocks(layer, batch, most_rows, steps * kPlainRows, launch.warps)),
                    static_cast<unsigned>(tables.num_heads), static_cast<unsigned>(batch.count));
    launch_kernel(kernel, grid, launch.warps * 32, static_cast<std::size_t>(launch.bytes),
                  "pre_rope_compressed_scores_kernel", stream, tables, step, batch, queries, target,
                  first_sequence, launch.units);
  };
  const auto choose = [&](auto type, auto max_units) {
    constexpr int steps = codes ? kCodeRows / kPlainRows : rotated_steps(max_units()),
                  warps = logit_warps(scale_groups, max_units());
    const auto copying = pre_rope_compressed_scores_kernel<scale_groups, type(), max_units(), true>;
    const PreRopeLaunch launch(copying, layer, warps, 0, 0, key_up_units(codes, units));
    if (launch.units > 0) return start(copying, steps, launch);
    const auto reading =
        pre_rope_compressed_scores_kernel<scale_groups, type(), max_units(), false>;
    start(reading, steps, PreRopeLaunch(reading, layer, warps, 0, 0, 0));
  };
  if constexpr (codes)
    choose(std::integral_constant<DType, DType::f16>{}, std::integral_constant<int, 1>{});
  else
    with_type<typename State::Kernels>(layer.tiles().coded_type, [&](auto type) {
      with_units<true>(tile_units, [&](auto max_units) { choose(type, max_units); });
    });
}

}  // namespace detail

/// @brief Enqueues the scores of rows at full rank for queries that were just attended to, with
/// post-RoPE keys (enqueue_measured_scores()) or pre-RoPE keys. Up to two launches; allocates
/// nothing and does not wait.
/// @param prompt  its packed keys are post-RoPE keys
template <class State>
void measure_scores(const State& layer, const Batch& batch, const MeasuredQueries& queries,
                    const PromptScores& prompt, const DeviceScores& target, int first_sequence,
                    std::int64_t full_rows, cudaStream_t stream) {
  const LayerEdit& tables = layer.tables();
  const bool pre_rope = tables.rotary.pre_rope();
  if (!pre_rope || prompt.packed != nullptr)
    enqueue_measured_scores(layer, batch, queries, prompt, target, first_sequence,
                            pre_rope ? 0 : full_rows, stream);
  if constexpr (State::Kernels::rope_pre) {
    // Full rows that are never dropped need no scores from a prompt.
    if (pre_rope && (prompt.packed == nullptr || tables.has_scores(RowList::full)))
      detail::enqueue_pre_rope_scores(layer, batch, queries, target, first_sequence, full_rows,
                                      stream);
  }
}

/// @brief Enqueues the scores of compressed rows, with post-RoPE keys (enqueue_compressed_scores())
/// or pre-RoPE keys.
/// @tparam scale_groups  of tiles of codes; 0: plain tiles
template <int scale_groups, class State>
void measure_compressed_scores(const State& layer, const AttentionStep& step, const Batch& batch,
                               const MeasuredQueries& queries, const DeviceScores& target,
                               int first_sequence, std::int64_t most_rows, cudaStream_t stream) {
  if constexpr (State::Kernels::rope_pre) {
    if (layer.tables().rotary.pre_rope())
      return detail::enqueue_pre_rope_compressed_scores<scale_groups>(
          layer, batch, queries, target, first_sequence, most_rows, stream);
  }
  enqueue_compressed_scores<scale_groups>(layer, step, batch, queries, target, first_sequence,
                                          most_rows, stream);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
