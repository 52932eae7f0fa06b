// SPDX-License-Identifier: Apache-2.0
// An engine's own paged K and V, as tests simulate it: pages in random order, NHD or HND, K and V
// apart or page by page in one array.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/engine_pages.hpp"
#include "lowrankkv/core/scalar.hpp"

namespace support {

class PagedEngine {
 public:
  PagedEngine(std::mt19937_64& random, const lowrankkv::CacheShape& shape, lowrankkv::DType dtype,
              int sequences, std::int64_t most_tokens)
      : shape_(shape),
        dtype_(dtype),
        page_tokens_(1 + static_cast<int>(random() % 20)),
        heads_first_(random() % 2 == 0),
        together_(random() % 2 == 0),
        tables_(static_cast<std::size_t>(sequences)) {
    lengths.resize(tables_.size());
    const std::int64_t pages = sequences * (most_tokens / page_tokens_ + 1);
    for (std::int64_t page = 0; page < pages; ++page)
      free_.push_back(static_cast<std::int32_t>(page));
    for (std::size_t i = free_.size(); i > 1; --i) std::swap(free_[i - 1], free_[random() % i]);
    memory.resize(static_cast<std::size_t>(2 * pages * page_size()) * size_of(dtype),
                  std::uint8_t{0xff});
    longest_ = most_tokens / page_tokens_ + 1;
  }

  /// Rows [n, heads, head_dim] at a sequence's end, rounded to the engine's type.
  void add(std::size_t sequence, const std::vector<float>& key, const std::vector<float>& value) {
    const std::int64_t row = std::int64_t{shape_.num_kv_heads} * shape_.head_dim,
                       count = static_cast<std::int64_t>(key.size()) / row;
    for (std::int64_t i = 0; i < count; ++i) {
      if (lengths[sequence] % page_tokens_ == 0) {
        tables_[sequence].push_back(free_.back());
        free_.pop_back();
      }
      ++lengths[sequence];
      for (int head = 0; head < shape_.num_kv_heads; ++head) {
        for (int channel = 0; channel < shape_.head_dim; ++channel) {
          const std::size_t from =
              static_cast<std::size_t>(i * row + head * shape_.head_dim + channel);
          put(false, sequence, lengths[sequence] - 1, head, channel, key[from]);
          put(true, sequence, lengths[sequence] - 1, head, channel, value[from]);
        }
      }
    }
    write_tables();
  }
  /// What the engine has of a sequence, [tokens, heads, head_dim].
  std::vector<float> rows(bool value, std::size_t sequence) const {
    std::vector<float> result;
    for (std::int64_t token = 0; token < lengths[sequence]; ++token) {
      for (int head = 0; head < shape_.num_kv_heads; ++head) {
        for (int channel = 0; channel < shape_.head_dim; ++channel) {
          const std::uint8_t* at = memory.data() + place(value, sequence, token, head, channel);
          std::uint32_t word = 0;
          std::memcpy(&word, at, size_of(dtype_));
          float number;
          std::memcpy(&number, &word, 4);
          const auto bits = static_cast<std::uint16_t>(word);
          result.push_back(dtype_ == lowrankkv::DType::f32   ? number
                           : dtype_ == lowrankkv::DType::f16 ? to_float(lowrankkv::Half{bits})
                                                             : to_float(lowrankkv::BFloat16{bits}));
        }
      }
    }
    return result;
  }
  /// @param base  of `memory`, or of a copy of it on the device
  lowrankkv::EnginePages views(void* base) const {
    void* values = static_cast<std::uint8_t*>(base) + value_offset();
    const std::int64_t stride = together_ ? 2 * page_size() : 0;
    const auto make = heads_first_ ? lowrankkv::EnginePages::hnd : lowrankkv::EnginePages::nhd;
    return make(base, values, dtype_, page_tokens_, shape_.num_kv_heads, shape_.head_dim, stride);
  }
  std::int64_t table_stride() const { return longest_; }

  std::vector<std::uint8_t> memory;
  std::vector<std::int32_t> indices, indptr, last_page_len, dense,
      lengths;  ///< as PageTables has them

 private:
  std::int64_t page_size() const {
    return std::int64_t{page_tokens_} * shape_.num_kv_heads * shape_.head_dim;
  }
  std::size_t value_offset() const {
    return together_ ? static_cast<std::size_t>(page_size()) * size_of(dtype_) : memory.size() / 2;
  }
  std::size_t place(bool value, std::size_t sequence, std::int64_t token, int head,
                    int channel) const {
    const std::int64_t page = tables_[sequence][static_cast<std::size_t>(token / page_tokens_)],
                       in_page = token % page_tokens_;
    const std::int64_t element =
        heads_first_ ? (head * page_tokens_ + in_page) * shape_.head_dim + channel
                     : (in_page * shape_.num_kv_heads + head) * shape_.head_dim + channel;
    return static_cast<std::size_t>(page * page_size() * (together_ ? 2 : 1) + element) *
               size_of(dtype_) +
           (value ? value_offset() : 0);
  }
  void put(bool value, std::size_t sequence, std::int64_t token, int head, int channel,
           float number) {
    std::uint32_t word;
    std::memcpy(&word, &number, 4);
    if (dtype_ == lowrankkv::DType::f16) word = lowrankkv::to_half(number).bits;
    if (dtype_ == lowrankkv::DType::bf16) word = lowrankkv::to_bfloat16(number).bits;
    std::memcpy(memory.data() + place(value, sequence, token, head, channel), &word,
                size_of(dtype_));
  }
  void write_tables() {
    indices.clear();
    last_page_len.clear();
    indptr.assign(1, 0);
    dense.assign(tables_.size() * static_cast<std::size_t>(longest_), -1);
    for (std::size_t i = 0; i < tables_.size(); ++i) {
      indices.insert(indices.end(), tables_[i].begin(), tables_[i].end());
      indptr.push_back(static_cast<std::int32_t>(indices.size()));
      last_page_len.push_back(lengths[i] == 0 ? 0 : (lengths[i] - 1) % page_tokens_ + 1);
      std::copy(
          tables_[i].begin(), tables_[i].end(),
          dense.begin() + static_cast<std::ptrdiff_t>(i * static_cast<std::size_t>(longest_)));
    }
  }

  lowrankkv::CacheShape shape_;
  lowrankkv::DType dtype_;
  int page_tokens_;
  bool heads_first_, together_;
  std::int64_t longest_ = 0;
  std::vector<std::int32_t> free_;
  std::vector<std::vector<std::int32_t>> tables_;
};

}  // namespace support
