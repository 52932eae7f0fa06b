// SPDX-License-Identifier: Apache-2.0
/// @file basis/rotate_maps.hpp  Folds a rotation of the coefficients into maps: encoders and query
/// maps are multiplied from the right, decoders of coefficients from the left.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace detail {

/// Product of left [rows, inner] and right [inner, cols], row-major, summed in f64.
template <class Left, class Right>
std::vector<float> map_product(int rows, int inner, int cols, Left&& left, Right&& right) {
  std::vector<float> out;
  out.reserve(static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols));
  std::vector<double> sums(static_cast<std::size_t>(cols));
  for (int row = 0; row < rows; ++row) {
    std::fill(sums.begin(), sums.end(), 0.0);
    for (int k = 0; k < inner; ++k) {
      const double own = left(row, k);
      for (int col = 0; col < cols; ++col)
        sums[static_cast<std::size_t>(col)] += own * right(k, col);
    }
    for (const double sum : sums) out.push_back(static_cast<float>(sum));
  }
  return out;
}

}  // namespace detail

/// @brief map [rows, rank] times rotation [rank, rank]; either may be empty. Cost: rows x rank^2.
inline std::vector<float> rotated_columns(const std::vector<float>& map, int rows, int rank,
                                          const std::vector<float>& rotation) {
  if (map.empty() || rotation.empty()) return map;
  return detail::map_product(
      rows, rank, rank,
      [&](int row, int k) { return map[static_cast<std::size_t>(row * rank + k)]; },
      [&](int k, int col) { return rotation[static_cast<std::size_t>(k * rank + col)]; });
}
/// @brief transpose(rotation) [rank, rank] times map [rank, cols]; either may be empty. Cost:
/// rank^2 x cols.
inline std::vector<float> rotated_rows(const std::vector<float>& map, int rank, int cols,
                                       const std::vector<float>& rotation) {
  if (map.empty() || rotation.empty()) return map;
  return detail::map_product(
      rank, rank, cols,
      [&](int row, int k) { return rotation[static_cast<std::size_t>(k * rank + row)]; },
      [&](int k, int col) { return map[static_cast<std::size_t>(k * cols + col)]; });
}

LOWRANKKV_NAMESPACE_END
