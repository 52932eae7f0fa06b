// SPDX-License-Identifier: Apache-2.0
// How much the randomised tests do: LOWRANKKV_TEST_EFFORT multiplies their number of cases (10:
// about 10^5 operations). LOWRANKKV_TEST_SEED chooses other cases of random operations, 0 those
// that are run without it. LOWRANKKV_TEST_SMALL=1: narrow heads and short sequences, a fiftieth
// of the time an operation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace support {

inline int effort() {
  const char* wish = std::getenv("LOWRANKKV_TEST_EFFORT");
  return wish == nullptr ? 1 : std::max(1, std::atoi(wish));
}

/// Whether random operations are on narrow heads and short sequences.
inline bool small() {
  const char* wish = std::getenv("LOWRANKKV_TEST_SMALL");
  return wish != nullptr && std::atoi(wish) != 0;
}

/// A length of a test, or a quarter of it if cases are small.
inline int length(int usual) { return small() ? std::max(1, usual / 4) : usual; }

/// What the seed `own` of a test is for the LOWRANKKV_TEST_SEED at hand.
inline std::uint64_t seed_of(std::uint64_t own) {
  const char* wish = std::getenv("LOWRANKKV_TEST_SEED");
  return own + (wish == nullptr ? 0 : 1000 * std::strtoull(wish, nullptr, 10));
}

/// Counts random operations; the program says at its end how many there were.
inline void count_operations(std::int64_t operations) {
  struct Count {
    std::int64_t all = 0;
    ~Count() { std::printf("%lld random operations\n", static_cast<long long>(all)); }
  };
  static Count count;
  count.all += operations;
}

}  // namespace support
