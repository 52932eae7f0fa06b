// SPDX-License-Identifier: Apache-2.0
/// @file cpu/project.hpp  Projects rows to coefficients, and back, with one epoch's maps, a tile at
/// a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lowrankkv/cpu/epoch_store.hpp"
#include "lowrankkv/cpu/product.hpp"
#include "lowrankkv/cpu/prompt_chunk.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief c = (x - mean) down, for up to kTile rows at a time. The maps are unpacked once.
class Projection {
 public:
  Projection(const EpochHead& maps, int head_dim)
      : dim_(head_dim), rows_(static_cast<std::size_t>(kTile * head_dim)) {
    for (const Part part : {Part::key, Part::value}) {
      Half& half = of(part);
      half.stride = padded(maps.rank(part));
      half.map.resize(static_cast<std::size_t>(head_dim * half.stride));
      half.coefficients.resize(static_cast<std::size_t>(kTile * half.stride));
      maps.load_encoder(part, half.map.data(), half.stride);
      if (!maps.mean(part).empty()) half.mean = maps.mean(part).values();
    }
  }
  /// @brief Elements from one row of coefficients to the next.
  int stride(Part part) const { return part == Part::key ? key_.stride : value_.stride; }
  /// @brief Coefficients [count, stride] of rows [count, head_dim]. The result is valid until the
  /// next call for the same part.
  const float* project(Part part, const float* rows, std::int32_t count) {
    Half& half = of(part);
    const float* source = rows;
    if (!half.mean.empty()) {
      for (std::int32_t row = 0; row < count; ++row) {
        for (int channel = 0; channel < dim_; ++channel) {
          rows_[static_cast<std::size_t>(row * dim_ + channel)] =
              rows[static_cast<std::ptrdiff_t>(row) * dim_ + channel] -
              half.mean[static_cast<std::size_t>(channel)];
        }
      }
      source = rows_.data();
    }
    product(count, half.stride, dim_, source, dim_, half.map.data(), half.stride,
            half.coefficients.data(), half.stride);
    return half.coefficients.data();
  }

 private:
  struct Half {
    int stride = 0;
    std::vector<float> map, mean, coefficients;
  };
  Half& of(Part part) { return part == Part::key ? key_ : value_; }
  int dim_ = 0;
  std::vector<float> rows_;
  Half key_, value_;
};

/// @brief x = c up + mean, for coefficients [count, coefficient_stride]: out [count,
/// padded(head_dim)], count <= kTile.
class Reconstruction {
 public:
  Reconstruction(const EpochHead& maps, Part part, int head_dim)
      : rank_(maps.rank(part)), width_(padded(head_dim)) {
    map_.resize(static_cast<std::size_t>(rank_ * width_));
    mean_.resize(static_cast<std::size_t>(width_));
    std::vector<float> scratch(static_cast<std::size_t>((std::max)(rank_, head_dim)));
    maps.load_decoder(part, map_.data(), width_, scratch.data());
    if (!maps.mean(part).empty()) maps.mean(part).load(mean_.data(), width_);
  }
  void apply(const float* coefficients, int coefficient_stride, std::int32_t count,
             float* out) const {
    for (std::int32_t row = 0; row < count; ++row)
      std::copy(mean_.begin(), mean_.end(), out + row * width_);
    add_product(count, width_, rank_, coefficients, coefficient_stride, map_.data(), width_, out,
                width_);
  }

 private:
  int rank_ = 0;
  int width_ = 0;
  std::vector<float> map_, mean_;
};

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
