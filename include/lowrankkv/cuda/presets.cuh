// SPDX-License-Identifier: Apache-2.0
/// @file cuda/presets.cuh  The presets on NVIDIA GPUs: FullKV<Cuda>, StaticPCA<Cuda>, StaticPCAHybrid<Cuda>, Dlrp<Cuda>, and any cache whose policies
/// cuda/policies.cuh has.
#pragma once

#include "lowrankkv/cuda/compressed_kv_cache.cuh"
#include "lowrankkv/detail/preset_aliases.hpp"
