// SPDX-License-Identifier: Apache-2.0
// expected-error: this Quantizer codes rows in groups, which an updater's merges would
#include "lowrankkv/presets.hpp"

void use(lowrankkv::CompressedKVCache<lowrankkv::Cpu, lowrankkv::PerHead, lowrankkv::Oja,
                                      lowrankkv::SinkRecent, lowrankkv::ChannelGroups>& cache) {
  cache.create(0);
}
