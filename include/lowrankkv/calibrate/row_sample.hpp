// SPDX-License-Identifier: Apache-2.0
/// @file calibrate/row_sample.hpp  A bounded sample of the rows of a stream, for statistics that
/// moments do not give (percentiles, medians).
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "lowrankkv/config.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/views.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace calibrate {

/// @brief Rows spread evenly over a stream of unknown length: every stride-th row, where the stride
/// doubles when the sample is full.
class RowSample {
 public:
  RowSample() = default;
  RowSample(int head_dim, std::int64_t capacity) : dim_(head_dim), capacity_(capacity) {}
  /// @brief Restores a stored sample: rows [n, head_dim].
  RowSample(int head_dim, std::vector<float> rows)
      : dim_(head_dim),
        capacity_(static_cast<std::int64_t>(rows.size()) / head_dim),
        rows_(std::move(rows)) {}
  /// @brief Goes on with a stream.
  /// @param rows  those kept so far, [size(), head_dim]
  /// @param seen  rows of the stream so far, as seen() said
  /// @throws ShapeError unless so many of `seen` rows are kept
  RowSample(int head_dim, std::int64_t capacity, std::vector<float> rows, std::int64_t seen)
      : dim_(head_dim), capacity_(capacity), seen_(seen), rows_(std::move(rows)) {
    const auto kept = [&] { return seen_ > 0 ? (seen_ - 1) / stride_ + 1 : 0; };
    while (capacity_ > 0 && kept() > capacity_) stride_ *= 2;
    if (static_cast<std::int64_t>(rows_.size()) != kept() * dim_)
      ::lowrankkv::detail::fail<ShapeError>("row sample: ", rows_.size(), " numbers of rows, ",
                                            kept() * dim_, " expected of ", seen_, " rows of ",
                                            dim_);
  }
  /// @brief Adds rows of the stream, [n, head_dim], in stream order.
  void add(MatrixView rows) {
    for (std::int64_t row = 0; row < rows.rows; ++row, ++seen_) {
      if (seen_ % stride_ != 0) continue;
      if (size() == capacity_) {  // keep every second row
        for (std::int64_t kept = 0; 2 * kept < size(); ++kept)
          std::copy_n(rows_.begin() + 2 * kept * dim_, dim_, rows_.begin() + kept * dim_);
        rows_.resize(static_cast<std::size_t>((size() + 1) / 2 * dim_));
        stride_ *= 2;
        if (seen_ % stride_ != 0) continue;
      }
      rows_.insert(rows_.end(), rows.row(row), rows.row(row) + dim_);
    }
  }
  int head_dim() const { return dim_; }
  /// @brief Rows that are kept at most.
  std::int64_t capacity() const { return capacity_; }
  /// @brief Rows of the stream so far.
  std::int64_t seen() const { return seen_; }
  std::int64_t size() const {
    return dim_ == 0 ? 0 : static_cast<std::int64_t>(rows_.size()) / dim_;
  }
  /// @brief The rows kept, [size(), head_dim].
  const std::vector<float>& values() const { return rows_; }

 private:
  int dim_ = 0;
  std::int64_t capacity_ = 0, seen_ = 0, stride_ = 1;
  std::vector<float> rows_;
};

}  // namespace calibrate
LOWRANKKV_NAMESPACE_END
