// SPDX-License-Identifier: Apache-2.0
/// @file cuda/scores/compressed_scores.cuh  Attention scores of compressed rows: how much attention
/// each gets from a step's queries. The counterpart of cuda/scores/attention_scores.cuh.
///
/// score_t = sum over the columns (query token x head of the group) of exp(logit_t - lse), per KV
/// head. Logits are those of the attention just computed, from the same operands, which are still
/// in the step's buffers. Rows of several epochs use the operands of their own epoch. A warp has 64
/// rows and multiplies them with four columns at a time. Every sum has one owner and one order.
/// Floor: the keys' bytes once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lowrankkv/cuda/scores/attention_scores.cuh"
#include "lowrankkv/cuda/tiles/code_products.cuh"
#include "lowrankkv/cuda/tiles/row_gains.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// Rows of a block: 64 per warp.
inline constexpr int kCompressedScoreRows = 64 * kStoreThreads / 32;

/// @brief Scores of the compressed rows. With target.data, the scores of a step are written there
/// by position; without it, scores are added to the accumulated scores of the list. Grid: pieces of
/// kCompressedScoreRows rows x heads x sequences.
/// @tparam scale_groups  of tiles of codes; 0: plain tiles, of `type`
template <int scale_groups, DType type>
__global__ void __launch_bounds__(kStoreThreads)
    compressed_scores_kernel(LayerEdit tables, AttentionStep step, Batch batch,
                             MeasuredQueries queries, DeviceScores target, int first_sequence) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            g = lane / 4, t = lane % 4;
  const int head = static_cast<int>(blockIdx.y),
            sequence = first_sequence + static_cast<int>(blockIdx.z),
            slot = batch.slots[blockIdx.z];
  const int count = tables.num_rows(RowList::compressed, slot, head),
            first = static_cast<int>(blockIdx.x) * kCompressedScoreRows + warp * kCodeRows;
  if (first >= count) return;
  const HeadTiles& layout = tables.compressed[head];
  const std::int32_t* table = tables.page_table(RowList::compressed, slot, head);
  constexpr int groups = scale_groups == 2 ? 2 : 1;
  // For codes, the warp's only tile.
  const std::uint8_t* tile = tables.tile(table, layout, first / layout.rows);
  [[maybe_unused]] float gains[groups][4][2];
  if constexpr (scale_groups > 0) {
#pragma unroll
    for (int i = 0; i < 8 * groups; ++i)
      gains[i / 8][i / 2 % 4][i % 2] =
          detail::stored_gain(tile, layout, Part::key, 16 * (i / 2 % 4) + 8 * (i % 2) + g, i / 8);
  }
  float own[4][2] = {};  // scores of rows 16 m + 8 r + g, from column t of every block
  for (int index = 0; index < tables.num_segments(slot, count); ++index) {
    const SegmentRows range = tables.segment(slot, head, count, index, 0);
    if (range.end <= first || range.begin >= first + kCodeRows) continue;
    for (int block = 0; block < step.blocks; ++block) {
      const std::size_t block_row =
          step.query_row(sequence, tables.num_heads, head, index) + static_cast<std::size_t>(block);
      const uint2* query =
          step.coded_queries + block_row * static_cast<std::size_t>(step.coded_units) * 32 + lane;
      const ColumnScale scale =
          step.coded_scales[block_row * kBlockColumns + static_cast<std::size_t>(t)];
      const float lse = detail::measured_column(queries, static_cast<int>(blockIdx.z), head,
                                                block * kBlockColumns + t)
                            .lse;
      float logits[4][2];
      if constexpr (scale_groups > 0) {
        const std::uint8_t* at = tile + layout.key_offset;
        const float unit[1] = {scale.unit};
#pragma unroll
        for (int group = 0; group < groups; ++group) {
          float products[1][4][2];
#pragma unroll
          for (int i = 0; i < 8; ++i)
            products[0][i / 2][i % 2] = group == 0 ? scale.constant : scale.second_constant;
          const unsigned pattern =
              static_cast<unsigned>(groups == 1  ? layout.key_pattern
                                    : group == 0 ? layout.first_key_pattern
                                                 : layout.key_pattern - layout.first_key_pattern);
          detail::key_products<8, 1>(at, static_cast<int>(pattern & 0xffU), query, unit, products);
          detail::key_products<4, 1>(at, static_cast<int>(pattern >> 8 & 0xffU), query, unit,
                                     products);
          detail::key_products<2, 1>(at, static_cast<int>(pattern >> 16 & 0xffU), query, unit,
                                     products);
          detail::key_products<1, 1>(at, static_cast<int>(pattern >> 24), query, unit, products);
#pragma unroll
          for (int i = 0; i < 8; ++i)
            logits[i / 2][i % 2] = fmaf(products[0][i / 2][i % 2], gains[group][i / 2][i % 2],
                                        group == 0 ? scale.shift : logits[i / 2][i % 2]);
        }
      } else {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          float products[4] = {};
          const int row = first + 16 * m;
          if (row < count) {
            const std::uint8_t* rows =
                tables.tile(table, layout, row / layout.rows) + layout.key_offset +
                row % layout.rows / kPlainRows * layout.key_units * kPlainUnitBytes;
            for (int unit = 0; unit < layout.key_units; ++unit) {
              const uint2 b = query[unit * 32];
              mma_plain<type>(products, reinterpret_cast<const uint4*>(rows)[unit * 32 + lane], b.x,
                              b.y);
            }
          }
          logits[m][0] = fmaf(products[0] + products[1], scale.unit, scale.shift);
          logits[m][1] = fmaf(products[2] + products[3], scale.unit, scale.shift);
        }
      }
      const bool counts = lse < INFINITY;  // the column exists and its sum is finite
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = first + 16 * (i / 2) + 8 * (i % 2) + g;
        own[i / 2][i % 2] += counts && row >= range.begin && row < range.end
                                 ? exp2_fast(logits[i / 2][i % 2] - lse)
                                 : 0.0F;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float& accumulated = own[i / 2][i % 2];
    accumulated += __shfl_xor_sync(~0U, accumulated, 1);
    accumulated += __shfl_xor_sync(~0U, accumulated, 2);
    const int row = first + 16 * (i / 2) + 8 * (i % 2) + g;
    if (t != 0 || row >= count) continue;
    if (target.data == nullptr) {
      tables.row_scores(RowList::compressed, slot, head)[row] += accumulated;
      continue;
    }
    const std::int32_t position = detail::position_of(tables, RowList::compressed, slot, head,
                                                      tables.rows[tables.index(slot, head)], row);
    if (position < target.positions)
      target.row(sequence, tables.num_heads, head)[position] = accumulated;
  }
}

