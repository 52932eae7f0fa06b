// SPDX-License-Identifier: Apache-2.0
// expected-error: an Updater that moves bases needs PerHead bases
#include "lowrankkv/cuda/presets.cuh"

void use(lowrankkv::CompressedKVCache<lowrankkv::Cuda, lowrankkv::Projector, lowrankkv::Oja,
                                      lowrankkv::SinkRecent, lowrankkv::TransformCode>& cache) {
  cache.create(0);
}
