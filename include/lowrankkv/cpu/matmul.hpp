// SPDX-License-Identifier: Apache-2.0
/// @file cpu/matmul.hpp  The matrix product of projection, logits and value accumulation: C (+)= A
/// B, f32, for small matrices, without allocation.
///
/// A decode step multiplies 1 to 16 query rows by tiles of the cache. Eigen's general product packs
/// both operands and may allocate. This product reads them in place and keeps the block of C in
/// registers. SIMD comes from Eigen's packets, so it follows the target of the including program.
#pragma once

#include <Eigen/Core>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Eigen's widest f32 register for the target's instruction set.
using Packet = Eigen::internal::packet_traits<float>::type;
/// @brief f32 values in a Packet.
inline constexpr int kLanes = Eigen::internal::packet_traits<float>::size;
/// Leading dimensions of scratch matrices are multiples of this, whatever the packet size.
inline constexpr int kPadding = 16;
static_assert(kPadding % kLanes == 0);

/// @brief `count` rounded up to a multiple of kPadding.
constexpr int padded(int count) { return (count + kPadding - 1) / kPadding * kPadding; }

namespace detail {

/// C [M, N x lanes] (+)= A [M, k] B [k, N x lanes], C kept in M x N registers.
template <int M, int N, bool accumulate>
inline void matmul_block(int k, const float* a, int lda, const float* b, int ldb, float* c,
                         int ldc) {
  using Eigen::internal::pload1;
  using Eigen::internal::ploadu;
  using Eigen::internal::pmadd;
  using Eigen::internal::pset1;
  using Eigen::internal::pstoreu;
  Packet sum[M][N];
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < N; ++j)
      sum[i][j] = accumulate ? ploadu<Packet>(c + i * ldc + j * kLanes) : pset1<Packet>(0.0F);
  }
  for (int p = 0; p < k; ++p) {
    Packet row[N];
    for (int j = 0; j < N; ++j) row[j] = ploadu<Packet>(b + p * ldb + j * kLanes);
    for (int i = 0; i < M; ++i) {
      const Packet factor = pset1<Packet>(a[i * lda + p]);
      for (int j = 0; j < N; ++j) sum[i][j] = pmadd(factor, row[j], sum[i][j]);
    }
  }
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < N; ++j) pstoreu(c + i * ldc + j * kLanes, sum[i][j]);
  }
}

/// All columns for M rows: N registers at a time, then one at a time.
template <int M, int N, bool accumulate>
inline void matmul_rows(int n, int k, const float* a, int lda, const float* b, int ldb, float* c,
                        int ldc) {
  int column = 0;
  for (; column + N * kLanes <= n; column += N * kLanes) {
    matmul_block<M, N, accumulate>(k, a, lda, b + column, ldb, c + column, ldc);
  }
  for (; column < n; column += kLanes)
    matmul_block<M, 1, accumulate>(k, a, lda, b + column, ldb, c + column, ldc);
}

}  // namespace detail

/// @brief C [m, n] = A [m, k] B [k, n], or += if `accumulate`; row-major with leading dimensions
/// lda, ldb, ldc.
///
/// n is rounded up to a multiple of the packet. Columns up to there are read from B and written to
/// C, so both need leading dimensions of at least padded(n). The order of summation depends only on
/// k, not on m or n.
template <bool accumulate>
inline void matmul(int m, int n, int k, const float* a, int lda, const float* b, int ldb, float* c,
                   int ldc) {
  constexpr bool wide = kLanes >= 16;  // 32 registers
  int row = 0;
  if constexpr (wide) {
    for (; row + 8 <= m; row += 8)
      detail::matmul_rows<8, 2, accumulate>(n, k, a + row * lda, lda, b, ldb, c + row * ldc, ldc);
  }
  for (; row + 4 <= m; row += 4) {
    detail::matmul_rows<4, wide ? 4 : 2, accumulate>(n, k, a + row * lda, lda, b, ldb,
                                                     c + row * ldc, ldc);
  }
  for (; row + 2 <= m; row += 2)
    detail::matmul_rows<2, 4, accumulate>(n, k, a + row * lda, lda, b, ldb, c + row * ldc, ldc);
  for (; row < m; ++row)
    detail::matmul_rows<1, 4, accumulate>(n, k, a + row * lda, lda, b, ldb, c + row * ldc, ldc);
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
