// SPDX-License-Identifier: Apache-2.0
/// @file cpu/prompt_chunk.hpp  The rows of a prompt chunk that is not compressed yet, in exact f32
/// and laid out for attention.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "lowrankkv/cpu/convert.hpp"
#include "lowrankkv/cpu/product.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// Rows of one tile, the unit in which attention processes rows.
inline constexpr int kTile = 64;

/// @brief Per KV head, K in tiles [num_tiles, head_dim, kTile] and V in rows [num_rows,
/// padded(head_dim)]; and the last queries [window, num_qo_heads, head_dim], which score the
/// prompt's tokens.
class PromptChunk {
 public:
  PromptChunk() = default;
  PromptChunk(int num_heads, int num_qo_heads, int head_dim, int window)
      : num_heads_(num_heads),
        num_qo_heads_(num_qo_heads),
        head_dim_(head_dim),
        window_(window),
        keys_(static_cast<std::size_t>(num_heads)),
        values_(static_cast<std::size_t>(num_heads)) {}

  std::int64_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  int value_stride() const { return padded(head_dim_); }
  const float* key_tile(int head, std::int64_t tile) const {
    return keys_[static_cast<std::size_t>(head)].data() + tile * head_dim_ * kTile;
  }
  const float* values(int head, std::int64_t row) const {
    return values_[static_cast<std::size_t>(head)].data() + row * value_stride();
  }
  /// @brief Reads one key as it arrived, f32 [head_dim].
  void read_key(int head, std::int64_t row, float* target) const {
    const float* tile = key_tile(head, row / kTile) + row % kTile;
    for (int channel = 0; channel < head_dim_; ++channel) target[channel] = tile[channel * kTile];
  }
  /// @brief The last queries, [window, num_qo_heads, head_dim].
  const std::vector<float>& window_queries() const { return queries_; }
  int num_window_queries() const {
    return static_cast<int>(queries_.size()) / (std::max)(1, num_qo_heads_ * head_dim_);
  }
  const float* window_query(int index, int head) const {
    return queries_.data() +
           (static_cast<std::ptrdiff_t>(index) * num_qo_heads_ + head) * head_dim_;
  }
  std::size_t bytes() const {
    std::size_t floats = queries_.size();
    for (int head = 0; head < num_heads_; ++head) {
      floats += keys_[static_cast<std::size_t>(head)].size() +
                values_[static_cast<std::size_t>(head)].size();
    }
    return 4 * floats;
  }

  /// @brief Makes room for `count` more rows, so that add() does not allocate row by row.
  void reserve(std::int64_t count) {
    const std::size_t tiles = static_cast<std::size_t>((size_ + count + kTile - 1) / kTile);
    for (int head = 0; head < num_heads_; ++head) {
      keys_[static_cast<std::size_t>(head)].resize(tiles * static_cast<std::size_t>(head_dim_) *
                                                   kTile);
      values_[static_cast<std::size_t>(head)].resize(static_cast<std::size_t>(size_ + count) *
                                                     static_cast<std::size_t>(value_stride()));
    }
  }
  /// @brief Adds the rows of both views; `scratch` holds one row.
  void add(const KeyView& key, const ValueView& value, float* scratch) {
    reserve(key.num_tokens);
    for (int head = 0; head < num_heads_; ++head) {
      for (std::int64_t token = 0; token < key.num_tokens; ++token) {
        const std::int64_t row = size_ + token;
        load_row(key, token, head, scratch);
        float* tile = keys_[static_cast<std::size_t>(head)].data() +
                      row / kTile * head_dim_ * kTile + row % kTile;
        for (int channel = 0; channel < head_dim_; ++channel)
          tile[channel * kTile] = scratch[channel];
        load_row(value, token, head,
                 values_[static_cast<std::size_t>(head)].data() + row * value_stride());
      }
    }
    size_ += key.num_tokens;
  }
  /// @brief Keeps the last `window` queries seen so far.
  void add_queries(const QueryView& query) {
    if (window_ == 0) return;
    const std::int64_t first = (std::max)(std::int64_t{0}, query.num_tokens - window_);
    const std::size_t row =
        static_cast<std::size_t>(num_qo_heads_) * static_cast<std::size_t>(head_dim_);
    for (std::int64_t token = first; token < query.num_tokens; ++token) {
      queries_.resize(queries_.size() + row);
      float* target = queries_.data() + queries_.size() - row;
      for (int head = 0; head < num_qo_heads_; ++head)
        load_row(query, token, head, target + head * head_dim_);
    }
    const std::size_t limit = static_cast<std::size_t>(window_) * row;
    if (queries_.size() > limit)
      queries_.erase(queries_.begin(), queries_.end() - static_cast<std::ptrdiff_t>(limit));
  }
  /// @brief An empty chunk of the same shape.
  PromptChunk empty_like() const {
    return PromptChunk(num_heads_, num_qo_heads_, head_dim_, window_);
  }
  /// @brief Forgets the rows from `rows` on, and restores the last queries.
  void rewind(std::int64_t rows, std::vector<float>&& queries) noexcept {
    size_ = rows;
    queries_ = std::move(queries);
    const auto shrink = [](std::vector<float>& values, std::int64_t count) {
      if (values.size() > static_cast<std::size_t>(count))
        values.resize(static_cast<std::size_t>(count));
    };
    for (auto& keys : keys_) shrink(keys, (rows + kTile - 1) / kTile * kTile * head_dim_);
    for (auto& values : values_) shrink(values, rows * value_stride());
  }

 private:
  int num_heads_ = 0;
  int num_qo_heads_ = 0;
  int head_dim_ = 0;
  int window_ = 0;
  std::int64_t size_ = 0;
  std::vector<std::vector<float>> keys_;
  std::vector<std::vector<float>> values_;
  std::vector<float> queries_;
};

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
