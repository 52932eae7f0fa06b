// SPDX-License-Identifier: Apache-2.0
/// @file cpu/epoch_store.hpp  Basis epochs: immutable sets of maps, shared by every segment and sequence that uses them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/cpu/convert.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief An immutable matrix in its stored type.
struct StoredMatrix {
  DType type = DType::f32;
  int rows = 0;
  int cols = 0;
  std::vector<std::byte> data;

  StoredMatrix() = default;
  StoredMatrix(DType stored, int num_rows, int num_cols, const std::vector<float>& values)
      : type(stored), rows(num_rows), cols(num_cols), data(values.size() * size_of(stored)) {
    from_f32(stored, values.data(), static_cast<std::int64_t>(values.size()), data.data());
  }
  bool empty() const { return data.empty(); }
  /// @brief target [rows, stride] as f32, the padding columns zero.
  void load(float* target, int stride) const {
    for (int row = 0; row < rows; ++row) {
      to_f32(type, data.data() + static_cast<std::size_t>(row) * static_cast<std::size_t>(cols) * size_of(type), cols, target + row * stride);
      for (int col = cols; col < stride; ++col) target[row * stride + col] = 0.0F;
    }
  }
  /// @brief target [cols, stride] = transpose as f32, the padding columns zero. `scratch` holds one row.
  void load_transposed(float* target, int stride, float* scratch) const {
    for (int row = 0; row < rows; ++row) {
      to_f32(type, data.data() + static_cast<std::size_t>(row) * static_cast<std::size_t>(cols) * size_of(type), cols, scratch);
      for (int col = 0; col < cols; ++col) target[col * stride + row] = scratch[col];
    }
    for (int col = 0; col < cols; ++col) {
      for (int pad = rows; pad < stride; ++pad) target[col * stride + pad] = 0.0F;
    }
  }
  std::vector<float> values() const {
    std::vector<float> out(static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols));
    to_f32(type, data.data(), static_cast<std::int64_t>(out.size()), out.data());
    return out;
  }
};

/// @brief The stored maps of one KV head. Empty query_down or output_up: derived from the other map.
struct EpochHead {
  StoredMatrix key_down, query_down, value_down, output_up, key_mean, value_mean;

  const StoredMatrix& query_map() const { return query_down.empty() ? key_down : query_down; }
  std::size_t bytes() const {
    return key_down.data.size() + query_down.data.size() + value_down.data.size() + output_up.data.size() +
           key_mean.data.size() + value_mean.data.size();
  }
  /// @brief target [head_dim, stride]: what a query is multiplied with.
  void load_query_map(float* target, int stride) const { query_map().load(target, stride); }
  /// @brief target [value_rank, stride]: what an accumulated value is multiplied with.
  void load_output_map(float* target, int stride, float* scratch) const {
    if (output_up.empty()) {
      value_down.load_transposed(target, stride, scratch);
    } else {
      output_up.load(target, stride);
    }
  }
};

/// @brief The epochs of a layer. Epoch 0 is the calibrated one: it lives as long as the layer and belongs to nobody.
class EpochStore {
 public:
  EpochStore() = default;
  explicit EpochStore(DType type) : type_(type) {}

  /// @brief Stores maps, rounded to the store's type; the caller holds the first reference.
  std::int32_t add(const std::vector<HeadBasis>& heads, int head_dim) {
    std::size_t index = 0;
    while (index < epochs_.size() && epochs_[index].references > 0) ++index;
    if (index == epochs_.size()) epochs_.emplace_back();
    Epoch& epoch = epochs_[index];
    epoch.references = 1;
    epoch.heads.clear();
    for (const HeadBasis& head : heads) {
      EpochHead stored;
      stored.key_down = StoredMatrix(type_, head_dim, head.key_rank, head.key_down);
      stored.value_down = StoredMatrix(type_, head_dim, head.value_rank, head.value_down);
      if (!head.query_down.empty()) stored.query_down = StoredMatrix(type_, head_dim, head.key_rank, head.query_down);
      if (!head.output_up.empty()) stored.output_up = StoredMatrix(type_, head.value_rank, head_dim, head.output_up);
      if (!head.key_mean.empty()) stored.key_mean = StoredMatrix(type_, 1, head_dim, head.key_mean);
      if (!head.value_mean.empty()) stored.value_mean = StoredMatrix(type_, 1, head_dim, head.value_mean);
      epoch.heads.push_back(std::move(stored));
    }
    return static_cast<std::int32_t>(index);
  }
  void share(std::int32_t epoch) { ++epochs_[static_cast<std::size_t>(epoch)].references; }
  void release(std::int32_t epoch) {
    Epoch& entry = epochs_[static_cast<std::size_t>(epoch)];
    if (--entry.references == 0) entry.heads.clear();
  }
  const EpochHead& head(std::int32_t epoch, int head) const {
    return epochs_[static_cast<std::size_t>(epoch)].heads[static_cast<std::size_t>(head)];
  }
  /// @brief Stored bytes of an epoch over all heads.
  std::size_t bytes(std::int32_t epoch) const {
    std::size_t sum = 0;
    for (const EpochHead& head : epochs_[static_cast<std::size_t>(epoch)].heads) sum += head.bytes();
    return sum;
  }
  std::int64_t num_alive() const {
    std::int64_t alive = 0;
    for (const Epoch& epoch : epochs_) alive += epoch.references > 0 ? 1 : 0;
    return alive;
  }

 private:
  struct Epoch {
    int references = 0;
    std::vector<EpochHead> heads;
  };
  DType type_ = DType::f16;
  std::vector<Epoch> epochs_;
};

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
