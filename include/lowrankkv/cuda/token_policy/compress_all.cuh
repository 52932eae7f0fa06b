// SPDX-License-Identifier: Apache-2.0
/// @file cuda/token_policy/compress_all.cuh  CompressAll on the Cuda backend.
#pragma once

#include <cstdint>

#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/token_policy/compress_all.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<CompressAll, Cuda> {
  static constexpr RowFate fate = RowFate::compressed;
};

LOWRANKKV_NAMESPACE_END
