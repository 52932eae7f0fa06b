// SPDX-License-Identifier: Apache-2.0
// expected-error: this Quantizer has no Impl<Quantizer, Cuda>
#include "lowrankkv/cuda/presets.cuh"

struct Mine {};

void use(lowrankkv::CompressedKVCache<lowrankkv::Cuda, lowrankkv::PerHead, lowrankkv::Static,
                                      lowrankkv::SinkRecent, Mine>& cache) {
  cache.create(0);
}
