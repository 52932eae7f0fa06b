// SPDX-License-Identifier: Apache-2.0
// expected-error: this TokenPolicy has no Impl<TokenPolicy, Cuda>
#include "lowrankkv/cuda/presets.cuh"

struct Mine {};

void use(lowrankkv::CompressedKVCache<lowrankkv::Cuda, lowrankkv::PerHead, lowrankkv::Static,
                                      lowrankkv::Compose<lowrankkv::SinkRecent, Mine>>& cache) {
  cache.create(0);
}
