// SPDX-License-Identifier: Apache-2.0
/// @file cuda/scores/select_by_score.cuh  Selects the rows with the largest accumulated scores: a
/// radix selection by one block.
#pragma once

#include <cstdint>

#include "lowrankkv/config.hpp"
#include "lowrankkv/cuda/runtime/block_scan.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kEvictThreads = 1024;  ///< threads of a block that selects by score

/// @brief Sort key of a row: rows with larger keys stay.
///
/// Larger scores win; among equal scores the earlier row wins. The upper half holds the bits of the
/// score, which sort like the numbers because those are not negative. The lower half holds the
/// inverted position.
/// @param pinned  rows at positions below it stay before any other
__device__ inline std::uint64_t score_key(float accumulated, std::int32_t position,
                                          std::int32_t pinned) {
  const std::uint32_t high = position < pinned     ? ~0U
                             : accumulated >= 0.0F ? __float_as_uint(accumulated + 0.0F) + 1U
                                                   : 0U;
  return static_cast<std::uint64_t>(high) << 32 | ~static_cast<std::uint32_t>(position);
}

/// @brief Shared memory of a block while it selects.
struct ScoreSelection {
  static constexpr int kCopies = 16;
  BlockScan<kEvictThreads>::Storage storage;
  /// Scores have similar leading bits: with one copy, the atomic additions of lanes would
  /// serialise.
  int histogram[kCopies][256];
  std::uint64_t prefix;
  int still_wanted, in_digit;
};

/// @brief A lower bound of the `wanted` largest keys: exactly `wanted` keys are not smaller. Keys
/// must differ. Eight bits are determined per pass, until the bound separates the keys. All threads
/// call it and are synchronised at the end.
/// @param key  key(row)
/// @param all  number of rows
/// @return 0 if all rows are wanted; the largest number, which is no row's key, if none is
template <class Key>
__device__ inline std::uint64_t smallest_kept(Key&& key, int all, int wanted,
                                              ScoreSelection& shared) {
  if (wanted >= all) return 0;
  if (wanted <= 0) return ~std::uint64_t{0};  // no row has this key
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    shared.prefix = 0;
    shared.still_wanted = wanted;
  }
  std::uint64_t smallest = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    for (int item = thread; item < ScoreSelection::kCopies * 256; item += kEvictThreads)
      shared.histogram[item / 256][item % 256] = 0;
    __syncthreads();
    const std::uint64_t known = shared.prefix;
    const int left = shared.still_wanted;
    for (int row = thread; row < all; row += kEvictThreads) {
      const std::uint64_t own = key(row);
      if (shift == 56 || own >> (shift + 8) == known)
        atomicAdd(&shared.histogram[thread % ScoreSelection::kCopies][own >> shift & 0xffU], 1);
    }
    __syncthreads();
    // Rows with this thread's digit, and with larger digits; thread 0 has digit 255.
    int count = 0, above = 0;
    if (thread < 256) {
      for (int copy = 0; copy < ScoreSelection::kCopies; ++copy)
        count += shared.histogram[copy][255 - thread];
    }
    int all_rows = 0;
    BlockScan<kEvictThreads>::exclusive_sum(count, above, all_rows, shared.storage);
    if (thread < 256 && above < left && left <= above + count) {
      shared.prefix = known << 8 | static_cast<std::uint64_t>(255 - thread);
      shared.still_wanted = left - above;
      shared.in_digit = count;
    }
    __syncthreads();
    smallest = shared.prefix << shift;
    if (shared.in_digit == shared.still_wanted) break;  // all rows with this prefix stay
  }
  __syncthreads();
  return smallest;
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
