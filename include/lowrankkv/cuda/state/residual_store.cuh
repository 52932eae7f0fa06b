// SPDX-License-Identifier: Apache-2.0
/// @file cuda/state/residual_store.cuh  Memory for what compression lost of every row
/// (CacheConfig::keep_residuals).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/cuda/state/layer_view.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Rows that are decoded at a time to be compared with what they were.
inline constexpr std::int64_t kDecodedRows = 2048;

/// @brief Residuals of the rows of lists, and the heads' largest values; nothing, where they are
/// not kept.
class ResidualStore {
 public:
  ResidualStore() = default;
  /// @param max_rows  of a list  @param tables  are told where it is
  ResidualStore(const CacheConfig& config, const std::int64_t (&max_rows)[2], LayerEdit& tables)
      : heads_(config.shape.num_kv_heads) {
    if (!config.keep_residuals) return;
    const std::size_t heads =
        static_cast<std::size_t>(config.max_sequences) * static_cast<std::size_t>(heads_);
    for (int list = config.full_row_bits == 8 ? 0 : 1; list < 2;
         ++list) {  // full rows of 16 bits lose nothing
      rows_[list] = DeviceArray<std::uint32_t>((std::max)(
          std::size_t{1},
          heads * static_cast<std::size_t>(max_rows[list])));  // also of a list that stays empty
      tables.residuals[list] = rows_[list].data();
      tables.max_rows[list] = static_cast<std::int32_t>(max_rows[list]);
    }
    largest_values_ = DeviceArray<float>(heads);
    tables.largest_values = largest_values_.data();
  }
  /// @brief Forgets the values of a sequence; rows are written before they are read.
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
