// SPDX-License-Identifier: Apache-2.0
// How much the randomised tests do: LOWRANKKV_TEST_EFFORT multiplies their number of cases (10:
// about 10^5 operations).
#pragma once

#include <algorithm>
#include <cstdlib>

namespace support {

inline int effort() {
  const char* wish = std::getenv("LOWRANKKV_TEST_EFFORT");
  return wish == nullptr ? 1 : std::max(1, std::atoi(wish));
}

}  // namespace support
