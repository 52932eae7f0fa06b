// SPDX-License-Identifier: Apache-2.0
/// @file cpu/token_policy/compress_all.hpp  CompressAll on the CPU.
#pragma once

#include <algorithm>
#include <span>

#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/token_policy/compress_all.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<CompressAll, Cpu> {
  static constexpr bool compresses = true;
  static constexpr Evidence evidence = Evidence::none;
  static int recent(const CompressAll&) { return CompressAll::recent; }
  static RowBounds bounds(const CompressAll&, const RowBatch& batch) { return {0, batch.num_rows}; }
  static void classify(const CompressAll&, const RowBatch&, std::span<RowFate> fates) {
    std::fill(fates.begin(), fates.end(), RowFate::compressed);
  }
};

static_assert(TokenPolicyFor<CompressAll, Cpu>);

LOWRANKKV_NAMESPACE_END
