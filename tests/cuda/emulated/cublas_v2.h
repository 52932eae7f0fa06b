// SPDX-License-Identifier: Apache-2.0
// What the example engine asks of cuBLAS, on the host: products in f64, rounded at the end.
#pragma once

#include <cstddef>

using cublasHandle_t = void*;
enum cublasStatus_t { CUBLAS_STATUS_SUCCESS, CUBLAS_STATUS_NOT_SUPPORTED };
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T };

inline const char* cublasGetStatusString(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "success" : "not supported here";
}
inline cublasStatus_t cublasCreate(cublasHandle_t* handle) {
  *handle = nullptr;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasDestroy(cublasHandle_t) { return CUBLAS_STATUS_SUCCESS; }

/// Column-major c [rows, columns] = alpha a^T b, a [inner, rows], b [inner, columns].
inline cublasStatus_t cublasSgemm(cublasHandle_t, cublasOperation_t of_a, cublasOperation_t of_b,
                                  int rows, int columns, int inner, const float* alpha,
                                  const float* a, int a_stride, const float* b, int b_stride,
                                  const float* beta, float* c, int c_stride) {
  if (of_a != CUBLAS_OP_T || of_b != CUBLAS_OP_N || *beta != 0.0F)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  const auto at = [](int row, int column, int stride) {
    return static_cast<std::size_t>(column) * static_cast<std::size_t>(stride) +
           static_cast<std::size_t>(row);
  };
  for (int column = 0; column < columns; ++column) {
    for (int row = 0; row < rows; ++row) {
      double sum = 0.0;
      for (int i = 0; i < inner; ++i)
        sum += static_cast<double>(a[at(i, row, a_stride)]) *
               static_cast<double>(b[at(i, column, b_stride)]);
      c[at(row, column, c_stride)] = static_cast<float>(static_cast<double>(*alpha) * sum);
    }
  }
  return CUBLAS_STATUS_SUCCESS;
}
