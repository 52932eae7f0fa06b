// SPDX-License-Identifier: Apache-2.0
// The backend that bench/compile's programs are for: every kernel, or, with -DLOWRANKKV_ONE_SHAPE,
// those of one shape.
#pragma once

#include "lowrankkv/cuda/presets.cuh"

using namespace lowrankkv;

#if defined(LOWRANKKV_ONE_SHAPE)
struct OneShape : KernelSet {
  static constexpr bool bf16 = false, rope_pre = false, full_rows_8 = false;
  static constexpr int head_dim = 128, max_rank = 64, max_code_units = 8;
};
using Gpu = CudaWith<OneShape>;
#else
using Gpu = Cuda;
#endif
