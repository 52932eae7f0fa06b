// SPDX-License-Identifier: Apache-2.0
/// @file cuda/token_policy/row_choice.cuh  By what a token policy chooses rows on the device.
#pragma once

#include <cstdint>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief By what a member of a token policy chooses rows on the device.
enum class RowChoice : std::uint8_t { none, errors, scores, accumulated_scores };

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
