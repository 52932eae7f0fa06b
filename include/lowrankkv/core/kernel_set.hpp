// SPDX-License-Identifier: Apache-2.0
/// @file core/kernel_set.hpp  Which kernels of the Cuda backend a program compiles.
#pragma once

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief The kernels that a cache of the Cuda backend is compiled with: CudaWith<set>.
///
/// Types, shapes and RoPE forms are known when a cache is made, so every combination has a kernel
/// of its own, and by default all of them are compiled. An engine that serves one shape compiles a
/// tenth of that. A cache that needs a kernel outside its set is refused when it is made, with a
/// ValueError that names both values. Caches of different sets in one program share the kernels
/// that both have: kernels do not know the set.
struct KernelSet {
  bool f16 = true;          ///< full rows and coefficients in f16
  bool bf16 = true;         ///< the same in bf16
  bool rope_pre = true;     ///< keys that are stored before their rotary embedding
  bool full_rows_8 = true;  ///< full rows in 8 bits (CacheConfig::full_row_bits)
  int head_dim = 0;         ///< the only head_dim; 0: any
  int max_rank = 0;         ///< the largest rank of coefficients in f16 or bf16; 0: any
  /// The most units of codes that a head's keys or values have, each 32 channels of one plane of
  /// bits (16 at most); 0: any. Codes of 2, 4 and 8 bits of 128 channels have up to 8 units.
  int max_code_units = 0;

  friend constexpr bool operator==(const KernelSet&, const KernelSet&) = default;
};

LOWRANKKV_NAMESPACE_END
