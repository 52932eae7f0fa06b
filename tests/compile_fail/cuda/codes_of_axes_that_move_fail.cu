// SPDX-License-Identifier: Apache-2.0
// expected-error: an Updater that moves bases needs a Quantizer whose codes are not those of certain axes
#include "lowrankkv/cuda/presets.cuh"

std::size_t instantiate() { return sizeof(lowrankkv::CompressedKVCache<lowrankkv::Cuda, lowrankkv::PerHead, lowrankkv::Oja, lowrankkv::SinkRecent, lowrankkv::TransformCode>); }
