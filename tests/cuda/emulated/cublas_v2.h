// SPDX-License-Identifier: Apache-2.0
// What the example engine asks of cuBLAS, on the host: products in f64, rounded at the end.
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

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

inline cublasStatus_t cublasSetStream(cublasHandle_t, cudaStream_t) {
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasSetWorkspace(cublasHandle_t, void*, std::size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

enum cublasComputeType_t { CUBLAS_COMPUTE_32F };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT };

/// Column-major c [rows, columns] = alpha a^T b, a [inner, rows], b [inner, columns], all in f32.
inline cublasStatus_t cublasGemmEx(cublasHandle_t, cublasOperation_t of_a, cublasOperation_t of_b,
                                   int rows, int columns, int inner, const void* alpha,
                                   const void* of_weights, cudaDataType a_type, int a_stride,
                                   const void* of_rows, cudaDataType b_type, int b_stride,
                                   const void* beta, void* out, cudaDataType c_type, int c_stride,
                                   cublasComputeType_t, cublasGemmAlgo_t) {
  if (of_a != CUBLAS_OP_T || of_b != CUBLAS_OP_N || *static_cast<const float*>(beta) != 0.0F ||
      a_type != CUDA_R_32F || b_type != CUDA_R_32F || c_type != CUDA_R_32F)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  const auto* a = static_cast<const float*>(of_weights);
  const auto* b = static_cast<const float*>(of_rows);
  auto* c = static_cast<float*>(out);
  const double scale = static_cast<double>(*static_cast<const float*>(alpha));
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
      c[at(row, column, c_stride)] = static_cast<float>(scale * sum);
    }
  }
  return CUBLAS_STATUS_SUCCESS;
}
