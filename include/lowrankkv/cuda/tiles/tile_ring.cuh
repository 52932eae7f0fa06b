// SPDX-License-Identifier: Apache-2.0
/// @file cuda/tiles/tile_ring.cuh  A warp's ring of tiles in shared memory, filled ahead of use;
/// and the instructions the attention kernels share.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/runtime/device.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Address of shared memory as instructions want it.
__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// @brief `stages` tiles, or parts of tiles, of one warp. From sm_90 on each is one bulk copy;
/// before, 16-byte copies by all lanes. All lanes call everything; fetch() and wait() alternate,
/// stage after stage.
template <int stages>
class TileRing {
 public:
  /// @param memory    [stages, most_bytes], 128-byte aligned  @param barriers [stages], this warp's
  /// @param used  of the stages
  __device__ TileRing(std::uint8_t* memory, std::uint64_t* barriers, int most_bytes,
                      int used = stages)
      : memory_(memory), barriers_(barriers), most_bytes_(most_bytes), used_(used) {
#if __CUDA_ARCH__ >= 900
    // Tiles are read once a step: they must not push maps and partial states out of the cache.
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy_));
    if (threadIdx.x % 32 == 0) {
      for (int stage = 0; stage < stages; ++stage)
        asm volatile(
            "mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barriers_ + stage))
            : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
#endif
  }
  /// @brief Starts to copy `bytes` bytes into the stage that was used longest ago; null: nothing
  /// more comes.
  __device__ __forceinline__ void fetch(const std::uint8_t* source, int bytes) {
    std::uint8_t* target = memory_ + filling_ * most_bytes_;
#if __CUDA_ARCH__ >= 900
    if (source != nullptr && threadIdx.x % 32 == 0) {
      const std::uint32_t barrier = shared_address(barriers_ + filling_);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                   "r"(bytes)
                   : "memory");
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
          "[%1], %2, [%3], %4;" ::"r"(shared_address(target)),
          "l"(source), "r"(bytes), "r"(barrier), "l"(policy_)
          : "memory");
    }
#else
    if (source != nullptr) {
      for (int at = static_cast<int>(threadIdx.x % 32) * 16; at < bytes; at += 512) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target + at)),
                     "l"(source + at)
                     : "memory");
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    filling_ = filling_ + 1 == used_ ? 0 : filling_ + 1;
  }
  /// @brief Waits for what was fetched next. It stays until as many fetches later as there are
  /// stages.
  __device__ __forceinline__ const std::uint8_t* wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], "
        "%1;\n@done bra READY;\nbra WAIT;\nREADY:\n}" ::"r"(shared_address(barriers_ + using_)),
        "r"(phase_)
        : "memory");
#else
    if (used_ == stages)
      asm volatile("cp.async.wait_group %0;" ::"n"(stages - 1) : "memory");
    else if (used_ == stages - 1 && stages > 1)
      asm volatile("cp.async.wait_group %0;" ::"n"(stages > 1 ? stages - 2 : 0) : "memory");
    else
      asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncwarp();
#endif
    const std::uint8_t* tile = memory_ + using_ * most_bytes_;
    if (++using_ == used_) {
      using_ = 0;
      phase_ ^= 1U;
    }
    return tile;
  }

 private:
  std::uint8_t* memory_;
  std::uint64_t* barriers_;
  int most_bytes_, used_;
  int filling_ = 0, using_ = 0;
  std::uint32_t phase_ = 0;
  std::uint64_t policy_ = 0;
};

/// @brief Lets bulk copies write to shared memory that this thread has written to or read from. The
/// caller synchronises.
__device__ __forceinline__ void release_to_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/// @brief Lets the next kernel of the stream begin, if it was launched to do so. Nothing before
/// sm_90.
__device__ __forceinline__ void release_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/// @brief Waits until the kernel before this one, if this one was launched early, is done and its
/// results can be read.
__device__ __forceinline__ void wait_for_last_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// @brief The same for a grid as a whole: when it is done, the kernel before it is, though only its
/// first block has waited. For kernels that need nothing of that one.
__device__ __forceinline__ void end_after_last_kernel() {
  if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0) wait_for_last_kernel();
}

/// @brief Starts to bring 128 bytes of global memory into the cache that all multiprocessors share.
__device__ __forceinline__ void prefetch_line(const float* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(line)) : "memory");
}

