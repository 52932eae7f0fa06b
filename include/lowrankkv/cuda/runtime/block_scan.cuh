// SPDX-License-Identifier: Apache-2.0
/// @file cuda/runtime/block_scan.cuh  Prefix sums over the threads of a block. CUB has them too,
/// but its headers take two seconds to compile, a fifth of what all kernels of this library take.
#pragma once

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Exclusive prefix sums of integers over a block of kThreads threads, a number a thread.
/// @tparam kThreads  threads of the block, which has one dimension: a multiple of 32, at most 1024
template <int kThreads>
struct BlockScan {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024, "BlockScan: whole warps, at most 32");
  static constexpr int kWarps = kThreads / 32;

  /// Shared memory of a call. The threads must be synchronised before it is used again.
  struct Storage {
    int sums[kWarps];
  };

  /// @brief All threads call it. Synchronises them once.
  /// @param value  this thread's number
  /// @param before  gets the sum of the numbers of the threads before this one
  /// @param total  gets the sum of all numbers
  __device__ static void exclusive_sum(int value, int& before, int& total, Storage& storage) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int own = warp_inclusive_sum(value, lane);
    if (lane == 31) storage.sums[warp] = own;
    __syncthreads();
    // Every warp adds up the warps' sums, so that one synchronisation is enough.
    const int sums = warp_inclusive_sum(lane < kWarps ? storage.sums[lane] : 0, lane);
    const int earlier = __shfl_sync(~0U, sums, warp == 0 ? 0 : warp - 1);
    before = own - value + (warp == 0 ? 0 : earlier);
    total = __shfl_sync(~0U, sums, kWarps - 1);
  }

 private:
  __device__ static int warp_inclusive_sum(int value, int lane) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0U, value, distance);
      if (lane >= distance) value += other;
    }
    return value;
  }
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
