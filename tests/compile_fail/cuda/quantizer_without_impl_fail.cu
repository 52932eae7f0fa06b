// SPDX-License-Identifier: Apache-2.0
// expected-error: this Quantizer has no Impl<Quantizer, Cuda>
#include "lowrankkv/cuda/presets.cuh"

struct Mine {};

std::size_t instantiate() {
  return sizeof(lowrankkv::CompressedKVCache<lowrankkv::Cuda, lowrankkv::PerHead, lowrankkv::Static,
                                             lowrankkv::SinkRecent, Mine>);
}
