// SPDX-License-Identifier: Apache-2.0
/// @file cpu/simd/kernels.hpp  The innermost loops of attention for several instruction sets, and
/// the choice between them when the program runs.
///
/// A program needs no -march flag and gets none. Loops are compiled for AVX-512, for AVX2 with FMA,
/// and for what the including source is compiled for (SSE2, NEON); kernels() takes the widest that
/// the processor has. The environment variable LOWRANKKV_SIMD (avx512, avx2, portable) asks for a
/// lower one.
///
/// Sources of one program may have different flags. The loops of each set of flags are in a
/// namespace of its own, so that the linker never puts those of one source in place of another's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "lowrankkv/cpu/simd/code_tiles.hpp"
#include "lowrankkv/cpu/simd/stored_tiles.hpp"

#if defined(__AVX512F__)
#define LOWRANKKV_SIMD_BASE base_avx512
#elif defined(__AVX2__)
#define LOWRANKKV_SIMD_BASE base_avx2
#elif defined(__AVX__)
#define LOWRANKKV_SIMD_BASE base_avx
#elif defined(__CUDACC__)
#define LOWRANKKV_SIMD_BASE base_nvcc
#else
#define LOWRANKKV_SIMD_BASE base
#endif
#define LOWRANKKV_SIMD_INLINE __attribute__((always_inline)) inline

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu::simd {

/// @brief Loops over f32 rows of queries. Strides are in elements.
struct Kernels {
  const char* name;  ///< avx512, avx2 or portable
  /// By Stored: out [rows, stride] = query [rows, query_stride] times the keys, from the column of
  /// each piece on. Writes up to kPieceRows - 1 columns behind the last row's, with numbers that
  /// have no meaning. Cost: rows x channels products a key.
  void (*logits[kStoredTypes])(const KeyBlock& keys, const float* query,
                               std::ptrdiff_t query_stride, int rows, float* out,
                               std::ptrdiff_t stride);
  /// By Stored: sums [rows, sum_stride] += weights [rows, weight_stride] times the values, all
  /// values.width channels. Cost: rows x width products a value.
  void (*weighted_sum[kStoredTypes])(const ValueBlock& values, const float* weights,
                                     std::ptrdiff_t weight_stride, int rows, float* sums,
                                     std::ptrdiff_t sum_stride);
  /// Adds `bias` to line[i], i < count. Returns the largest; -inf if there is none. Writes -inf
  /// behind them, up to a multiple of kPieceRows.
  float (*largest)(float* line, int count, float bias);
  /// line[i] <- exp(line[i] - top) for i < count, and 0 from there up to `width`, a multiple of
  /// kPieceRows. No line[i] is above top. Returns the sum. The relative error of each is below
  /// 2^-22 for line[i] - top of -87.3 to 0; those below -88 are 0.
  float (*exponentials)(float* line, int count, int width, float top);
  /// By Stored: target[i] = numbers[i] for i < count, exact.
  void (*to_f32[kStoredTypes])(const std::byte* numbers, std::ptrdiff_t count, float* target);
  /// (x, y) <- (x cos a - y sin a, y cos a + x sin a) for all pairs and columns, in place; a is the
  /// sum of both angles. Touches no column from `count` on. Cost: 8 products a pair and column.
  void (*rotate)(const RotatedPairs& numbers);
  /// Null: this set has no loops over packed codes. out [rows, stride] += query [rows,
  /// query_stride] times the keys, in the columns of the pieces' rows, which are all that is
  /// written. Query rows have all channels. Cost: rows x channels products a key.
  void (*code_logits)(const CodeBlock& keys, const float* query, std::ptrdiff_t query_stride,
                      int rows, float* out, std::ptrdiff_t stride);
  /// Null with code_logits. tile [channels, stride] = the keys times the scales of their rows, in
  /// the columns of the pieces' rows, which are all that is written, and the channels of the runs.
  void (*code_tile)(const CodeBlock& keys, float* tile, std::ptrdiff_t stride);
  /// Null with code_logits. sums [rows, sum_stride] += weights [rows, weight_stride], from the
  /// columns of the pieces on, times the values, in the channels of the runs. Cost: rows x channels
  /// products a value.
  void (*code_sum)(const CodeBlock& values, const float* weights, std::ptrdiff_t weight_stride,
                   int rows, float* sums, std::ptrdiff_t sum_stride);
};

/// What the flags of the including source change.
inline namespace LOWRANKKV_SIMD_BASE {

/// @brief Loops in registers of four f32: SSE2, NEON, or what the source's own flags allow.
namespace portable {
#define LOWRANKKV_SIMD_NAME "portable"
#define LOWRANKKV_SIMD_X86 0
#define LOWRANKKV_SIMD_LANES 4
#define LOWRANKKV_SIMD_PIECES 1
#if defined(__x86_64__) || defined(__i386__)
#define LOWRANKKV_SIMD_ROWS 2  // 16 registers
#else
#define LOWRANKKV_SIMD_ROWS 4
#endif
#include "lowrankkv/cpu/simd/kernel_bodies.hpp"
#undef LOWRANKKV_SIMD_ROWS
#undef LOWRANKKV_SIMD_PIECES
#undef LOWRANKKV_SIMD_LANES
#undef LOWRANKKV_SIMD_X86
#undef LOWRANKKV_SIMD_NAME
}  // namespace portable

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__)) && !defined(__CUDACC__)
#define LOWRANKKV_SIMD_LEVELS 1
#define LOWRANKKV_SIMD_X86 1

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
/// @brief Loops in registers of eight f32, 16 of them.
namespace avx2 {
#define LOWRANKKV_SIMD_NAME "avx2"
#define LOWRANKKV_SIMD_LANES 8
#define LOWRANKKV_SIMD_PIECES 1
#define LOWRANKKV_SIMD_ROWS 4
#include "lowrankkv/cpu/simd/kernel_bodies.hpp"
#undef LOWRANKKV_SIMD_ROWS
#undef LOWRANKKV_SIMD_PIECES
#undef LOWRANKKV_SIMD_LANES
#undef LOWRANKKV_SIMD_NAME
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#endif
/// @brief Loops in registers of 16 f32, 32 of them.
namespace avx512 {
#define LOWRANKKV_SIMD_NAME "avx512"
#define LOWRANKKV_SIMD_LANES 16
#define LOWRANKKV_SIMD_PIECES 4
#define LOWRANKKV_SIMD_ROWS 4
#include "lowrankkv/cpu/simd/kernel_bodies.hpp"
#undef LOWRANKKV_SIMD_ROWS
#undef LOWRANKKV_SIMD_PIECES
#undef LOWRANKKV_SIMD_LANES
#undef LOWRANKKV_SIMD_NAME
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef LOWRANKKV_SIMD_X86
#endif

/// @brief The kernels called `name` (Kernels::name); null if the processor, or this build, lacks
/// them.
inline const Kernels* kernels_named(const char* name) {
#if defined(LOWRANKKV_SIMD_LEVELS)
  __builtin_cpu_init();
  // Every processor with AVX2 and FMA converts f16 as well.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (std::strcmp(name, "avx2") == 0) return avx2 ? &avx2::kKernels : nullptr;
  if (std::strcmp(name, "avx512") == 0)
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
               ? &avx512::kKernels
               : nullptr;
#endif
  return std::strcmp(name, "portable") == 0 ? &portable::kKernels : nullptr;
}

/// @brief The widest kernels that the processor has, or those that LOWRANKKV_SIMD names, if it has
/// them. Chosen at the first call.
inline const Kernels& kernels() {
  static const Kernels* const chosen = [] {
    const char* wish = std::getenv("LOWRANKKV_SIMD");
    const Kernels* found = wish != nullptr ? kernels_named(wish) : nullptr;
    if (found == nullptr) found = kernels_named("avx512");
    if (found == nullptr) found = kernels_named("avx2");
    return found != nullptr ? found : kernels_named("portable");
  }();
  return *chosen;
}

}  // namespace LOWRANKKV_SIMD_BASE
}  // namespace cpu::simd
LOWRANKKV_NAMESPACE_END

#undef LOWRANKKV_SIMD_LEVELS
#undef LOWRANKKV_SIMD_INLINE
#undef LOWRANKKV_SIMD_BASE
