// SPDX-License-Identifier: Apache-2.0
// expected-error:
#include "lowrankkv/presets.hpp"

void swapped(lowrankkv::FullKV<>& cache, lowrankkv::KeyView key, lowrankkv::ValueView value) {
  cache.append(0, value, key);
}
