// SPDX-License-Identifier: Apache-2.0
/// @file cuda/scores/attention_scores.cuh  Attention scores of rows at full rank: how much
/// attention each row gets from a block of queries, which H2O accumulates
/// (cpu/accumulated_scores.hpp).
///
/// score_t = sum over the queries that see row t, and over the heads h of a group, of exp(scale q_h
/// k_t - lse_h), per KV head. The log-sum-exp is the one of the attention just computed. So one
/// pass over the keys is enough, and logits are never stored. A warp has sixteen rows and
/// multiplies them with all columns (query token x head of the group), sixty-four at a time, while
/// the next columns are in flight. Every sum has one owner and one order. Queries of full_type
/// enter as they are, others as a high and a low part; sums are f32. A query whose log-sum-exp is
/// not finite adds nothing. Floor: for a step, the keys' bytes once; for a prompt, 2 columns
/// head_dim flops per row, half of that because it is causal. Compressed rows:
/// cuda/scores/compressed_scores.cuh.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cuda/attention/post_rope/query_operands.cuh"
#include "lowrankkv/cuda/layer/layer_state.cuh"
#include "lowrankkv/cuda/runtime/launch.cuh"
#include "lowrankkv/cuda/state/row_source.cuh"
#include "lowrankkv/cuda/tiles/int8_tiles.cuh"
#include "lowrankkv/cuda/tiles/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// Query rows of a KV head (tokens x group) that are processed at a time.
inline constexpr int kMeasuredColumns = 64;
/// Rows of a block of attention_scores_kernel: sixteen per warp.
inline constexpr int kMeasuredRows = 128;
/// Largest score of a row that accumulate_kernel accepts, as on the CPU.
inline constexpr float kMostScore = 1e30F;

/// @brief The queries whose attention is measured: those of one prompt, or the last ones of each
/// sequence of a launch.
struct MeasuredQueries {
  DeviceRows rows;                ///< [tokens, num_qo_heads, head_dim]
  const float* lse = nullptr;     ///< [tokens, num_qo_heads], natural log
  std::int64_t lse_stride = 0;    ///< from a token to the next
  std::int64_t first_row = 0;     ///< row of the launch's first sequence in `rows` and `lse`
  std::int32_t m = 1, group = 1;  ///< query tokens of a sequence; query heads of a KV head
  float factor = 1.0F;            ///< softmax scale times log2(e)

  __host__ __device__ std::int32_t columns() const { return m * group; }
};

/// @brief The packed rows of the prompt that the queries belong to: the rows of the tail, then the
/// prompt's own. New scores are added to those that the rows had before.
struct PromptScores {
  /// Plain tiles [heads, tiles]; null: the queries belong to the tails.
  const std::uint8_t* packed = nullptr;
  std::int32_t tiles = 0;               ///< of a head
  std::int32_t tile_bytes = 0;          ///< of a tile; its values are not read
  std::int32_t tail = 0;                ///< rows of the tail
  std::int32_t rows = 0;                ///< rows of the tail and of the prompt
  float* accumulated_scores = nullptr;  ///< [heads, rows]
};

/// @brief A ScoreView as kernels see it: [sequences, heads, positions].
struct DeviceScores {
  float* data = nullptr;
  std::int64_t positions = 0;

  __device__ float* row(int sequence, int heads, int head) const {
    return data + (static_cast<std::int64_t>(sequence) * heads + head) * positions;
  }
};

namespace detail {

/// A column's query and its log-sum-exp in units of log2; infinite if there is no column or its sum
/// is not finite.
struct MeasuredColumn {
  float lse;
  std::int32_t token, head;
};

/// Returns a column of a sequence of the launch and a KV head. Tokens count from queries.first_row
/// on.
__device__ inline MeasuredColumn measured_column(const MeasuredQueries& queries, int sequence,
                                                 int kv_head, int column) {
  if (column >= queries.columns()) return {INFINITY, 0, 0};
  const int token = column / queries.group,
            head = kv_head * queries.group + column - token * queries.group,
            row = sequence * queries.m + token;
  const float value = queries.lse[(queries.first_row + row) * queries.lse_stride + head];
  return {fabsf(value) < INFINITY ? 1.44269504F * value : INFINITY, row, head};
}

/// Starts an asynchronous copy of four bytes to shared memory, or of zeros if not `used`.
__device__ __forceinline__ void copy_word(void* target, const void* source, bool used) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(target)),
               "l"(source), "r"(used ? 4 : 0)
               : "memory");
}
/// Waits for this thread's copies.
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

