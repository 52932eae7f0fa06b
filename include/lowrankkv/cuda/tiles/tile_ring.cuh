// SPDX-License-Identifier: Apache-2.0
/// @file cuda/tiles/tile_ring.cuh  A warp's multi-stage ring of tiles in shared memory, and the PTX
/// instructions that the attention kernels share.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/runtime/device.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief 32-bit shared-memory address for PTX instructions.
__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// @brief A ring of `stages` tiles, or parts of tiles, of one warp. From sm_90 on, one bulk copy
/// fills a stage; before, all lanes copy 16 bytes at a time. All lanes make every call. Calls of
/// fetch() and wait() alternate, stage after stage.
template <int stages>
class TileRing {
 public:
  /// @param memory  [stages, most_bytes], 128-byte aligned
  /// @param barriers  [stages], of this warp alone
  /// @param used  number of stages in use, at most `stages`
  __device__ TileRing(std::uint8_t* memory, std::uint64_t* barriers, int most_bytes,
                      int used = stages)
      : memory_(memory), barriers_(barriers), most_bytes_(most_bytes), used_(used) {
#if __CUDA_ARCH__ >= 900
    // A step reads every tile once: tiles must not evict maps and partial states from L2.
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
  /// @brief Starts to copy `bytes` bytes into the stage that was used longest ago. A null source:
  /// no more tiles follow.
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
  /// @brief Waits for the oldest fetched stage and returns it. Its contents stay valid for as many
  /// later fetches as there are stages in use.
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

/// @brief Orders this thread's earlier accesses to shared memory before later bulk copies into it
/// (proxy fence). The caller synchronises.
__device__ __forceinline__ void release_to_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/// @brief Lets the next kernel of the stream begin, if it was launched early. No effect before
/// sm_90.
__device__ __forceinline__ void release_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/// @brief If this kernel was launched early: waits until the kernel before it is done and its
/// results are visible.
__device__ __forceinline__ void wait_for_last_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// @brief Makes the end of this grid imply the end of the kernel before it; only the first block
/// waits. For kernels that read no results of that kernel.
__device__ __forceinline__ void end_after_last_kernel() {
  if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0) wait_for_last_kernel();
}

/// @brief Prefetches a 128-byte line of global memory into L2.
__device__ __forceinline__ void prefetch_line(const float* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(line)) : "memory");
}

/// @brief Approximate 2^x; results below 2^-126 become 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// @brief Approximate 1 / sqrt(x), to 22 bits; infinity if x is below 2^-126.
__device__ __forceinline__ float rsqrt_fast(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// @brief Transposes an 8 x 8 matrix of 16-bit elements. Lane 4 i + t holds elements 2t and 2t + 1
/// of row i.
__device__ __forceinline__ std::uint32_t transposed(std::uint32_t x) {
  std::uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

/// @brief Loads four 8 x 8 matrices of 16-bit elements from shared memory (ldmatrix). Lane 8 m + i
/// passes the address of row i of matrix m, 16 aligned bytes.
/// @tparam transposes  whether the matrices are transposed
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

/// @brief c += a b: 16 x 32 unsigned bytes by 32 x 8 signed bytes, int32 sums.
__device__ __forceinline__ void mma_codes(int (&c)[4], std::uint32_t a0, std::uint32_t a1,
                                          std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                          std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// @brief c = a b, with operands as for mma_codes().
__device__ __forceinline__ void mma_codes_new(int (&c)[4], std::uint32_t a0, std::uint32_t a1,
                                              std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                              std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%10,%10,%10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
}

/// @brief c += a b: 16 x 16 by 16 x 8 elements of f16 or bf16, f32 sums.
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

/// @brief d = a b + c in f16, sums rounded to f16 too: d[0] holds columns 2t and 2t + 1 of row g,
/// d[1] those of row g + 8. Both rows start from the same word c.
__device__ __forceinline__ void mma_half_onto(std::uint32_t (&d)[2], const uint4& a,
                                              std::uint32_t b0, std::uint32_t b1, std::uint32_t c) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%8,%8};"
      : "=r"(d[0]), "=r"(d[1])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "r"(c));
}
/// @brief c += a b in f16, with operands and sums as for mma_half_onto().
__device__ __forceinline__ void mma_half(std::uint32_t (&c)[2], const uint4& a, std::uint32_t b0,
                                         std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};"
      : "+r"(c[0]), "+r"(c[1])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

/// @brief c += a b: 16 x 8 by 8 x 8 elements of tf32, f32 sums. The hardware ignores mantissa bits
/// beyond tf32's.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const float4& a, float b0, float b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a.x)), "r"(__float_as_uint(a.y)), "r"(__float_as_uint(a.z)),
        "r"(__float_as_uint(a.w)), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

/// @brief The part of an f32 number below its first ten mantissa bits, the bits that tf32 products
/// read.
__device__ __forceinline__ float beyond_tf32(float value) {
  return value - __uint_as_float(__float_as_uint(value) & ~0x1fffU);
}

/// @brief Splits a weight in [0, 1] into two 16-bit numbers that sum to it; the larger one is in
/// the low half of the word.
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

/// @brief The maximum over the lanes of a column (lanes t, t + 4, ...).
__device__ __forceinline__ float column_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0U, x, 4));
  x = fmaxf(x, __shfl_xor_sync(~0U, x, 8));
  return fmaxf(x, __shfl_xor_sync(~0U, x, 16));
}
/// @brief The sum over the lanes of a column.
__device__ __forceinline__ float column_sum(float x) {
  x += __shfl_xor_sync(~0U, x, 4);
  x += __shfl_xor_sync(~0U, x, 8);
  return x + __shfl_xor_sync(~0U, x, 16);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
