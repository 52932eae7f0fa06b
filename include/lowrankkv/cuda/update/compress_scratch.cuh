// SPDX-License-Identifier: Apache-2.0
/// @file cuda/update/compress_scratch.cuh  Scratch memory of a call that compresses: one block of
/// its pool's scratch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "lowrankkv/cuda/layer/layer_state.cuh"
#include "lowrankkv/cuda/scores/rotate_rows.cuh"
#include "lowrankkv/cuda/scores/snapkv_scores.cuh"
#include "lowrankkv/cuda/store/store_joint.cuh"
#include "lowrankkv/cuda/update/align_axes.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Shares in which the moment of a prompt is summed.
inline constexpr int kMomentSplits = 16;

/// @brief Where the arrays of a call stand in its scratch memory.
struct CompressScratch {
  std::uint8_t* packed = nullptr;  ///< plain tiles of a prompt
  /// The prompt's post-RoPE keys, where keys are stored pre-RoPE and queries score them or
  /// accumulate scores.
  std::uint8_t* rotated = nullptr;
  uint2* operands = nullptr;  ///< of score_operands_kernel
  float2* sums = nullptr;     ///< of score_sums_kernel
  float* lse = nullptr;       ///< of score_lse_kernel
  float* scores = nullptr;    ///< [2, lists, rows]: scores; then pooled or selected ones
  /// [lists, rows]: accumulated scores of a prompt's rows; the same memory as `scores`, unless a
  /// call needs both.
  float* accumulated_scores = nullptr;
  std::int32_t* chosen = nullptr;  ///< [lists, rows]
  std::int32_t* rest = nullptr;    ///< [lists, rows]
  /// [lists, rows]: of a prompt whose rows are dropped by score, the rows that stay. Where rows are
  /// dropped by accumulated score: the rows that updaters observe, or the rows that stay and among
  /// which errors choose.
  std::int32_t* kept = nullptr;
  std::int32_t* observed = nullptr;   ///< [2, lists]: how many rows updaters observe, first
  std::int32_t* part_ends = nullptr;  ///< of part_ends_kernel
  std::int32_t* exempt = nullptr;     ///< [2, lists]: of exempt_outliers() and exempt_of_part()
  float* moments = nullptr;           ///< of moment_kernel
  float* metric_moments = nullptr;    ///< of metric_moments_kernel
  float* transitions = nullptr;       ///< of transition_kernel
  float* latents = nullptr;           ///< of project_latents_kernel
  float* group_scores = nullptr;      ///< of group_scores_kernel
  /// [sequences, heads]: how many flushed rows take the places of evicted rows; where lists are
  /// compacted, how many flushed rows stay.
  std::int32_t* replaced = nullptr;
  ListMoves moves;                  ///< of stored rows, where lists are compacted
  StagingTiles staging;             ///< of compressed rows that take the places of evicted rows
  Rollover rollover;                ///< of roll_over_kernel
  float* sketch_buffers = nullptr;  ///< of sketch_kernel, where shared memory is too small
  AxisScratch axes;                 ///< of align_axes()
  /// Rows that note_residuals() compares: keys, then values. Where bases move, also the rows of
  /// merge_noting_moves().
  float* decoded = nullptr;
  std::int32_t rows = 0;  ///< of the prompt, the tail's included; of tails, the flushed ones

  /// @brief The second half of the scores of so many lists: of a prompt's heads, or of the heads of
  /// some sequences.
  float* second_scores(int lists) const {
    return scores + static_cast<std::size_t>(lists) * static_cast<std::size_t>(rows);
  }
};