/// @brief Enqueues the scores of compressed rows for queries that were just attended to in `step`.
/// One launch; allocates nothing and does not wait.
/// @param target  receives the scores of a step; without data, scores are added to those of the
///   list
/// @param most_rows  most rows of a list of the batch
/// @tparam scale_groups  of tiles of codes; 0: plain tiles
template <int scale_groups>
void enqueue_compressed_scores(const LayerState& layer, const AttentionStep& step,
                               const Batch& batch, const MeasuredQueries& queries,
                               const DeviceScores& target, int first_sequence,
                               std::int64_t most_rows, cudaStream_t stream) {
  if (most_rows == 0) return;
  const dim3 grid(
      static_cast<unsigned>((most_rows + kCompressedScoreRows - 1) / kCompressedScoreRows),
      static_cast<unsigned>(layer.tables().num_heads), static_cast<unsigned>(batch.count));
  const auto launch = [&](auto* kernel) {
    detail::launch_kernel(kernel, grid, kStoreThreads, 0, "compressed_scores_kernel", stream,
                          layer.tables(), step, batch, queries, target, first_sequence);
  };
  if (scale_groups > 0 || layer.tiles().coded_type == DType::f16)
    launch(compressed_scores_kernel<scale_groups, DType::f16>);
  else if constexpr (scale_groups == 0)
    launch(compressed_scores_kernel<0, DType::bf16>);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
