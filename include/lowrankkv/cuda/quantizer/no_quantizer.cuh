// SPDX-License-Identifier: Apache-2.0
/// @file cuda/quantizer/no_quantizer.cuh  NoQuantizer on the Cuda backend: coefficients in 16 bits.
#pragma once

#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/cuda/runtime/forms.cuh"
#include "lowrankkv/quantizer/no_quantizer.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<NoQuantizer, Cuda> {
  static constexpr cuda::CodedForm form = cuda::CodedForm::plain;
  static DType type(const NoQuantizer& policy) { return policy.type; }
  static void validate(const NoQuantizer& policy) {
    if (policy.type == DType::f32)
      ::lowrankkv::detail::fail<ValueError>("NoQuantizer: type ", name_of(policy.type),
                                            ", f16 or bf16 expected on this backend");
  }
};

LOWRANKKV_NAMESPACE_END
