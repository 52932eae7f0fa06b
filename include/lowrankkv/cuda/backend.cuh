// SPDX-License-Identifier: Apache-2.0
/// @file cuda/backend.cuh  The Cuda backend: device memory, streams. Includes every policy that it
/// has.
///
/// What a policy offers on this backend, as an Impl<Policy, Cuda>:
///
/// A basis: `static void validate(const B&, const LayerBasis&, const CacheShape&)`; with one latent
/// for the values of several heads, `static int joint_heads(const B&, num_kv_heads)` of a group;
/// `static constexpr bool moves` (optional): maps are those of an orthonormal basis, in a metric or
/// not, so that updaters may move it. An updater: `static constexpr bool adapts`; one that does,
/// Oja's rule: `static void validate(const U&)`, `static PromptSelection prompt_selection(const
/// U&)`, `static OjaForm form(const U&)` and `static OjaRate rate(const U&, Phase)` of its steps.
/// One whose epochs begin when values say so, FrequentDirections: `validate` and `static constexpr
/// bool rolls`; prompts are shown to it flush_interval rows at a time. A token policy:
/// cuda/token_policy/compose.cuh. A quantizer: `static constexpr CodedForm form`, and with codes
/// `static PartTiles tiles(const Q&, rank, bits)`, for bases that move one of two: `static
/// PartTiles moving_tiles(const Q&, rank)`, whole planes of 8 bits without steps, which a basis
/// that moves reads itself, or `static constexpr bool orders_channels`: they are turned to the
/// principal axes of rows, with `static std::vector<float> unit_steps(const Q&, bits)`, steps of
/// coefficients of rms 1, 0 without bits, or empty; `static std::vector<float> steps(const Q&,
/// bits, rms)`, optional `static constexpr int scale_groups` of a row and part (1 or 2; by default
/// 1), optional `static std::vector<float> rotation(const Q&, rank)` [rank, rank] that maps take
/// over, and, for joint values, `static PartTiles joint_tiles(const Q&, rank, bits)`; without
/// codes, `static DType type(const Q&)`.
#pragma once

#include "lowrankkv/cuda/basis/joint_values.cuh"
#include "lowrankkv/cuda/basis/per_head.cuh"
#include "lowrankkv/cuda/basis/projector.cuh"
#include "lowrankkv/cuda/quantizer/block_hadamard.cuh"
#include "lowrankkv/cuda/quantizer/int8.cuh"
#include "lowrankkv/cuda/quantizer/no_quantizer.cuh"
#include "lowrankkv/cuda/quantizer/transform_code.cuh"
#include "lowrankkv/cuda/runtime/page_pool.cuh"
#include "lowrankkv/cuda/token_policy/compose.cuh"
#include "lowrankkv/cuda/token_policy/compress_all.cuh"
#include "lowrankkv/cuda/token_policy/heavy_hitters.cuh"
#include "lowrankkv/cuda/token_policy/keep_full.cuh"
#include "lowrankkv/cuda/token_policy/residual_outliers.cuh"
#include "lowrankkv/cuda/token_policy/sink_recent.cuh"
#include "lowrankkv/cuda/token_policy/sliding_window.cuh"
#include "lowrankkv/cuda/token_policy/snapkv.cuh"
#include "lowrankkv/cuda/updater/frequent_directions.cuh"
#include "lowrankkv/cuda/updater/oja.cuh"
#include "lowrankkv/cuda/updater/static.cuh"
#include "lowrankkv/fwd.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Backend tag: everything in device memory; calls enqueue work on the caller's stream and
/// return.
struct Cuda {
  using Pool = cuda::PagePool;
};

LOWRANKKV_NAMESPACE_END
