// SPDX-License-Identifier: Apache-2.0
/// @file cuda/token_policy/row_choice.cuh  The evidence by which a token policy chooses rows on the
/// device.
#pragma once

#include <cstdint>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief The evidence by which a member of a token policy chooses rows: nothing, reconstruction
/// errors, prompt scores, or accumulated attention scores.
enum class RowChoice : std::uint8_t { none, errors, scores, accumulated_scores };

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
