// SPDX-License-Identifier: Apache-2.0
/// @file updater/static.hpp  Static: the calibrated basis is never updated (StaticPCA, SubSpace-G).
#pragma once

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Updater policy that never moves a basis.
struct Static {
  friend bool operator==(const Static&, const Static&) = default;
};

LOWRANKKV_NAMESPACE_END