/// @brief 2^x; 0 below 2^-126.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// @brief 1 / sqrt(x), to 22 bits; infinity where x is below 2^-126.
__device__ __forceinline__ float rsqrt_fast(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// @brief The 8 x 8 matrix of 16-bit elements whose rows the lanes hold in pairs, transposed.
__device__ __forceinline__ std::uint32_t transposed(std::uint32_t x) {
  std::uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

/// @brief Four 8 x 8 matrices of 16-bit elements from shared memory, transposed or not: lane 8 m +
/// i names row i of matrix m, 16 aligned bytes.
template <bool transposes>
__device__ __forceinline__ uint4 load_matrices(const std::uint16_t* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  uint4 words;
  if constexpr (transposes) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(address)
                 : "memory");
  }
  return words;
}

/// @brief c += a b, 16 x 32 unsigned by 32 x 8 signed bytes.
__device__ __forceinline__ void mma_codes(int (&c)[4], std::uint32_t a0, std::uint32_t a1,
                                          std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                          std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// @brief c = a b, the same.
__device__ __forceinline__ void mma_codes_new(int (&c)[4], std::uint32_t a0, std::uint32_t a1,
                                              std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                              std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%10,%10,%10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
}

/// @brief c += a b, 16 x 16 by 16 x 8 elements of f16 or bf16, f32 sums.
template <DType type>
__device__ __forceinline__ void mma_plain(float (&c)[4], const uint4& a, std::uint32_t b0,
                                          std::uint32_t b1) {
  if constexpr (type == DType::f16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
  }
}

/// @brief d = a b + c of f16, sums rounded to f16 too: d[0] has columns 2t and 2t + 1 of row g,
/// d[1] of row g + 8; c is of both rows.
__device__ __forceinline__ void mma_half_onto(std::uint32_t (&d)[2], const uint4& a,
                                              std::uint32_t b0, std::uint32_t b1, std::uint32_t c) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%8,%8};"
      : "=r"(d[0]), "=r"(d[1])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "r"(c));
}
/// @brief c += a b, the same.
__device__ __forceinline__ void mma_half(std::uint32_t (&c)[2], const uint4& a, std::uint32_t b0,
                                         std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};"
      : "+r"(c[0]), "+r"(c[1])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

/// @brief c += a b, 16 x 8 by 8 x 8 elements of tf32, f32 sums. Bits beyond tf32's are ignored.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const float4& a, float b0, float b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a.x)), "r"(__float_as_uint(a.y)), "r"(__float_as_uint(a.z)),
        "r"(__float_as_uint(a.w)), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

/// @brief What is left of a number when its first ten bits, all that tensor cores read, are taken
/// away.
__device__ __forceinline__ float beyond_tf32(float value) {
  return value - __uint_as_float(__float_as_uint(value) & ~0x1fffU);
}

/// @brief A weight in [0, 1] as two numbers of 16 bits, the larger in the low half of the word,
/// whose sum it is.
template <DType type>
__device__ __forceinline__ std::uint32_t split_in_two(float weight) {
  if constexpr (type == DType::f16) {
    const __half high = __float2half_rn(weight), low = __float2half_rn(weight - __half2float(high));
    return static_cast<std::uint32_t>(__half_as_ushort(high)) |
           static_cast<std::uint32_t>(__half_as_ushort(low)) << 16;
  } else {
    const __nv_bfloat16 high = __float2bfloat16_rn(weight),
                        low = __float2bfloat16_rn(weight - __bfloat162float(high));
    return static_cast<std::uint32_t>(__bfloat16_as_ushort(high)) |
           static_cast<std::uint32_t>(__bfloat16_as_ushort(low)) << 16;
  }
}

/// @brief The largest over the lanes that hold the same column (lanes t, t + 4, ...).
__device__ __forceinline__ float column_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0U, x, 4));
  x = fmaxf(x, __shfl_xor_sync(~0U, x, 8));
  return fmaxf(x, __shfl_xor_sync(~0U, x, 16));
}
/// @brief The sum over the same.
__device__ __forceinline__ float column_sum(float x) {
  x += __shfl_xor_sync(~0U, x, 4);
  x += __shfl_xor_sync(~0U, x, 8);
  return x + __shfl_xor_sync(~0U, x, 16);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