/// Writes the first `blocks` blocks of eight of the kMeasuredColumns columns, as operands of
/// mma.m16n8k16, to [units, kMeasuredColumns / 8, 32]. If `split`, their rounding errors follow
/// behind. Columns without a finite log-sum-exp are zeros. Copies may still be in flight
/// afterwards.
/// @param blocks  an even number
template <DType type, bool split>
__device__ void load_measured_queries(const MeasuredQueries& queries, int units, int blocks,
                                      const MeasuredColumn* columns, uint2* operands) {
  constexpr int kBlocks = kMeasuredColumns / 8;
  constexpr float limit = type == DType::f16 ? 65504.0F : 3e38F;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int unit = static_cast<int>(threadIdx.x) / 32; unit < units; unit += kStoreThreads / 32) {
    const int channel = unit * kPlainUnit + 2 * (lane % 4);
#pragma unroll(split ? 1 : 4)
    for (int block = 0; block < blocks; ++block) {
      const int item = (unit * kBlocks + block) * 32 + lane;
      const MeasuredColumn column = columns[8 * block + lane / 4];
      const bool used = column.lse < INFINITY;
      if constexpr (split) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float value = used ? queries.rows.at(queries.first_row + column.token, column.head,
                                                     channel + i % 2 + 8 * (i / 2))
                                   : 0.0F;
          x[i] = fminf(fmaxf(value, -limit), limit);
        }
        operands[item] = {pair_of<type>(x[0], x[1], false), pair_of<type>(x[2], x[3], false)};
        operands[item + units * kBlocks * 32] = {pair_of<type>(x[0], x[1], true),
                                                 pair_of<type>(x[2], x[3], true)};
      } else {
        const std::uint16_t* row = static_cast<const std::uint16_t*>(queries.rows.data) +
                                   (queries.first_row + column.token) * queries.rows.token_stride +
                                   column.head * queries.rows.head_stride;
        copy_word(&operands[item].x, row + channel, used);
        copy_word(&operands[item].y, row + channel + 8, used);
      }
    }
  }
}

}  // namespace detail

