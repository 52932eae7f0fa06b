// SPDX-License-Identifier: Apache-2.0
/// @file core/calls.hpp  What the calls of a cache take and give besides views and numbers.
#pragma once

#include <cstdint>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Whether a prompt goes on in a later call.
enum class Prompt : std::uint8_t { complete, continues };

/// @brief What truncate() did: exact inside the tail; deeper, epochs and updater state remember the
/// dropped rows.
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
