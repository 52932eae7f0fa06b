// SPDX-License-Identifier: Apache-2.0
/// @file cuda/state/residual_store.cuh  Memory of the residuals: what compression lost of every row
/// (CacheConfig::keep_residuals).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/cuda/state/layer_view.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Rows that are decoded at a time, to be compared with the original rows.
inline constexpr std::int64_t kDecodedRows = 2048;

/// @brief Residuals of the rows of lists, and the largest value norms of the heads. Empty if
/// residuals are not kept.
class ResidualStore {
 public:
  ResidualStore() = default;
  /// @brief Allocates the memory, unless residuals are not kept.
  /// @param max_rows  of a head's list, by RowList
  /// @param tables  receives the pointers
  ResidualStore(const CacheConfig& config, const std::int64_t (&max_rows)[2], LayerEdit& tables)
      : heads_(config.shape.num_kv_heads) {
    if (!config.keep_residuals) return;
    const std::size_t heads =
        static_cast<std::size_t>(config.max_sequences) * static_cast<std::size_t>(heads_);
    // Full rows of 16 bits lose nothing. A list that stays empty gets one element.
    for (int list = config.full_row_bits == 8 ? 0 : 1; list < 2; ++list) {
      rows_[list] = DeviceArray<std::uint32_t>(
          (std::max)(std::size_t{1}, heads * static_cast<std::size_t>(max_rows[list])));
      tables.residuals[list] = rows_[list].data();
      tables.max_rows[list] = static_cast<std::int32_t>(max_rows[list]);
    }
    largest_values_ = DeviceArray<float>(heads);
    tables.largest_values = largest_values_.data();
  }
  /// @brief Clears the largest value norms of a sequence. Residuals of rows need no clearing: they
  /// are written before they are read.
  void clear(int slot, cudaStream_t stream) {
    if (largest_values_.bytes() == 0) return;
    check(cudaMemsetAsync(largest_values_.data() + slot * heads_, 0,
                          static_cast<std::size_t>(heads_) * sizeof(float), stream),
          "residuals");
  }
  std::size_t bytes() const {
    return rows_[0].bytes() + rows_[1].bytes() + largest_values_.bytes();
  }

 private:
  int heads_ = 0;
  DeviceArray<std::uint32_t> rows_[2];
  DeviceArray<float> largest_values_;
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
