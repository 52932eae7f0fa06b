// SPDX-License-Identifier: Apache-2.0
/// @file cuda/presets.cuh  The presets on NVIDIA GPUs: FullKV<Cuda>, StaticPCA<Cuda>,
/// StaticPCAHybrid<Cuda>, OjaKV<Cuda>, OjaKVv2<Cuda>, OjaKVSnapKV<Cuda>, SubSpaceG<Cuda>,
/// StarKV<Cuda>, Dlrp<Cuda>, SnapKVOnly<Cuda>, StreamingLLM<Cuda>, H2O<Cuda>, Budgeted<Cuda>, and
/// any cache of the policies in cuda/backend.cuh.
#pragma once

#include "lowrankkv/cuda/compressed_kv_cache.cuh"
#include "lowrankkv/detail/preset_aliases.hpp"
#include "lowrankkv/layer_stack.hpp"
