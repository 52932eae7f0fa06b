// SPDX-License-Identifier: Apache-2.0
/// @file cuda/scores/select_by_score.cuh  The rows with the largest masses: a radix selection by
/// one block.
#pragma once

#include <cub/block/block_scan.cuh>

#include <cstdint>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kEvictThreads = 1024;  ///< of a block that selects by masses

/// @brief A row's key among masses: larger ones stay, of equal ones those that came first. Bits of
/// numbers that are not negative are in their order; below them, positions. @param pinned positions
/// below it stay before any other
__device__ inline std::uint64_t score_key(float accumulated, std::int32_t position,
                                          std::int32_t pinned) {
  const std::uint32_t high = position < pinned     ? ~0U
                             : accumulated >= 0.0F ? __float_as_uint(accumulated + 0.0F) + 1U
                                                   : 0U;
  return static_cast<std::uint64_t>(high) << 32 | ~static_cast<std::uint32_t>(position);
}

/// @brief What the warps of a block share while it selects.
struct ScoreSelection {
  static constexpr int kCopies = 16;
  typename cub::BlockScan<int, kEvictThreads>::TempStorage storage;
  int histogram[kCopies]
               [256];  ///< masses are alike in their first bits: lanes would wait for each other
  std::uint64_t prefix;
  int still_wanted, in_digit;
};

/// @brief The smallest key of the `wanted` largest of `all`: as many are not smaller. Keys differ:
/// eight bits a pass until it is known. All threads call it, and are synchronised at the end.
/// @param key  key(row)
template <class Key>
__device__ inline std::uint64_t smallest_kept(Key&& key, int all, int wanted,
                                              ScoreSelection& shared) {
  if (wanted >= all) return 0;
  if (wanted <= 0) return ~std::uint64_t{0};  // no row has the largest of all keys
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
    int count = 0, above = 0;  // rows of this thread's digit, of larger ones: 255 is the first
    if (thread < 256) {
      for (int copy = 0; copy < ScoreSelection::kCopies; ++copy)
        count += shared.histogram[copy][255 - thread];
    }
    cub::BlockScan<int, kEvictThreads>(shared.storage).ExclusiveSum(count, above);
    if (thread < 256 && above < left && left <= above + count) {
      shared.prefix = known << 8 | static_cast<std::uint64_t>(255 - thread);
      shared.still_wanted = left - above;
      shared.in_digit = count;
    }
    __syncthreads();
    smallest = shared.prefix << shift;
    if (shared.in_digit == shared.still_wanted) break;  // all rows that begin so stay
  }
  __syncthreads();
  return smallest;
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
