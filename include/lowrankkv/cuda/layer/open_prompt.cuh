// SPDX-License-Identifier: Apache-2.0
/// @file cuda/layer/open_prompt.cuh  Staging of a prompt chunk that comes in several calls: its
/// rows are kept at full rank until the chunk is complete.
///
/// Cost: the chunk's keys and values are read and written once more than those of a prompt that
/// comes in one call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cuda/state/row_source.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Converts prompt rows to full_type [token, head, channel]. A head's row that is not
/// finite, or exceeds `limit` in magnitude, becomes zeros and is counted in tables.faults. One warp
/// per row of a head.
template <class Rows>
__global__ void __launch_bounds__(kStoreThreads)
    stage_rows_kernel(LayerEdit tables, Rows key, Rows value, std::int64_t count,
                      std::uint16_t* keys, std::uint16_t* values, float limit) {
  const std::int64_t row =
      static_cast<std::int64_t>(blockIdx.x) * (kStoreThreads / 32) + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, dim = tables.head_dim,
            head = static_cast<int>(row % tables.num_heads);
  const std::int64_t token = row / tables.num_heads;
  if (token >= count) return;
  bool fits = true;
  for (int channel = lane; channel < dim; channel += 32)
    fits = fits && fabsf(key.at(token, head, channel)) <= limit &&
           fabsf(value.at(token, head, channel)) <= limit;
  fits = __all_sync(~0U, fits) != 0;
  for (int channel = lane; channel < dim; channel += 32) {
    keys[row * dim + channel] =
        fits ? to_bits(tables.full_type, key.at(token, head, channel)) : std::uint16_t{0};
    values[row * dim + channel] =
        fits ? to_bits(tables.full_type, value.at(token, head, channel)) : std::uint16_t{0};
  }
  if (!fits && lane == 0) atomicAdd(tables.faults, 1U);
}

/// @brief Converts queries to f32 [token, head, channel].
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    stage_queries_kernel(DeviceRows query, std::int64_t count, int heads, int dim, float* target) {
  const std::int64_t size = count * heads * dim,
                     step = static_cast<std::int64_t>(gridDim.x) * kStoreThreads;
  for (std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kStoreThreads + threadIdx.x;
       item < size; item += step) {
    target[item] = query.at(item / dim / heads, static_cast<int>(item / dim % heads),
                            static_cast<int>(item % dim));
  }
}

/// @brief The staged part of a chunk: keys and values, the last queries, and, with accumulated
/// scores, the log-sum-exp of all its queries. Memory grows up to one chunk. Before anything is
/// added, reserve() must have made room.
class OpenPrompt {
 public:
  bool open = false;  ///< the prompt continues in a later call

  std::int64_t rows() const { return rows_; }
  /// @brief Capacity in rows, including the staged ones.
  std::int64_t room(const CacheShape& shape) const {
    return static_cast<std::int64_t>(keys_.size()) / (shape.num_kv_heads * shape.head_dim);
  }
  std::size_t bytes() const {
    return keys_.bytes() + values_.bytes() + queries_.bytes() + older_queries_.bytes() +
           lse_.bytes();
  }
  /// @brief Forgets the staged rows; keeps the memory for the next prompt.
  void clear() {
    open = false;
    rows_ = num_queries_ = 0;
  }

  /// @brief Makes room for `rows` more rows and `queries` more queries. May allocate, which waits
  /// for the stream. If that fails, the staged data is unchanged.
  /// @param window  only the last `window` queries are kept
  /// @param most  the most rows of a chunk
  /// @param has_scores  log-sum-exp is kept
  void reserve(const CacheShape& shape, std::int64_t rows, std::int64_t queries,
               std::int64_t window, std::int64_t most, bool has_scores, cudaStream_t stream) {
    const std::size_t row = static_cast<std::size_t>(shape.num_kv_heads * shape.head_dim),
                      query = static_cast<std::size_t>(shape.num_qo_heads * shape.head_dim),
                      heads = static_cast<std::size_t>(shape.num_qo_heads);
    grow(keys_, static_cast<std::size_t>(rows_) * row, (std::min)(rows_ + rows, most), most, row,
         stream);
    grow(values_, static_cast<std::size_t>(rows_) * row, (std::min)(rows_ + rows, most), most, row,
         stream);
    grow(queries_, static_cast<std::size_t>(num_queries_) * query,
         (std::min)(num_queries_ + queries, window), window, query, stream);
    // Otherwise a chunk has no more queries than the window.
    if (window < most && num_queries_ + queries > window)
      grow(older_queries_, 0, window, window, query, stream);
    if (has_scores)
      grow(lse_, static_cast<std::size_t>(rows_) * heads, (std::min)(rows_ + rows, most), most,
           heads, stream);
  }
  /// @brief Adds rows. reserve() has made room for them.
  void add_rows(const LayerEdit& tables, const KeyView& key, const ValueView& value, float limit,
                cudaStream_t stream) {
    const std::size_t had = static_cast<std::size_t>(rows_) *
                            static_cast<std::size_t>(key.num_heads) *
                            static_cast<std::size_t>(key.head_dim);
    const std::int64_t blocks = (key.num_tokens * key.num_heads - 1) / (kStoreThreads / 32) + 1;
    with_rows(key, value, [&](auto keys, auto values) {
      stage_rows_kernel<<<static_cast<unsigned>(blocks), kStoreThreads, 0, stream>>>(
          tables, keys, values, key.num_tokens, keys_.data() + had, values_.data() + had, limit);
    });
    check(cudaGetLastError(), "stage_rows_kernel");
    rows_ += key.num_tokens;
  }
  /// @brief Adds queries and keeps the last `window` of all. reserve() has made room for them.
  void add_queries(const QueryView& query, std::int64_t window, cudaStream_t stream) {
    const std::int64_t added = (std::min)(query.num_tokens, window),
                       kept = (std::min)(num_queries_, window - added);
    if (added == 0) return;
    const std::size_t width =
        static_cast<std::size_t>(query.num_heads) * static_cast<std::size_t>(query.head_dim);
    if (kept < num_queries_) {  // drop the oldest
      check(cudaMemcpyAsync(older_queries_.data(),
                            queries_.data() + static_cast<std::size_t>(num_queries_ - kept) * width,
                            static_cast<std::size_t>(kept) * width * sizeof(float),
                            cudaMemcpyDeviceToDevice, stream),
            "queries");
      std::swap(queries_, older_queries_);
    }
    stage_queries_kernel<>
        <<<static_cast<unsigned>((std::min)(
               std::int64_t{1024}, added * static_cast<std::int64_t>(width) / kStoreThreads + 1)),
           kStoreThreads, 0, stream>>>(device_rows(query.tokens(query.num_tokens - added, added)),
                                       added, query.num_heads, query.head_dim,
                                       queries_.data() + static_cast<std::size_t>(kept) * width);
    check(cudaGetLastError(), "stage_queries_kernel");
    num_queries_ = kept + added;
  }

