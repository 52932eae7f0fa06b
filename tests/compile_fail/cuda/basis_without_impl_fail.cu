// SPDX-License-Identifier: Apache-2.0
// expected-error: this Basis has no Impl<Basis, Cuda>
#include "lowrankkv/cuda/presets.cuh"

struct Mine {};

void use(lowrankkv::CompressedKVCache<lowrankkv::Cuda, Mine>& cache) { cache.create(0); }
