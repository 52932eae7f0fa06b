// SPDX-License-Identifier: Apache-2.0
/// @file quantizer/no_quantizer.hpp  NoQuantizer: coefficients are stored as f32, f16 or bf16.
#pragma once

#include "lowrankkv/core/scalar.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Quantizer policy that only rounds to a floating-point type. f16 saturates at +-65504.
struct NoQuantizer {
  DType type = DType::f16;
  friend bool operator==(const NoQuantizer&, const NoQuantizer&) = default;
};

LOWRANKKV_NAMESPACE_END
