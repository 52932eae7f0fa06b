// SPDX-License-Identifier: Apache-2.0
/// @file cpu/attention_block.hpp  Online softmax of a block of query rows over a block of keys and
/// values.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "lowrankkv/cpu/product.hpp"
#include "lowrankkv/cpu/prompt_chunk.hpp"
#include "lowrankkv/cpu/simd/kernels.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// Query rows that are processed together: (query token, head of the group) pairs of one KV head.
inline constexpr int kQueryRows = 64;

/// @brief Unnormalised attention of a block: largest logit, sum of exp(logit - max), and sum of
/// exp(logit - max) times value.
struct PartialState {
  float* max = nullptr;
  float* sum = nullptr;
  float* accumulator = nullptr;  ///< [rows, stride]
  int stride = 0;

  void reset(int rows) const {
    for (int row = 0; row < rows; ++row) {
      max[row] = -std::numeric_limits<float>::infinity();
      sum[row] = 0.0F;
    }
    std::fill(accumulator, accumulator + static_cast<std::ptrdiff_t>(rows) * stride, 0.0F);
  }
};

/// @brief Query rows in the coordinates of the tile's keys, multiplied by the softmax scale.
struct QueryRows {
  const float* data = nullptr;  ///< [rows, stride]
  int stride = 0;
  int rows = 0;
  int key_width = 0;
  int value_width = 0;  ///< padded
  /// [rows], added to every logit (the term of centred keys); null: none.
  const float* bias = nullptr;
};

/// Logits of a row of queries lie so far from those of the next. Behind a block's own there is room
/// for what kernels write without a meaning.
inline constexpr int kLogitStride = simd::kBlockRows + simd::kPieceRows;
static_assert(simd::kBlockRows % kTile == 0);

/// @brief logits [rows, stride] = queries times the keys of a tile, f32, channel-major [key_width,
/// kTile]. Does not add the queries' bias. Writes padded(count) columns.
inline void tile_logits(const QueryRows& query, const float* keys, int count, float* logits,
                        int stride = kTile) {
  simd::KeyPiece pieces[kTile / simd::kPieceRows];
  simd::KeyBlock block{simd::Stored::f32, query.key_width, 4 * kTile, pieces, 0};
  for (int row = 0; row < count; row += simd::kPieceRows) {
    const auto* first = reinterpret_cast<const std::byte*>(keys + row);
    pieces[block.num_pieces++] = {first, first, simd::kPieceRows, row, query.key_width};
  }
  simd::kernels().logits[0](block, query.data, query.stride, query.rows, logits, stride);
}

/// @brief Folds the logits of a block of `count` keys into the maxima and sums of `state`, scales
/// its accumulators to the new maxima, and turns the logits into weights of values. Row i sees the
/// first visible(i) keys of the block (clamped to 0..count).
///
/// FlashAttention's recurrence: m' = max(m, max s); l' = l e^(m-m') + sum e^(s-m'); acc' = acc
/// e^(m-m') + P V, whose last product is absorb_values().
/// @param logits  [rows, kLogitStride]
template <class Visible>
void absorb_logits(const QueryRows& query, int count, Visible&& visible, float* logits,
                   const PartialState& state) {
  const simd::Kernels& kernels = simd::kernels();
  for (int row = 0; row < query.rows; ++row) {
    float* line = logits + row * kLogitStride;
    const int wish = visible(row);
    const int seen = wish < 0 ? 0 : wish > count ? count : wish;
    if (seen == 0) {
      std::fill(line, line + count, 0.0F);
      continue;
    }
    const float old_max = state.max[row];
    const float bias = query.bias != nullptr ? query.bias[row] : 0.0F;
    const float top = (std::max)(old_max, kernels.largest(line, seen, bias));
    const float sum = kernels.exponentials(line, seen, padded(count), top);
    state.max[row] = top;
    if (top == old_max) {
      state.sum[row] += sum;
      continue;
    }
    const float correction = std::exp(old_max - top);
    state.sum[row] = state.sum[row] * correction + sum;
    float* accumulator = state.accumulator + row * state.stride;
    for (int channel = 0; channel < query.value_width; ++channel)
      accumulator[channel] *= correction;
  }
}

/// @brief Adds weights [rows, kLogitStride] times values, f32 [count, stride], to the accumulators
/// of `state`.
inline void absorb_values(const QueryRows& query, const float* values, int count, int stride,
                          const float* weights, const PartialState& state) {
  const auto* first = reinterpret_cast<const std::byte*>(values);
  const simd::ValueRun run{first, first, count};
  simd::kernels().weighted_sum[0](
      {simd::Stored::f32, query.value_width, 4 * std::ptrdiff_t{stride}, &run, 1, count}, weights,
      kLogitStride, query.rows, state.accumulator, state.stride);
}

