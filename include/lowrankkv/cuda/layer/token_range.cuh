// SPDX-License-Identifier: Apache-2.0
/// @file cuda/layer/token_range.cuh  A range of stored rows to reconstruct, and their destination.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "lowrankkv/cuda/layer/layer_state.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Destination of a row that is not requested.
inline constexpr std::int64_t kNowhere = std::numeric_limits<std::int64_t>::min();

/// @brief A writable tensor [token, head, channel] in device memory, as kernels see it.
struct DeviceTarget {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t token_stride = 0, head_stride = 0;
  RowPages pages;

  /// @brief Offset in elements from `data` to a token's rows.
  __device__ std::int64_t place(std::int64_t token) const {
    return pages.used() ? pages.place(token, token_stride) : token * token_stride;
  }
  /// @brief place(token) if 0 <= token < count; else kNowhere.
  __device__ std::int64_t place_of(std::int64_t token, std::int64_t count) const {
    return token < 0 || token >= count ? kNowhere : place(token);
  }
  /// @brief Whether rows can be written in 16-byte stores.
  __device__ bool wide() const {
    const int elements = dtype == DType::f32 ? 4 : 8;
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && token_stride % elements == 0 &&
           head_stride % elements == 0 && pages.page_stride % elements == 0;
  }
};

/// @brief Converts a view to a DeviceTarget.
template <class View>
DeviceTarget device_target(const View& view) {
  return {view.data, view.dtype, view.token_stride, view.head_stride, view.pages};
}

/// @brief The requested rows: those of tokens [first, first + count), or, by_row, rows [first,
/// first + count) of one list (not of the tail).
struct TokenRange {
  std::int64_t first = 0, count = 0, first_tail = 0;  ///< first_tail: token where the tail begins
  bool by_row = false;
  /// By RowList: in every head the requested rows are among rows [begin, end) of the list.
  std::int64_t begin[2] = {0, 0}, end[2] = {0, 0};
  /// Device memory: compressed rows are requested if there is this merge, and counted from its
  /// first row. Null: they are those of the list.
  const MergePlan* merge = nullptr;

  __host__ __device__ int first_piece(RowList list) const {
    return static_cast<int>(begin[static_cast<int>(list)] / kStoreRows);
  }
  /// @brief Number of 64-row pieces of a list from first_piece() on.
  int pieces(RowList list) const {
    const int which = static_cast<int>(list);
    if (end[which] <= begin[which]) return 0;
    const int pieces =
        static_cast<int>((end[which] + kStoreRows - 1) / kStoreRows) - first_piece(list);
    return merge == nullptr ? pieces : pieces + 1;  // a merge may begin inside of a piece
  }
};

/// @brief The rows of tokens [first, first + count), all of which are stored.
inline TokenRange token_range(const LayerState& layer, int slot, std::int64_t first,
                              std::int64_t count) {
  const HostSequence& now = layer.sequence(slot);
  const std::int64_t full = now.rows.num_full, compressed = now.rows.num_compressed;
  TokenRange range{first, count, now.first_tail()};
  // Without explicit positions the full rows are the first tokens.
  const bool counted =
      layer.tables().positions[0] == nullptr && layer.tables().positions[1] == nullptr;
  const auto within = [&](std::int64_t row, std::int64_t rows, std::int64_t otherwise) {
    return counted ? (std::clamp)(row, std::int64_t{0}, rows) : otherwise;
  };
  range.begin[0] = within(first, full, 0);
  range.end[0] = within(first + count, full, full);
  range.begin[1] = within(first - full, compressed, 0);
  range.end[1] = within(first + count - full, compressed, compressed);
  return range;
}

/// @brief Rows [first, first + count) of one list.
inline TokenRange row_range(RowList list, std::int64_t first, std::int64_t count) {
  TokenRange range{first, count, 0, true};
  range.begin[static_cast<int>(list)] = first;
  range.end[static_cast<int>(list)] = first + count;
  return range;
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