  KeyView keys(const CacheShape& shape, DType type) const {
    return {keys_.data(),       type,           rows_,
            shape.num_kv_heads, shape.head_dim, std::int64_t{shape.num_kv_heads} * shape.head_dim,
            shape.head_dim};
  }
  ValueView values(const CacheShape& shape, DType type) const {
    return {values_.data(),     type,           rows_,
            shape.num_kv_heads, shape.head_dim, std::int64_t{shape.num_kv_heads} * shape.head_dim,
            shape.head_dim};
  }
  QueryView queries(const CacheShape& shape) const {
    return {queries_.data(), num_queries_, shape.num_qo_heads, shape.head_dim};
  }
  /// @brief Log-sum-exp of the staged tokens' queries [rows, num_qo_heads], if it is kept.
  float* lse() const { return lse_.data(); }

 private:
  /// Grows an array to at least `rows` rows of `width` elements: to twice its size, but not beyond
  /// `most` rows. Keeps the first `used` elements.
  template <class T>
  static void grow(DeviceArray<T>& array, std::size_t used, std::int64_t rows, std::int64_t most,
                   std::size_t width, cudaStream_t stream) {
    if (static_cast<std::size_t>(rows) * width <= array.size()) return;
    const std::int64_t twice =
        (std::max)(rows, 2 * static_cast<std::int64_t>(array.size() / width));
    DeviceArray<T> larger(static_cast<std::size_t>((std::max)(rows, (std::min)(twice, most))) *
                          width);
    if (used > 0)
      check(cudaMemcpyAsync(larger.data(), array.data(), used * sizeof(T), cudaMemcpyDeviceToDevice,
                            stream),
            "prompt");
    check(cudaStreamSynchronize(stream), "prompt");
    array = std::move(larger);
  }

  std::int64_t rows_ = 0, num_queries_ = 0;
  DeviceArray<std::uint16_t> keys_, values_;
  DeviceArray<float> queries_, older_queries_, lse_;
};

/// @brief The open prompts of a layer's sequences. A completed prompt leaves its memory to the next
/// one.
class OpenPrompts {
 public:
  explicit OpenPrompts(int max_sequences) : of_slots_(static_cast<std::size_t>(max_sequences)) {}

  const OpenPrompt& of(int slot) const { return of_slots_[static_cast<std::size_t>(slot)]; }
  OpenPrompt& of(int slot) { return of_slots_[static_cast<std::size_t>(slot)]; }
  /// @brief Begins a chunk, reusing spare memory.
  OpenPrompt& begin(int slot) {
    OpenPrompt& prompt = of(slot);
    if (prompt.bytes() == 0 && !spare_.empty()) {
      const bool open = std::exchange(prompt, std::move(spare_.back())).open;
      prompt.open = open;
      spare_.pop_back();
    }
    return prompt;
  }
  /// @brief Ends a prompt that is complete, or whose sequence ends. Its memory becomes spare.
  void end(int slot) {
    OpenPrompt& prompt = of(slot);
    prompt.clear();
    if (prompt.bytes() > 0) spare_.push_back(std::exchange(prompt, OpenPrompt()));
  }
  std::size_t bytes() const {
    std::size_t bytes = 0;
    for (const auto* prompts : {&of_slots_, &spare_}) {
      for (const OpenPrompt& prompt : *prompts) bytes += prompt.bytes();
    }
    return bytes;
  }

 private:
  std::vector<OpenPrompt> of_slots_, spare_;
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
