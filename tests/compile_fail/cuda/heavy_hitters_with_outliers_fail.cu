// SPDX-License-Identifier: Apache-2.0
// expected-error: HeavyHitters does not go with ResidualOutliers
#include "lowrankkv/cuda/presets.cuh"

using Tokens = lowrankkv::Compose<lowrankkv::HeavyHitters, lowrankkv::ResidualOutliers>;
std::size_t instantiate() { return sizeof(lowrankkv::CompressedKVCache<lowrankkv::Cuda, lowrankkv::PerHead, lowrankkv::Static, Tokens, lowrankkv::NoQuantizer>); }
