// SPDX-License-Identifier: Apache-2.0
/// @file cuda.hpp  The Cuda backend without its kernels: CompressedKVCache<Cuda, ...>, the presets
/// and LayerStack, for sources of any compiler. What the calls do is compiled elsewhere, once, by
/// lowrankkv_add_cuda_caches() of the CMake package.
#pragma once

#include "lowrankkv/basis/joint_values.hpp"
#include "lowrankkv/basis/per_head.hpp"
#include "lowrankkv/basis/projector.hpp"
#include "lowrankkv/compressed_kv_cache.hpp"
#include "lowrankkv/cuda/cache/calls.hpp"
#include "lowrankkv/detail/preset_aliases.hpp"
#include "lowrankkv/layer_stack.hpp"
#include "lowrankkv/quantizer/block_hadamard.hpp"
#include "lowrankkv/quantizer/int8.hpp"
#include "lowrankkv/quantizer/no_quantizer.hpp"
#include "lowrankkv/quantizer/transform_code.hpp"
#include "lowrankkv/updater/frequent_directions.hpp"
#include "lowrankkv/updater/oja.hpp"
#include "lowrankkv/updater/static.hpp"