/// @brief Scores of the rows of the full lists, and of those of the tails or of a prompt. Grid:
/// pieces x heads x sequences; the first list_pieces pieces of kMeasuredRows rows are of the full
/// list, the others of the ring or of the prompt.
///
/// Scores of a step are written to `target` by position; it must be zero where there is no row.
/// Scores of a prompt are added to those of the full list, if it is scored. Those of the packed
/// rows, plus what rows of the tail had before, are written to prompt.accumulated_scores.
/// @tparam split  queries are not of full_type, or are not stored two channels per word
template <DType type, int max_units, bool split>
__global__ void __launch_bounds__(kStoreThreads, max_units <= 8 ? 3 : 2)
    attention_scores_kernel(LayerEdit tables, Batch batch, MeasuredQueries queries,
                            PromptScores prompt, DeviceScores target, int first_sequence,
                            int list_pieces) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  // Operands of the current columns and of the next ones.
  uint2* operands = reinterpret_cast<uint2*>(shared_memory);
  // The current columns, the next ones, and those after the next.
  __shared__ detail::MeasuredColumn buffers[3][kMeasuredColumns];
  constexpr int kBlocks = kMeasuredColumns / 8;
  const int head = static_cast<int>(blockIdx.y),
            sequence = first_sequence + static_cast<int>(blockIdx.z),
            slot = batch.slots[blockIdx.z], columns = queries.columns();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32,
            g = lane / 4, t = lane % 4;
  const bool listed = static_cast<int>(blockIdx.x) < list_pieces,
             packed = !listed && prompt.packed != nullptr;
  const HeadTiles& layout = listed ? tables.listed : tables.full;
  const DeviceLengths lengths = tables.lengths[slot];
  const int ring = tables.ring_rows(), units = layout.key_units;
  const int count = listed   ? tables.num_rows(RowList::full, slot, head)
                    : packed ? prompt.rows
                             : ring;  // in storage order
  const int first = (static_cast<int>(blockIdx.x) - (listed ? 0 : list_pieces)) * kMeasuredRows,
            row = first + warp * kPlainRows;
  if (first >= count) return;
  uint4 keys[max_units] = {};
  // Factors of the logits of the lane's two rows.
  float factors[2] = {queries.factor, queries.factor};
  if (row < count) {
    const int tile = row / layout.rows;
    const std::uint8_t* base =
        listed   ? tables.tile(tables.page_table(RowList::full, slot, head), layout, tile)
        : packed ? prompt.packed +
                       (static_cast<std::size_t>(head) * static_cast<std::size_t>(prompt.tiles) +
                        static_cast<std::size_t>(tile)) *
                           static_cast<std::size_t>(prompt.tile_bytes)
                 : tables.tail_tile(slot, head, row);
    const int in_tile = row - tile * layout.rows, place = in_tile / kPlainRows * units * 32 + lane;
    const std::uint8_t* words = base + layout.key_offset;
    if (layout.scaled) {
#pragma unroll
      for (int unit = 0; unit < max_units; ++unit) {
        if (unit < units)
          keys[unit] =
              detail::scaled_words<type>(reinterpret_cast<const uint2*>(words)[place + 32 * unit]);
      }
      factors[0] *= detail::step_of(layout, base, Part::key, in_tile + g);
      factors[1] *= detail::step_of(layout, base, Part::key, in_tile + g + 8);
    } else {
#pragma unroll
      for (int unit = 0; unit < max_units; ++unit) {
        if (unit < units) keys[unit] = reinterpret_cast<const uint4*>(words)[place + 32 * unit];
      }
    }
  }
  // index: numbers of the rows in their list, tail or prompt. from: first column that sees each
  // row.
  int index[2], from[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    index[half] = row + g + 8 * half;
    if (!listed && !packed)
      index[half] +=
          index[half] < lengths.tail_first ? ring - lengths.tail_first : -lengths.tail_first;
    from[half] = listed ? 0
                        : (index[half] - (packed ? prompt.tail : lengths.tail_length - queries.m)) *
                              queries.group;
  }
  const int begin = packed ? max(0, (first - prompt.tail) * queries.group) : 0,
            operand_count = units * kBlocks * 32 * (split ? 2 : 1);
  const auto column_at = [&](int base) {
    return detail::measured_column(queries, static_cast<int>(blockIdx.z), head, base + thread);
  };
  const auto load = [&](int pass, int base) {
    detail::load_measured_queries<type, split>(
        queries, units, min(kBlocks, (columns - base + 15) / 16 * 2), buffers[pass % 3],
        operands + pass % 2 * operand_count);
  };
  if (thread < kMeasuredColumns) {
    buffers[0][thread] = column_at(begin);
    buffers[1][thread] = column_at(begin + kMeasuredColumns);
  }
  __syncthreads();
  load(0, begin);
  float own[2] = {};
  for (int pass = 0, base = begin; base < columns; ++pass, base += kMeasuredColumns) {
    detail::wait_for_copies();
    __syncthreads();  // these columns have arrived; the previous ones are no longer read
    if (base + kMeasuredColumns < columns) load(pass + 1, base + kMeasuredColumns);
    detail::MeasuredColumn ahead{};
    if (thread < kMeasuredColumns) ahead = column_at(base + 2 * kMeasuredColumns);
    const uint2* here = operands + pass % 2 * operand_count;
    const detail::MeasuredColumn* current = buffers[pass % 3];
#pragma unroll
    // Two at a time, so that their products are independent.
    for (int block = 0; block < kBlocks; block += 2) {
      if (row >= count || base + 8 * block >= columns) break;
      float logits[2][4] = {};
#pragma unroll
      for (int unit = 0; unit < max_units; ++unit) {
        if (unit >= units) break;
#pragma unroll
        for (int part = 0; part < (split ? 2 : 1); ++part) {
#pragma unroll
          for (int pair = 0; pair < 2; ++pair) {
            const uint2 b = here[((part * units + unit) * kBlocks + block + pair) * 32 + lane];
            mma_plain<type>(logits[pair], keys[unit], b.x, b.y);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int column = 8 * (block + i / 4) + 2 * t + i % 2;
        // 0 where there is no column.
        const float weight =
            exp2_fast(fmaf(logits[i / 4][i % 4], factors[i % 4 / 2], -current[column].lse));
        if (base + column >= from[i % 4 / 2]) own[i % 4 / 2] += weight;
      }
    }
    if (thread < kMeasuredColumns) buffers[(pass + 2) % 3][thread] = ahead;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    own[half] += __shfl_xor_sync(~0U, own[half], 1);
    own[half] += __shfl_xor_sync(~0U, own[half], 2);
    if (t != 0 || row + g + 8 * half >= count) continue;
    const int at = index[half];
    if (packed) {
      const int place = lengths.tail_first + at, before = place < ring ? place : place - ring;
      prompt.accumulated_scores[static_cast<std::size_t>(head) *
                                    static_cast<std::size_t>(prompt.rows) +
                                static_cast<std::size_t>(at)] =
          (at < prompt.tail ? tables.tail_row_scores(slot, head)[before] : 0.0F) + own[half];
    } else if (prompt.packed != nullptr) {
      tables.row_scores(RowList::full, slot, head)[at] += own[half];
    } else if (listed || at < lengths.tail_length) {
      const std::int64_t position =
          listed ? detail::position_of(tables, RowList::full, slot, head,
                                       tables.rows[tables.index(slot, head)], at)
                 : lengths.tail_position + at;
      if (position < target.positions)
        target.row(sequence, tables.num_heads, head)[position] = own[half];
    }
  }
}

/// @brief Adds attention scores [sequences, heads, positions] to the accumulated scores of the
/// tails' rows and of the rows of scored lists. Grid: pieces of the scored rows and then the tail x
/// heads x sequences.
///
/// A number outside [0, kMostScore] is ignored and counted in tables.faults.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    accumulate_kernel(LayerEdit tables, Batch batch, DeviceScores source, int first_sequence) {
  const int head = static_cast<int>(blockIdx.y), slot = batch.slots[blockIdx.z],
            row = static_cast<int>(blockIdx.x) * kStoreThreads + static_cast<int>(threadIdx.x);
  const DeviceLengths lengths = tables.lengths[slot];
  const ScoredRows stored(tables, slot, head);
  const int of_tail = row - stored.count();
  if (of_tail >= lengths.tail_length) return;
  const std::int64_t position =
      of_tail < 0 ? stored.position(row) : lengths.tail_position + of_tail;
  if (position >= source.positions) return;
  const float received =
      source.row(first_sequence + static_cast<int>(blockIdx.z), tables.num_heads, head)[position];
  if (!(received >= 0.0F && received <= kMostScore)) {
    atomicAdd(tables.faults, 1U);
    return;
  }
  const int place = lengths.tail_first + of_tail, ring = tables.ring_rows();
  float& accumulated =
      of_tail < 0 ? stored.accumulated(row)
                  : tables.tail_row_scores(slot, head)[place < ring ? place : place - ring];
  accumulated = fminf(accumulated + received, 3e38F);  // stays finite
}

