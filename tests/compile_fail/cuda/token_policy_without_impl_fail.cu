// SPDX-License-Identifier: Apache-2.0
// expected-error: this TokenPolicy has no Impl<TokenPolicy, Cuda>
#include "lowrankkv/cuda/presets.cuh"

struct Mine {};

std::size_t instantiate() {
  return sizeof(lowrankkv::CompressedKVCache<lowrankkv::Cuda, lowrankkv::PerHead, lowrankkv::Static,
                                             lowrankkv::Compose<lowrankkv::SinkRecent, Mine>>);
}
