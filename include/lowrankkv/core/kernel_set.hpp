// SPDX-License-Identifier: Apache-2.0
/// @file core/kernel_set.hpp  Which kernels of the Cuda backend a program compiles.
#pragma once

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief The kernels that a cache of the Cuda backend is compiled with: all of them.
///
/// Types, shapes and RoPE forms are known when a cache is made, so every combination has a kernel
/// of its own, and Cuda compiles all of them. A program that serves one shape compiles a part:
///
///     struct OneShape : lowrankkv::KernelSet {
///       static constexpr bool bf16 = false, rope_pre = false, full_rows_8 = false;
///       static constexpr int head_dim = 128;
///     };
///     using Gpu = lowrankkv::CudaWith<OneShape>;
///
/// A cache that needs a kernel outside its set is refused when it is made, with a ValueError that
/// names both values. Caches of different sets in one program share the kernels that both have:
/// kernels do not know the set. (A set is a type, since nvcc 13.0 cannot name values of class type
/// that are template arguments in the code it gives to the host's compiler.)
struct KernelSet {
  static constexpr bool f16 = true;          ///< full rows and coefficients in f16
  static constexpr bool bf16 = true;         ///< the same in bf16
  static constexpr bool rope_pre = true;     ///< keys that are stored before RoPE
  static constexpr bool full_rows_8 = true;  ///< full rows in 8 bits (full_row_bits)
  static constexpr int head_dim = 0;         ///< the only head_dim; 0: any
  static constexpr int max_rank = 0;  ///< the largest rank of f16 or bf16 coefficients; 0: any
  /// The most units of codes that a head's keys or values have, each 32 planes of one width (16 at
  /// most); 0: any. BudgetOptions::max_code_units keeps a byte budget within it.
  static constexpr int max_code_units = 0;
};

LOWRANKKV_NAMESPACE_END