/// @brief Checks that `accumulated` covers `sequences` sequences and the cache's heads; in a
/// captured graph, also all positions that replays can reach.
/// @throws ShapeError
inline void check_score_view(const CacheConfig& config, const ScoreView& accumulated,
                             std::int64_t sequences, bool captured) {
  ::lowrankkv::detail::check_equal("num_sequences", "call", sequences, "attention scores",
                                   accumulated.num_sequences);
  ::lowrankkv::detail::check_equal("num_heads", "cache", config.shape.num_kv_heads,
                                   "attention scores", accumulated.num_heads);
  if (captured && accumulated.num_positions < config.max_tokens)
    ::lowrankkv::detail::fail<ShapeError>("attention scores: ", accumulated.num_positions,
                                          " positions in a captured graph, max_tokens ",
                                          config.max_tokens);
}

/// @brief Describes queries that were attended to, m tokens per sequence from row `first_row` of
/// the views on, and their log-sum-exp.
inline MeasuredQueries measured_queries(const LayerState& layer, const QueryView& query,
                                        const float* lse, std::int64_t lse_stride, int m,
                                        std::int64_t first_row) {
  return {device_rows(query),
          lse,
          lse_stride,
          first_row,
          m,
          layer.config().shape.group_size(),
          layer.config().scale() * 1.44269504F};
}

