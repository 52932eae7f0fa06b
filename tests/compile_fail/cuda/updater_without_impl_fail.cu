// SPDX-License-Identifier: Apache-2.0
// expected-error: this Updater has no Impl<Updater, Cuda>
#include "lowrankkv/cuda/presets.cuh"

struct Mine {};

void use(lowrankkv::CompressedKVCache<lowrankkv::Cuda, lowrankkv::PerHead, Mine>& cache) {
  cache.create(0);
}
