// SPDX-License-Identifier: Apache-2.0
/// @file cpu/product.hpp  The matrix product of projection, up-projection and expansion: C (+)= A
/// B, f32, by the processor's kernels, without allocation.
///
/// The rows of C are taken four at a time, 64 columns in registers over all of k, as the sums of
/// attention over values are (docs/cpu_kernels.md).
#pragma once

#include <algorithm>
#include <cstddef>

#include "lowrankkv/cpu/simd/kernels.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// Leading dimensions of scratch matrices are multiples of this, whatever the processor.
inline constexpr int kPadding = simd::kPieceRows;

/// @brief `count` rounded up to a multiple of kPadding.
constexpr int padded(int count) { return (count + kPadding - 1) / kPadding * kPadding; }

/// @brief C [m, n] += A [m, k] B [k, n], f32, row-major with leading dimensions lda, ldb, ldc. n is
/// a multiple of kPadding.
///
/// An element of C is one chain of sums over k, in its order: its bits do not depend on m and n.
inline void add_product(int m, int n, int k, const float* a, int lda, const float* b, int ldb,
                        float* c, int ldc) {
  const auto* first = reinterpret_cast<const std::byte*>(b);
  const simd::ValueRun run{first, first, k};
  simd::kernels().weighted_sum[0]({simd::Stored::f32, n, 4 * std::ptrdiff_t{ldb}, &run, 1, k}, a,
                                  lda, m, c, ldc);
}
/// @brief C [m, n] = A [m, k] B [k, n]: add_product() to zeros.
inline void product(int m, int n, int k, const float* a, int lda, const float* b, int ldb, float* c,
                    int ldc) {
  for (int row = 0; row < m; ++row) std::fill_n(c + std::ptrdiff_t{row} * ldc, n, 0.0F);
  add_product(m, n, k, a, lda, b, ldb, c, ldc);
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
