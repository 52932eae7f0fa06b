// SPDX-License-Identifier: Apache-2.0
/// @file cpu/tail_rows.hpp  The tail: the last rows of every sequence at full rank, in buffers of
/// fixed capacity.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/cpu/convert.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Row-major rows of every (slot, KV head, key or value). SequenceLengths::tail_length is
/// their number.
class TailRows {
 public:
  TailRows() = default;
  TailRows(int num_slots, int num_heads, int capacity, int head_dim, DType type)
      : num_heads_(num_heads),
        capacity_(capacity),
        head_dim_(head_dim),
        type_(type),
        memory_(static_cast<std::size_t>(num_slots) * slot_bytes()) {}

  int capacity() const { return capacity_; }
  /// @brief Bytes of one token over all heads, keys and values.
  std::size_t token_bytes() const { return 2 * static_cast<std::size_t>(num_heads_) * row_bytes(); }
  std::size_t bytes() const { return memory_.size(); }

  /// @brief Stores one row [head_dim], rounded to the tail's type.
  void write(int slot, int head, Part part, int index, const float* row) {
    from_f32(type_, row, head_dim_, at(slot, head, part, index));
  }
  /// @brief Reads one row [head_dim].
  void read(int slot, int head, Part part, int index, float* row) const {
    to_f32(type_, at(slot, head, part, index), head_dim_, row);
  }
  /// @brief Keys of rows [first, first + count), channel-major: tile [head_dim, stride]. `scratch`
  /// holds one row.
  void load_keys(int slot, int head, int first, int count, float* tile, int stride,
                 float* scratch) const {
    for (int row = 0; row < count; ++row) {
      read(slot, head, Part::key, first + row, scratch);
      for (int channel = 0; channel < head_dim_; ++channel)
        tile[channel * stride + row] = scratch[channel];
    }
  }
  /// @brief Values of rows [first, first + count), row-major: tile [count, stride].
  void load_values(int slot, int head, int first, int count, float* tile, int stride) const {
    for (int row = 0; row < count; ++row)
      read(slot, head, Part::value, first + row, tile + row * stride);
  }
  /// @brief Removes `count` rows from `first` on, of `length` rows.
  void remove(int slot, int first, int count, int length) {
    for (int head = 0; head < num_heads_; ++head) {
      for (const Part part : {Part::key, Part::value}) {
        std::memmove(at(slot, head, part, first), at(slot, head, part, first + count),
                     static_cast<std::size_t>(length - first - count) * row_bytes());
      }
    }
  }
  /// @brief A copy of all rows of one slot.
  std::vector<std::byte> save(int slot) const {
    const std::byte* first = at(slot, 0, Part::key, 0);
    return {first, first + slot_bytes()};
  }
  /// @brief Writes the rows that save() has returned.
  void restore(int slot, const std::vector<std::byte>& saved) noexcept {
    std::memcpy(at(slot, 0, Part::key, 0), saved.data(), saved.size());
  }
  /// @brief Copies all rows of one slot to another.
  void copy(int source, int target) {
    std::memcpy(at(target, 0, Part::key, 0), at(source, 0, Part::key, 0), slot_bytes());
  }

 private:
  std::size_t row_bytes() const { return static_cast<std::size_t>(head_dim_) * size_of(type_); }
  std::size_t slot_bytes() const {
    return 2 * static_cast<std::size_t>(num_heads_) * static_cast<std::size_t>(capacity_) *
           row_bytes();
  }
  std::size_t offset(int slot, int head, Part part, int index) const {
    const std::size_t list =
        static_cast<std::size_t>(2 * (slot * num_heads_ + head) + (part == Part::value ? 1 : 0));
    return (list * static_cast<std::size_t>(capacity_) + static_cast<std::size_t>(index)) *
           row_bytes();
  }
  std::byte* at(int slot, int head, Part part, int index) {
    return memory_.data() + offset(slot, head, part, index);
  }
  const std::byte* at(int slot, int head, Part part, int index) const {
    return memory_.data() + offset(slot, head, part, index);
  }

  int num_heads_ = 0;
  int capacity_ = 0;
  int head_dim_ = 0;
  DType type_ = DType::f16;
  std::vector<std::byte> memory_;
};

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
