// SPDX-License-Identifier: Apache-2.0
// expected-error: FrequentDirections goes with rows chosen by scores or by errors, not by both
#include "lowrankkv/cuda/presets.cuh"

using Tokens = lowrankkv::Compose<lowrankkv::SinkRecent, lowrankkv::SnapKV, lowrankkv::ResidualOutliers>;
std::size_t instantiate() { return sizeof(lowrankkv::CompressedKVCache<lowrankkv::Cuda, lowrankkv::PerHead, lowrankkv::FrequentDirections, Tokens, lowrankkv::Int8>); }
