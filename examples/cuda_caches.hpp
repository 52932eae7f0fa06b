// SPDX-License-Identifier: Apache-2.0
// The caches on the GPU of example 08 and of the C ABI, whose kernels are compiled once for both.
#pragma once

#include <lowrankkv/cuda.hpp>

// The head_dim of your models; 0: any, which compiles more kernels.
#if !defined(LOWRANKKV_EXAMPLE_HEAD_DIM)
#define LOWRANKKV_EXAMPLE_HEAD_DIM 0
#endif

//! [caches]
struct ExampleKernels : lowrankkv::KernelSet {
  static constexpr bool bf16 = false, rope_pre = false;  // rows in f16, keys after RoPE
  static constexpr int head_dim = LOWRANKKV_EXAMPLE_HEAD_DIM;
};
using ExampleGpu = lowrankkv::CudaWith<ExampleKernels>;
using FullOnGpu = lowrankkv::FullKV<ExampleGpu>;
using BudgetedOnGpu = lowrankkv::Budgeted<ExampleGpu>;
//! [caches]
