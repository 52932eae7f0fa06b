// SPDX-License-Identifier: Apache-2.0
// expected-error: this Basis cannot be moved; use it with the Static updater
#include "lowrankkv/presets.hpp"

void use(lowrankkv::CompressedKVCache<lowrankkv::Cpu, lowrankkv::Projector, lowrankkv::Oja,
                                      lowrankkv::SinkRecent, lowrankkv::NoQuantizer>& cache) {
  cache.create(0);
}
