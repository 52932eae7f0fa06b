// SPDX-License-Identifier: Apache-2.0
/// @file cuda/backend.cuh  The Cuda backend: device memory, streams. Includes all of its policies.
///
/// What a policy offers on this backend, as an Impl<Policy, Cuda>:
///
/// A basis:
/// - `static void validate(const B&, const LayerBasis&, const CacheShape&)`;
/// - `static int joint_heads(const B&, num_kv_heads)`, if one latent holds the values of several
///   heads: the heads of such a group;
/// - optional `static constexpr bool moves`: the maps are those of an orthonormal basis, in a
///   metric or not, so that updaters may move it.
///
/// An updater: `static constexpr bool adapts`. One that adapts by Oja's rule also has
/// - `static void validate(const U&)`;
/// - `static PromptSelection prompt_selection(const U&)`;
/// - `static OjaForm form(const U&)` and `static OjaRate rate(const U&, Phase)` of its steps.
/// FrequentDirections has `validate` and `static constexpr bool device_epochs`: the device decides
/// when an epoch begins. It sees prompts flush_interval rows at a time. Any updater may have
/// `static void validate_basis(const U&, const LayerBasis&)`, which raises if the calibrated basis
/// lacks what it needs.
///
/// A token policy: cuda/token_policy/compose.cuh.
///
/// A quantizer: `static constexpr CodedForm form` and `static void validate(const Q&)`. Without
/// codes, `static DType type(const Q&)`. With codes
/// - `static PartTiles tiles(const Q&, rank, bits)`;
/// - `static std::vector<float> steps(const Q&, bits, rms)`;
/// - optional `static constexpr int scale_groups` of a row of one part: 1 (default) or 2;
/// - optional `static std::vector<float> rotation(const Q&, rank)` [rank, rank], which is folded
///   into the maps;
/// - for joint values, `static PartTiles joint_tiles(const Q&, rank, bits)`.
/// For bases that move it has one of two:
/// - `static PartTiles moving_tiles(const Q&, rank)`: whole planes of 8 bits without steps, which
///   the moving basis itself reads;
/// - `static constexpr bool orders_channels`: bases are aligned to the principal axes of the rows.
///   Then `static std::vector<float> unit_steps(const Q&, bits)` gives the steps for coefficients
///   of rms 1, with 0 for channels without bits, or is empty.
#pragma once

#include "lowrankkv/cuda/basis/joint_values.cuh"
#include "lowrankkv/cuda/basis/per_head.cuh"
#include "lowrankkv/cuda/basis/projector.cuh"
#include "lowrankkv/cuda/cache/calls.hpp"
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
