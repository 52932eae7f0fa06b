// SPDX-License-Identifier: Apache-2.0
// expected-error: this Basis has no Impl<Basis, Cuda>
#include "lowrankkv/cuda/presets.cuh"

struct Mine {};

std::size_t instantiate() { return sizeof(lowrankkv::CompressedKVCache<lowrankkv::Cuda, Mine>); }
