// SPDX-License-Identifier: Apache-2.0
/// @file cpu/epoch_store.hpp  Basis epochs: immutable sets of maps, shared by every segment and
/// sequence that uses them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/basis/rotate_maps.hpp"
#include "lowrankkv/concepts/quantizer.hpp"
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
  /// @brief Element `index` as f32.
  float at(int index) const {
    float value = 0.0F;
    to_f32(type, data.data() + static_cast<std::size_t>(index) * size_of(type), 1, &value);
    return value;
  }
  /// @brief target [rows, stride] as f32, the padding columns zero.
  void load(float* target, int stride) const {
    for (int row = 0; row < rows; ++row) {
      to_f32(type,
             data.data() +
                 static_cast<std::size_t>(row) * static_cast<std::size_t>(cols) * size_of(type),
             cols, target + row * stride);
      for (int col = cols; col < stride; ++col) target[row * stride + col] = 0.0F;
    }
  }
  /// @brief target [cols, stride] = transpose as f32, the padding columns zero. `scratch` holds one
  /// row.
  void load_transposed(float* target, int stride, float* scratch) const {
    for (int row = 0; row < rows; ++row) {
      to_f32(type,
             data.data() +
                 static_cast<std::size_t>(row) * static_cast<std::size_t>(cols) * size_of(type),
             cols, scratch);
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

/// @brief The stored maps of one KV head. An empty query_down equals key_down; an empty output_up
/// is the transpose of value_down.
///
/// Scales are the part of a quantizer's ChannelFold that the maps carry: rows are encoded with
/// down / scale and read with up * scale.
struct EpochHead {
  StoredMatrix key_down, query_down, value_down, output_up, key_mean, value_mean;
  StoredMatrix key_scale, value_scale;  ///< [1, rank] f32; empty: ones

  std::size_t bytes() const {
    return key_down.data.size() + query_down.data.size() + value_down.data.size() +
           output_up.data.size() + key_mean.data.size() + value_mean.data.size() +
           key_scale.data.size() + value_scale.data.size();
  }
  const StoredMatrix& query_map() const { return query_down.empty() ? key_down : query_down; }
  const StoredMatrix& encoder(Part part) const { return part == Part::key ? key_down : value_down; }
  const StoredMatrix& mean(Part part) const { return part == Part::key ? key_mean : value_mean; }
  int rank(Part part) const { return encoder(part).cols; }

  /// @brief Loads target [head_dim, stride]: the map from rows to coefficients.
  void load_encoder(Part part, float* target, int stride) const {
    encoder(part).load(target, stride);
    scale_columns(part, target, stride, encoder(part).rows, true);
  }
  /// @brief Loads target [head_dim, stride]: the map that queries are multiplied with.
  void load_query_map(float* target, int stride) const {
    query_map().load(target, stride);
    scale_columns(Part::key, target, stride, query_map().rows, false);
  }
  /// @brief Loads target [rank, stride]: the map from coefficients (or accumulated coefficients of
  /// values) to rows. `scratch` holds max(rank, head_dim) numbers.
  void load_decoder(Part part, float* target, int stride, float* scratch) const {
    if (part == Part::key) {
      query_map().load_transposed(target, stride, scratch);
    } else if (output_up.empty()) {
      value_down.load_transposed(target, stride, scratch);
    } else {
      output_up.load(target, stride);
    }
    const StoredMatrix& scale = part == Part::key ? key_scale : value_scale;
    for (int row = 0; row < scale.cols; ++row) {
      const float factor = scale.at(row);
      for (int channel = 0; channel < stride; ++channel) target[row * stride + channel] *= factor;
    }
  }

 private:
  void scale_columns(Part part, float* target, int stride, int rows, bool divide) const {
    const StoredMatrix& scale = part == Part::key ? key_scale : value_scale;
    constexpr int kTogether = 64;
    float factors[kTogether];
    for (int first = 0; first < scale.cols; first += kTogether) {
      const int count = (std::min)(kTogether, scale.cols - first);
      for (int col = 0; col < count; ++col)
        factors[col] = divide ? 1.0F / scale.at(first + col) : scale.at(first + col);
      for (int row = 0; row < rows; ++row) {
        float* numbers = target + row * stride + first;
        for (int col = 0; col < count; ++col) numbers[col] *= factors[col];
      }
    }
  }
};

/// @brief The quantizer's folds of one KV head's key and value channels.
struct HeadFolds {
  ChannelFold key, value;
};

/// @brief The epochs of a layer, reference-counted. Epoch 0 is the calibrated one: it lives as long
/// as the layer, and no sequence owns it.
class EpochStore {
 public:
  EpochStore() = default;
  explicit EpochStore(DType type) : type_(type) {}

  /// @brief Stores maps with their quantizer's folds, rounded to the store's type. The caller holds
  /// the first reference.
  std::int32_t add(const std::vector<HeadBasis>& heads, const std::vector<HeadFolds>& folds,
                   int head_dim) {
    std::vector<EpochHead> maps;
    for (std::size_t head = 0; head < heads.size(); ++head)
      maps.push_back(stored(heads[head], folds[head], head_dim));
    return adopt(std::move(maps));
  }
  /// @brief Takes over maps in stored form. The caller holds the first reference.
  std::int32_t adopt(std::vector<EpochHead>&& heads) {
    const std::size_t index = free_index();
    epochs_[index].references = 1;
    epochs_[index].heads = std::move(heads);
    return static_cast<std::int32_t>(index);
  }
  void share(std::int32_t epoch) { ++epochs_[static_cast<std::size_t>(epoch)].references; }
  void release(std::int32_t epoch) noexcept {
    Epoch& entry = epochs_[static_cast<std::size_t>(epoch)];
    if (--entry.references == 0) entry.heads.clear();
  }
  /// @brief Adds a reference to every epoch in use. @return the references before, per epoch
  std::vector<int> hold() {
    std::vector<int> references;
    for (const Epoch& epoch : epochs_) references.push_back(epoch.references);
    for (Epoch& epoch : epochs_) epoch.references += epoch.references > 0 ? 1 : 0;
    return references;
  }
  /// @brief Drops the references that hold() has added.
  void release_held(const std::vector<int>& references) noexcept {
    for (std::size_t epoch = 0; epoch < references.size(); ++epoch) {
      if (references[epoch] > 0) release(static_cast<std::int32_t>(epoch));
    }
  }
  /// @brief Restores all references to what they were before hold().
  void restore_held(const std::vector<int>& references) noexcept {
    for (std::size_t epoch = 0; epoch < epochs_.size(); ++epoch) {
      epochs_[epoch].references = epoch < references.size() ? references[epoch] : 0;
      if (epochs_[epoch].references == 0) epochs_[epoch].heads.clear();
    }
  }
  const EpochHead& head(std::int32_t epoch, int head) const {
    return epochs_[static_cast<std::size_t>(epoch)].heads[static_cast<std::size_t>(head)];
  }
  /// @brief Stored bytes of an epoch over all heads.
  std::size_t bytes(std::int32_t epoch) const {
    std::size_t sum = 0;
    for (const EpochHead& head : epochs_[static_cast<std::size_t>(epoch)].heads)
      sum += head.bytes();
    return sum;
  }
  std::int64_t num_alive() const {
    std::int64_t alive = 0;
    for (const Epoch& epoch : epochs_) alive += epoch.references > 0 ? 1 : 0;
    return alive;
  }

 private:
  std::size_t free_index() {
    std::size_t index = 0;
    while (index < epochs_.size() && epochs_[index].references > 0) ++index;
    if (index == epochs_.size()) epochs_.emplace_back();
    return index;
  }
  EpochHead stored(const HeadBasis& head, const HeadFolds& folds, int head_dim) const {
    const auto matrix = [&](int rows, int cols, const std::vector<float>& values) {
      return values.empty() ? StoredMatrix() : StoredMatrix(type_, rows, cols, values);
    };
    const auto columns = [&](const std::vector<float>& map, int rank, const ChannelFold& fold) {
      return matrix(head_dim, rank, rotated_columns(map, head_dim, rank, fold.rotation));
    };
    EpochHead result;
    result.key_down = columns(head.key_down, head.key_rank, folds.key);
    result.value_down = columns(head.value_down, head.value_rank, folds.value);
    result.query_down = columns(head.query_down, head.key_rank, folds.key);
    result.output_up =
        matrix(head.value_rank, head_dim,
               rotated_rows(head.output_up, head.value_rank, head_dim, folds.value.rotation));
    result.key_mean = matrix(1, head_dim, head.key_mean);
    result.value_mean = matrix(1, head_dim, head.value_mean);
    // Scales span more octaves than f16 has; they are few, so f32 costs little.
    if (!folds.key.scale.empty())
      result.key_scale = StoredMatrix(DType::f32, 1, head.key_rank, folds.key.scale);
    if (!folds.value.scale.empty())
      result.value_scale = StoredMatrix(DType::f32, 1, head.value_rank, folds.value.scale);
    return result;
  }
  struct Epoch {
    int references = 0;
    std::vector<EpochHead> heads;
  };
  DType type_ = DType::f16;
  std::vector<Epoch> epochs_;
};

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
