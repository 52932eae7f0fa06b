// SPDX-License-Identifier: Apache-2.0
// The cache of a consumer whose kernels are compiled once, for one shape.
#pragma once

//! [caches]
#include <lowrankkv/cuda.hpp>

struct OneShape : lowrankkv::KernelSet {
  static constexpr bool bf16 = false, rope_pre = false, full_rows_8 = false;
  static constexpr int head_dim = 64;
};
using Cache = lowrankkv::FullKV<lowrankkv::CudaWith<OneShape>>;
//! [caches]