/// @brief state <- state + other, where other's accumulator was expanded to the same width.
inline void merge_states(int rows, int width, const PartialState& state,
                         const PartialState& other) {
  for (int row = 0; row < rows; ++row) {
    const float top = (std::max)(state.max[row], other.max[row]);
    if (top == -std::numeric_limits<float>::infinity()) continue;
    const float mine = std::exp(state.max[row] - top);
    const float theirs = std::exp(other.max[row] - top);
    float* target = state.accumulator + row * state.stride;
    const float* source = other.accumulator + row * other.stride;
    for (int channel = 0; channel < width; ++channel)
      target[channel] = target[channel] * mine + source[channel] * theirs;
    state.sum[row] = state.sum[row] * mine + other.sum[row] * theirs;
    state.max[row] = top;
  }
}

/// @brief Scratch memory of one thread for attention, allocated once: attend() allocates nothing.
class AttentionWorkspace {
 public:
  AttentionWorkspace() = default;
  /// @param widest    the largest of head_dim and all value ranks
  /// @param pre_rope  keys are stored pre-RoPE: adds scratch to up-project and rotate them
  AttentionWorkspace(int head_dim, int widest, int group_size, bool pre_rope)
      : rows_((std::max)(kQueryRows, group_size)), width_(padded(widest)) {
    const std::size_t rows = static_cast<std::size_t>(rows_);
    const std::size_t width = static_cast<std::size_t>(width_);
    row.resize(width);
    const std::size_t dim = static_cast<std::size_t>(padded(head_dim));
    map.resize(width * dim);
    query.resize(rows * dim);
    projected.resize(rows * dim);
    expanded.resize(rows * dim);
    logits.resize(rows * kLogitStride);
    key_pieces.resize(simd::kBlockRows);
    value_runs.resize(simd::kBlockRows);
    code_pieces.resize(simd::kBlockRows);
    code_weights.resize(std::size_t{simd::kBlockRows} * simd::kCodeScratch);
    bias.resize(rows);
    // Folded form: one more row, for the channels that are not rotated.
    keys.resize((pre_rope ? dim + 1 : dim) * kTile);
    if (pre_rope) {
      coefficients.resize(dim * kTile);
      cosines.resize(dim / 2 * kTile);
      sines.resize(dim / 2 * kTile);
      folded.resize((dim + 1) * dim);
      folded_mean.resize(dim + 1);
    }
    values.resize(width * kTile);
    statistics_.resize(6 * rows);
    accumulators_.resize(3 * rows * width);
  }
  int max_rows() const { return rows_; }
  /// @brief The most channels of a state: the stride that state() has room for.
  int width() const { return width_; }
  /// @brief A state of rows of `stride` channels. State 0 belongs to the block; state 1 to the
  /// segment being read; state 2 to the part of a split that is merged into either.
  PartialState state(int index, int stride) {
    const std::size_t rows = static_cast<std::size_t>(rows_);
    const std::size_t which = static_cast<std::size_t>(index);
    return {statistics_.data() + 2 * which * rows, statistics_.data() + (2 * which + 1) * rows,
            accumulators_.data() + which * rows * static_cast<std::size_t>(width_), stride};
  }
  std::size_t bytes() const {
    return 4 * (row.size() + map.size() + query.size() + projected.size() + expanded.size() +
                logits.size() + code_weights.size() + bias.size() + keys.size() + values.size() +
                coefficients.size() + cosines.size() + sines.size() + folded.size() +
                folded_mean.size() + statistics_.size() + accumulators_.size()) +
           key_pieces.size() * sizeof(simd::KeyPiece) + value_runs.size() * sizeof(simd::ValueRun) +
           code_pieces.size() * sizeof(simd::CodePiece);
  }

  std::vector<float> row, map, query, projected, expanded, logits, bias, keys, values, code_weights;
  std::vector<simd::KeyPiece> key_pieces;                                ///< of a block
  std::vector<simd::ValueRun> value_runs;                                ///< of a block
  std::vector<simd::CodePiece> code_pieces;                              ///< of a block
  std::vector<float> coefficients, cosines, sines, folded, folded_mean;  ///< for pre-RoPE keys

 private:
  int rows_ = 0;
  int width_ = 0;
  std::vector<float> statistics_, accumulators_;
};

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