/// @brief Enqueues zeros for all positions, including those of dropped rows.
template <class = void>
void clear_scores(const ScoreView& accumulated, cudaStream_t stream) {
  const std::size_t size = static_cast<std::size_t>(accumulated.num_sequences) *
                           static_cast<std::size_t>(accumulated.num_heads) *
                           static_cast<std::size_t>(accumulated.num_positions);
  check(cudaMemsetAsync(accumulated.data, 0, size * sizeof(float), stream), "attention scores");
}

/// @brief Enqueues the scores of rows at full rank for queries that were just attended to. One
/// launch; allocates nothing and does not wait.
/// @param target  receives the scores of a step
/// @param full_rows  most rows of a full list of the batch
template <class State>
void enqueue_measured_scores(const State& layer, const Batch& batch, const MeasuredQueries& queries,
                             const PromptScores& prompt, const DeviceScores& target,
                             int first_sequence, std::int64_t full_rows, cudaStream_t stream) {
  const LayerEdit& tables = layer.tables();
  // Full rows that are never dropped need no scores from a prompt.
  const bool listed = prompt.packed == nullptr || tables.has_scores(RowList::full);
  const int list_pieces =
                listed ? static_cast<int>((full_rows + kMeasuredRows - 1) / kMeasuredRows) : 0,
            units = tables.full.key_units;
  const int own_pieces =
      ((prompt.packed != nullptr ? prompt.rows : tables.ring_rows()) + kMeasuredRows - 1) /
      kMeasuredRows;
  const DeviceRows& rows = queries.rows;
  // Queries can be copied as words of two channels if channels are contiguous and words are
  // aligned.
  const bool split = rows.dtype != tables.full_type || rows.element_stride != 1 ||
                     rows.token_stride % 2 != 0 || rows.head_stride % 2 != 0 ||
                     reinterpret_cast<std::uintptr_t>(rows.data) % 4 != 0;
  const dim3 grid(static_cast<unsigned>(list_pieces + own_pieces),
                  static_cast<unsigned>(tables.num_heads), static_cast<unsigned>(batch.count));
  const std::size_t bytes =
      sizeof(uint2) *
      static_cast<std::size_t>(units * (kMeasuredColumns / 8) * 32 * (split ? 4 : 2));
  const auto launch = [&](auto* kernel) {
    detail::launch_kernel(kernel, grid, kStoreThreads, bytes, "attention_scores_kernel", stream,
                          tables, batch, queries, prompt, target, first_sequence, list_pieces);
  };
  detail::with_type<typename State::Kernels>(tables.full_type, [&](auto type) {
    if constexpr (detail::kMostFullUnits<typename State::Kernels> <= 8) {
      split ? launch(attention_scores_kernel<type(), 8, true>)
            : launch(attention_scores_kernel<type(), 8, false>);
    } else if (units <= 8) {
      split ? launch(attention_scores_kernel<type(), 8, true>)
            : launch(attention_scores_kernel<type(), 8, false>);
    } else {
      split ? launch(attention_scores_kernel<type(), 16, true>)
            : launch(attention_scores_kernel<type(), 16, false>);
    }
  });
}

/// @brief Enqueues accumulate_kernel. Allocates nothing and does not wait.
/// @param most_rows  most rows of a head's scored lists and its tail together, over the batch
template <class = void>
void enqueue_accumulate(const LayerState& layer, const Batch& batch, const DeviceScores& source,
                        int first_sequence, std::int64_t most_rows, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((most_rows + kStoreThreads - 1) / kStoreThreads),
                  static_cast<unsigned>(layer.tables().num_heads),
                  static_cast<unsigned>(batch.count));
  accumulate_kernel<>
      <<<grid, kStoreThreads, 0, stream>>>(layer.tables(), batch, source, first_sequence);
  check(cudaGetLastError(), "accumulate_kernel");
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
