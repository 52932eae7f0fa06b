// SPDX-License-Identifier: Apache-2.0
// expected-error: no instance of overloaded function
#include "lowrankkv/cuda/presets.cuh"

void swapped(lowrankkv::FullKV<lowrankkv::Cuda>& cache, lowrankkv::KeyView key,
             lowrankkv::ValueView value) {
  cache.append(0, value, key);
}
