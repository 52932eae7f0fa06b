// SPDX-License-Identifier: Apache-2.0
/// @file cpu/attention_block.hpp  Online softmax of a block of query rows over one tile of keys and
/// values, f32.
#pragma once

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "lowrankkv/cpu/matmul.hpp"
#include "lowrankkv/cpu/prompt_chunk.hpp"

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

/// @brief A tile of at most kTile rows: keys channel-major [key_width, kTile], values row-major
/// [count, value_stride].
struct Tile {
  const float* keys = nullptr;
  const float* values = nullptr;
  int value_stride = 0;
  int count = 0;
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

/// @brief line[i] <- exp(line[i] - top) for i < count, and 0 from there up to `width`, a multiple
/// of kPadding. @return the sum
///
/// Processes whole packets in a fixed order, so that neither addresses nor neighbours change the
/// bits of the result.
inline float exponentials(float* line, int count, int width, float top) {
  using namespace Eigen::internal;  // NOLINT: packet functions
  std::fill(line + count, line + width, top);
  const Packet shift = pset1<Packet>(top);
  for (int i = 0; i < width; i += kLanes)
    pstoreu(line + i, pexp(psub(ploadu<Packet>(line + i), shift)));
  std::fill(line + count, line + width, 0.0F);
  Packet sum = pset1<Packet>(0.0F);
  for (int i = 0; i < width; i += kLanes) sum = padd(sum, ploadu<Packet>(line + i));
  return predux(sum);
}

/// @brief logits [rows, kTile] = queries times the keys of a tile, channel-major [key_width,
/// kTile]. Does not add the queries' bias.
inline void tile_logits(const QueryRows& query, const float* keys, int count, float* logits) {
  matmul<false>(query.rows, padded(count), query.key_width, query.data, query.stride, keys, kTile,
                logits, kTile);
}

/// @brief Folds a tile with known logits into `state`, and overwrites the logits. Row i sees the
/// first visible(i) tokens of the tile (clamped to 0..count).
///
/// FlashAttention's recurrence: m' = max(m, max s); l' = l e^(m-m') + sum e^(s-m'); acc' = acc
/// e^(m-m') + P V.
/// @param logits  [rows, kTile]
template <class Visible>
void absorb_logits(const QueryRows& query, const Tile& tile, Visible&& visible, float* logits,
                   const PartialState& state) {
  for (int row = 0; row < query.rows; ++row) {
    float* line = logits + row * kTile;
    const int wish = visible(row);
    const int count = wish < 0 ? 0 : wish > tile.count ? tile.count : wish;
    if (count == 0) {
      std::fill(line, line + tile.count, 0.0F);
      continue;
    }
    if (query.bias != nullptr) {
      for (int token = 0; token < count; ++token) line[token] += query.bias[row];
    }
    const float old_max = state.max[row];
    float top = old_max;
    for (int token = 0; token < count; ++token) top = (std::max)(top, line[token]);
    const float sum = exponentials(line, count, padded(tile.count), top);
    const float correction = std::exp(old_max - top);
    state.max[row] = top;
    state.sum[row] = state.sum[row] * correction + sum;
    if (correction != 1.0F) {
      float* accumulator = state.accumulator + row * state.stride;
      for (int channel = 0; channel < query.value_width; ++channel)
        accumulator[channel] *= correction;
    }
  }
  matmul<true>(query.rows, query.value_width, tile.count, logits, kTile, tile.values,
               tile.value_stride, state.accumulator, state.stride);
}

/// @brief Computes the logits of a tile of keys, then absorb_logits(). @param logits  scratch
/// [rows, kTile]
template <class Visible>
void absorb_tile(const QueryRows& query, const Tile& tile, Visible&& visible, float* logits,
                 const PartialState& state) {
  bool any = false;
  for (int row = 0; row < query.rows; ++row) any = any || visible(row) > 0;
  if (!any) return;
  tile_logits(query, tile.keys, tile.count, logits);
  absorb_logits(query, tile, visible, logits, state);
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
    logits.resize(rows * kTile);
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
    statistics_.resize(4 * rows);
    accumulators_.resize(2 * rows * width);
  }
  int max_rows() const { return rows_; }
  /// State 0 belongs to the block, in head_dim channels; state 1 to the segment being read.
  PartialState state(int index) {
    const std::size_t rows = static_cast<std::size_t>(rows_);
    const std::size_t which = static_cast<std::size_t>(index);
    return {statistics_.data() + 2 * which * rows, statistics_.data() + (2 * which + 1) * rows,
            accumulators_.data() + which * rows * static_cast<std::size_t>(width_), width_};
  }
  std::size_t bytes() const {
    return 4 * (row.size() + map.size() + query.size() + projected.size() + expanded.size() +
                logits.size() + bias.size() + keys.size() + values.size() + coefficients.size() +
                cosines.size() + sines.size() + folded.size() + folded_mean.size() +
                statistics_.size() + accumulators_.size());
  }

  std::vector<float> row, map, query, projected, expanded, logits, bias, keys, values;
  std::vector<float> coefficients, cosines, sines, folded, folded_mean;  ///< for pre-RoPE keys

 private:
  int rows_ = 0;
  int width_ = 0;
  std::vector<float> statistics_, accumulators_;
};

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
