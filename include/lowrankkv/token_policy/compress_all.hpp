// SPDX-License-Identifier: Apache-2.0
/// @file token_policy/compress_all.hpp  CompressAll: every row that leaves the tail is compressed
/// (StaticPCA).
#pragma once

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Token policy without sinks and without a recent window: only rows in the tail, pending
/// their flush, are at full rank.
struct CompressAll {
  static constexpr int recent = 0;
  friend bool operator==(const CompressAll&, const CompressAll&) = default;
};

LOWRANKKV_NAMESPACE_END
