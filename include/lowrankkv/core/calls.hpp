// SPDX-License-Identifier: Apache-2.0
/// @file core/calls.hpp  Small argument and result types of a cache's calls.
#pragma once

#include <cstdint>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Whether the prompt is complete, or continues in a later call.
enum class Prompt : std::uint8_t { complete, continues };

/// @brief Result of truncate(). `exact` within the tail. `inexact` below it: epochs and updater
/// state still reflect the removed rows.
enum class TruncateResult : std::uint8_t { exact, inexact };

/// @brief The parameters of a cache's policies; each has the paper's defaults.
template <class Basis, class Updater, class TokenPolicy, class Quantizer>
struct Policies {
  Basis basis{};
  Updater updater{};
  TokenPolicy token_policy{};
  Quantizer quantizer{};
};

LOWRANKKV_NAMESPACE_END
