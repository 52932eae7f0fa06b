// SPDX-License-Identifier: Apache-2.0
/// @file cuda/compressed_kv_cache.cuh  CompressedKVCache<Cuda, ...> with its kernels, for sources
/// that nvcc compiles. cuda.hpp has the same class without kernels.
#pragma once

#include "lowrankkv/compressed_kv_cache.hpp"
#include "lowrankkv/cuda/attention/merge_states.cuh"
#include "lowrankkv/cuda/backend.cuh"
#include "lowrankkv/cuda/cache/certified_step.cuh"
#include "lowrankkv/cuda/cache/decode_step.cuh"
#include "lowrankkv/cuda/cache/flush.cuh"
#include "lowrankkv/cuda/cache/layer_calls.cuh"
#include "lowrankkv/cuda/cache/prefill.cuh"
#include "lowrankkv/cuda/cache/saved_rows.cuh"
#include "lowrankkv/cuda/cache/scored_step.cuh"
#include "lowrankkv/cuda/cache/stored_rows.cuh"
#include "lowrankkv/cuda/cache/token_edits.cuh"
