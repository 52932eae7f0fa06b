// SPDX-License-Identifier: Apache-2.0
/// @file cuda/attention/post_rope/reduce_states.cuh  Folds partial attention states in a fixed
/// order.
#pragma once

#include "lowrankkv/cuda/state/attention_step.cuh"
#include "lowrankkv/cuda/tiles/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Factor of a state with maximum `top` when it is rescaled to maximum `best`.
__device__ __forceinline__ float state_factor(float top, float best) {
  return top > -INFINITY ? exp2_fast(top - best) : 0.0F;
}
/// Adds the next state's sum to a state's sum. Every merge uses these same operations, so the
/// result does not depend on which thread does it.
__device__ __forceinline__ float fold(float sum, float sum_factor, float next, float next_factor) {
  return fmaf(next, next_factor, sum * sum_factor);
}

/// Folds the states of a block's warps, in shared memory [warps, 3 + channels, kBlockColumns], warp
/// after warp, into one state in global memory. All threads call it.
/// @param shift  added to the maximum of this thread's column
/// @param factors  shared memory of 2 x kAttendWarps x kBlockColumns floats
__device__ inline void fold_warps(const float* states, int channels, float shift, float* factors,
                                  float* target) {
  const int size = (3 + channels) * kBlockColumns, warps = static_cast<int>(blockDim.x) / 32,
            thread = static_cast<int>(threadIdx.x);
  // One warp: lane 4 w + c has the maximum of column c in warp w.
  if (thread < kAttendWarps * kBlockColumns) {
    const int warp = thread / kBlockColumns, column = thread % kBlockColumns;
    const float own = warp < warps ? states[warp * size + column] : -INFINITY;
    float best = own;  // over the warps up to this one
#pragma unroll
    for (int distance = kBlockColumns; distance < 32; distance *= 2) {
      const float other = __shfl_up_sync(~0U, best, distance);
      if (thread >= distance) best = fmaxf(best, other);
    }
    float before = __shfl_up_sync(~0U, best, kBlockColumns);
    if (warp == 0) before = -INFINITY;
    factors[thread] = state_factor(before, best);
    factors[kAttendWarps * kBlockColumns + thread] = state_factor(own, best);
    if (warp == kAttendWarps - 1) target[column] = best + shift;
  }
  __syncthreads();
  const float4 *before = reinterpret_cast<const float4*>(factors), *own = before + kAttendWarps;
  for (int item = 1 + thread; item < 3 + channels; item += static_cast<int>(blockDim.x)) {
    float4 total = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll 4
    for (int warp = 0; warp < warps; ++warp) {
      const float4 value = *reinterpret_cast<const float4*>(states + warp * size +
                                                            item * kBlockColumns),
                   a = before[warp], b = own[warp];
      total = {fold(total.x, a.x, value.x, b.x), fold(total.y, a.y, value.y, b.y),
               fold(total.z, a.z, value.z, b.z), fold(total.w, a.w, value.w, b.w)};
    }
    *reinterpret_cast<float4*>(target + item * kBlockColumns) = total;
  }
}

}  // namespace detail
}  // namespace cuda
LOWRANKKV_NAMESPACE_END
