// SPDX-License-Identifier: Apache-2.0
// expected-error: this Updater has no Impl<Updater, Cuda>
#include "lowrankkv/cuda/presets.cuh"

struct Mine {};

std::size_t instantiate() {
  return sizeof(lowrankkv::CompressedKVCache<lowrankkv::Cuda, lowrankkv::PerHead, Mine>);
}