/// @brief Lays out the scratch of a call in its pool's scratch memory.
/// @param rows       of a packed prompt; 0: rows are flushed from tails
/// @param columns    of the queries that score the prompt
/// @param lists, list_rows  lists of rows that are chosen by value, and rows of one, at most
/// @param scored     stored rows of a scored list, whose places flushed rows may take
/// @param pinned     where both lists are scored, so many more rows may be evicted than come
/// @param keeps      rows are dropped by score
inline CompressScratch compress_scratch(const LayerState& layer, std::int64_t rows, int columns,
                                        std::size_t lists, std::int64_t list_rows,
                                        std::int64_t scored, std::int64_t pinned,
                                        bool keeps = false) {
  const std::size_t heads = static_cast<std::size_t>(layer.tables().num_heads),
                    dim = static_cast<std::size_t>(layer.tables().head_dim),
                    count = static_cast<std::size_t>(rows);
  const std::size_t pieces = (count + kScorePiece - 1) / kScorePiece,
                    most = static_cast<std::size_t>(layer.epochs().most());
  std::size_t end = 0;
  const auto reserve = [&](std::size_t bytes) {
    const std::size_t begin = end;
    end += (bytes + 127) / 128 * 128;
    return begin;
  };
  const std::size_t packed =
      reserve(rows == 0 ? 0
                        : heads * static_cast<std::size_t>(layer.packed_tiles(rows)) *
                              static_cast<std::size_t>(layer.tiles().full.bytes));
  const std::size_t rotated =
      reserve(rows == 0 || (columns == 0 && layer.tables().tail_scores == nullptr) ||
                      !layer.tables().rotary.pre_rope()
                  ? 0
                  : rotated_bytes(layer.tables(), layer.packed_tiles(rows)));
  const std::size_t groups =
                        static_cast<std::size_t>((columns + kScoreColumns - 1) / kScoreColumns),
                    operands = reserve(heads * groups * score_bytes(layer.tables().head_dim));
  const std::size_t sums = reserve(heads * static_cast<std::size_t>(columns) * pieces *
                                   sizeof(float2)),
                    lse = reserve(heads * groups * kScoreColumns * sizeof(float));
  // with_scores: a call needs scores as well as accumulated scores. shares: an updater observes
  // only some of the rows that are kept by accumulated score.
  const bool device_epochs = layer.device_epochs().used(),
             accumulated_scores = layer.tables().tail_scores != nullptr,
             both = layer.tables().scores_both(), with_scores = accumulated_scores && columns > 0,
             shares = with_scores && device_epochs;
  const std::size_t scores =
                        reserve(2 * lists * static_cast<std::size_t>(list_rows) * sizeof(float)),
                    own_scores =
                        with_scores || (both && rows > 0)
                            ? reserve(lists * static_cast<std::size_t>(list_rows) * sizeof(float))
                            : scores;
  const std::size_t chosen =
                        reserve(lists * static_cast<std::size_t>(list_rows) * sizeof(std::int32_t)),
                    rest =
                        reserve(lists * static_cast<std::size_t>(list_rows) * sizeof(std::int32_t));
  const std::size_t kept = reserve(keeps || shares || both
                                       ? lists * static_cast<std::size_t>(list_rows) *
                                             sizeof(std::int32_t)
                                       : 0),
                    observed = reserve(shares ? 2 * lists * sizeof(std::int32_t) : 0);
  const std::size_t part_ends =
                        reserve((keeps || accumulated_scores) && device_epochs
                                    ? heads *
                                          static_cast<std::size_t>(
                                              list_rows / layer.config().flush_interval + 1) *
                                          sizeof(std::int32_t)
                                    : 0),
                    exempt = reserve(2 * lists * sizeof(std::int32_t));
  const std::size_t sets = static_cast<std::size_t>(
      (std::max)(kMomentSplits, (std::min)(kAdaptBatch, layer.config().max_sequences)));
  const bool sketches = layer.device_epochs().sketches_rows(),
             orders = layer.epochs().axis_store().any();
  const std::size_t together =
      static_cast<std::size_t>((std::min)(kAdaptBatch, layer.config().max_sequences));
  const std::size_t moments = reserve(layer.epochs().adapts() && (!sketches || orders)
                                          ? sets * heads * 2 * dim * dim * sizeof(float)
                                          : 0),
                    transitions =
                        reserve(layer.epochs().adapts() ? (device_epochs ? together : 1) * heads *
                                                              2 * most * most * sizeof(float)
                                                        : 0);
  const std::size_t metric_moments = reserve(layer.epochs().metrics().any() && (!sketches || orders)
                                                 ? together * heads * 2 * dim * dim * sizeof(float)
                                                 : 0);
  const std::size_t joint =
      layer.tables().joint_heads == 0
          ? 0
          : latent_floats(layer.tables().num_heads / layer.tables().joint_heads,
                          layer.most_value_rank());
  const std::size_t latents = reserve(joint * sizeof(float));
  const bool has_scores = accumulated_scores && layer.tables().scored == RowList::compressed,
             compacts = has_scores && (device_epochs || both);
  const std::size_t decisions =
      joint > 0 ? lists / static_cast<std::size_t>(layer.tables().joint_heads) : 0;
  // Sized for full lists: scratch that grows with a sequence would make flushes wait.
  const std::size_t group_scores =
                        reserve(has_scores ? decisions *
                                                 static_cast<std::size_t>(
                                                     layer.max_rows(RowList::compressed) +
                                                     (both ? layer.max_rows(RowList::full) : 0) +
                                                     list_rows) *
                                                 sizeof(float)
                                           : 0),
                    replaced = reserve(accumulated_scores ? lists * sizeof(std::int32_t) : 0);
  StagingTiles staging;
  if (has_scores && !compacts) {
    staging.pieces =
        static_cast<std::int32_t>(((std::min)(scored, list_rows) + kStoreRows - 1) / kStoreRows);
    for (const HeadTiles& tiles : layer.tiles().compressed)
      staging.piece_bytes = (std::max)(staging.piece_bytes, kStoreRows / tiles.rows * tiles.bytes);
  }
  const std::size_t staging_tiles = reserve(
      lists / heads * static_cast<std::size_t>(layer.tables().num_lists) *
      static_cast<std::size_t>(staging.pieces) * static_cast<std::size_t>(staging.piece_bytes));
  const std::size_t segments = static_cast<std::size_t>(layer.tables().max_segments),
                    dropped = static_cast<std::size_t>(list_rows + (both ? pinned : 0)),
                    most_moves =
                        compacts ? (std::min)(static_cast<std::size_t>(scored), segments * dropped)
                                 : 0,
                    full_moves = both ? dropped : 0;
  const std::size_t moves = reserve(
                        compacts ? lists * (2 * most_moves + segments) * sizeof(std::int32_t) : 0),
                    moves_of_full =
                        reserve(both ? lists * (2 * full_moves + 1) * sizeof(std::int32_t) : 0);
  const std::size_t begun = reserve(device_epochs ? kAdaptBatch * sizeof(std::int32_t) : 0),
                    written = reserve(device_epochs ? kAdaptBatch * sizeof(std::int32_t) : 0),
                    plans = reserve(device_epochs ? kAdaptBatch * sizeof(MergePlan) : 0),
                    above = reserve(sketches ? kAdaptBatch * heads * sizeof(std::int32_t) : 0);
  const std::size_t buffers =
      reserve(sketches && layer.sketches_apart()
                  ? together * heads * 2 * layer.device_epochs().buffer_bytes()
                  : 0);
  const std::size_t decoded = reserve(
      layer.config().keep_residuals ? (layer.epochs().adapts() ? 4 : 2) * heads * dim *
                                          sizeof(float) * static_cast<std::size_t>(kDecodedRows)
                                    : 0);
  const std::size_t axis_lists = orders ? together * heads * 2 : 0,
                    axis_products = reserve(axis_lists * most * dim * sizeof(float)),
                    axis_steps = reserve(axis_lists * most * sizeof(float));
  const bool axes_apart =
      axis_buffer_bytes(layer.epochs().most(), layer.tables().head_dim) + kAxisShared >
      static_cast<std::size_t>(layer.shared_bytes());
  const std::size_t axis_buffers = reserve(
      axes_apart ? axis_lists * axis_buffer_bytes(layer.epochs().most(), layer.tables().head_dim)
                 : 0);
  std::uint8_t* base = layer.pool().scratch(end);
  staging.data = base + staging_tiles;
  staging.counts = reinterpret_cast<const std::int32_t*>(base + replaced);
  const auto moves_at = [&](std::size_t begin, std::size_t most_of_list,
                            std::size_t segments_of_list) {
    std::int32_t* const moved = reinterpret_cast<std::int32_t*>(base + begin);
    return RowMoves{moved, moved + lists * most_of_list, moved + 2 * lists * most_of_list,
                    static_cast<std::int32_t>(most_of_list),
                    static_cast<std::int32_t>(segments_of_list)};
  };
  return {
      base + packed,
      base + rotated,
      reinterpret_cast<uint2*>(base + operands),
      reinterpret_cast<float2*>(base + sums),
      reinterpret_cast<float*>(base + lse),
      reinterpret_cast<float*>(base + scores),
      reinterpret_cast<float*>(base + own_scores),
      reinterpret_cast<std::int32_t*>(base + chosen),
      reinterpret_cast<std::int32_t*>(base + rest),
      reinterpret_cast<std::int32_t*>(base + kept),
      reinterpret_cast<std::int32_t*>(base + observed),
      reinterpret_cast<std::int32_t*>(base + part_ends),
      reinterpret_cast<std::int32_t*>(base + exempt),
      reinterpret_cast<float*>(base + moments),
      reinterpret_cast<float*>(base + metric_moments),
      reinterpret_cast<float*>(base + transitions),
      reinterpret_cast<float*>(base + latents),
      reinterpret_cast<float*>(base + group_scores),
      reinterpret_cast<std::int32_t*>(base + replaced),
      {{moves_at(moves_of_full, full_moves, 1), moves_at(moves, most_moves, segments)}},
      staging,
      {reinterpret_cast<std::int32_t*>(base + begun),
       reinterpret_cast<std::int32_t*>(base + written), reinterpret_cast<MergePlan*>(base + plans),
       reinterpret_cast<std::int32_t*>(base + above)},
      reinterpret_cast<float*>(base + buffers),
      {reinterpret_cast<float*>(base + axis_products), reinterpret_cast<float*>(base + axis_steps),
       axes_apart ? reinterpret_cast<float*>(base + axis_buffers) : nullptr},
      reinterpret_cast<float*>(base + decoded),
      static_cast<std::int32_t>(rows != 0 ? rows : list_rows)};
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
