// SPDX-License-Identifier: Apache-2.0
// What measurements of given tokens share: one sequence at a time, the same prompt for all methods,
// then steps of some tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "evaluate.hpp"

namespace llama {

using Ids = std::vector<std::int32_t>;

inline constexpr lowrankkv::SequenceId kSequence = 0;
inline constexpr std::size_t kStep = 16;  ///< tokens that are decoded at once

/// ids[first], ..., ids[first + count - 1].
inline Ids slice(const Ids& ids, std::size_t first, std::size_t count) {
  return {ids.begin() + static_cast<std::ptrdiff_t>(first),
          ids.begin() + static_cast<std::ptrdiff_t>(first + count)};
}

/// Prefills the first contender exactly and hands the same keys and values to the others. In chunks
/// it is not exact, and each method's would be another: then there may be one only. Throws
/// std::runtime_error if there are more.
void prefill_all(const Engine& engine, std::vector<Contender>& contenders, const Ids& tokens);

}  // namespace llama
