// SPDX-License-Identifier: Apache-2.0
/// @file cuda/updater/static.cuh  Static on the Cuda backend.
#pragma once

#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/updater/static.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<Static, Cuda> {
  static constexpr bool adapts = false;
};

LOWRANKKV_NAMESPACE_END
