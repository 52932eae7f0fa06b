// SPDX-License-Identifier: Apache-2.0
/// @file detail/preset_aliases.hpp  The papers' systems, and the library's own, as one-line
/// aliases. presets.hpp and cuda/presets.cuh add the caches.
#pragma once

#include "lowrankkv/fwd.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Every token at full rank: the baseline.
template <class Backend = Cpu>
using FullKV = CompressedKVCache<Backend, PerHead, Static, KeepFull, NoQuantizer>;

/// @brief Everything projected onto the calibrated bases (Eigen Attention; the StaticPCA of OjaKV's
/// tables).
template <class Backend = Cpu>
using StaticPCA = CompressedKVCache<Backend, PerHead, Static, CompressAll, NoQuantizer>;

/// @brief StaticPCA with sinks and a recent window at full rank (the StaticPCA-H of OjaKV's
/// tables).
template <class Backend = Cpu>
using StaticPCAHybrid = CompressedKVCache<Backend, PerHead, Static, SinkRecent, NoQuantizer>;

/// @brief OjaKV: StaticPCAHybrid with bases updated on the prompt's salient tokens and on every T
/// decoded tokens.
template <class Backend = Cpu>
using OjaKV = CompressedKVCache<Backend, PerHead, Oja, SinkRecent, NoQuantizer>;

/// @brief OjaKV version 2: in addition, the tokens that the adapted basis reconstructs worst stay
/// at full rank.
template <class Backend = Cpu>
using OjaKVv2 =
    CompressedKVCache<Backend, PerHead, Oja, Compose<SinkRecent, ResidualOutliers>, NoQuantizer>;

/// @brief OjaKV on the tokens that SnapKV keeps of the prompt (OjaKV section 6, compounded
/// savings).
template <class Backend = Cpu>
using OjaKVSnapKV =
    CompressedKVCache<Backend, PerHead, Oja, Compose<SinkRecent, SnapKV>, NoQuantizer>;

/// @brief SubSpace-G: global per-head bases, every token projected, coefficients in 8 bits.
template <class Backend = Cpu>
using SubSpaceG = CompressedKVCache<Backend, PerHead, Static, CompressAll, Int8>;

/// @brief SubSpace-A: chunks whose bases come from a Frequent Directions sketch; the first tokens
/// (warm-up) at full rank.
template <class Backend = Cpu>
using SubSpaceA = CompressedKVCache<Backend, PerHead, FrequentDirections, SinkRecent, Int8>;

/// @brief STAR-KV: per-head keys, joint values, rotated blocks of high and low precision. Bases of
/// the ranks that training learned: train/star_kv_maps.hpp.
template <class Backend = Cpu>
using StarKV = CompressedKVCache<Backend, JointValues, Static, SinkRecent, BlockHadamard>;

/// @brief The paper's static baseline: StarKV on bases from activations, of one rank for all heads
/// (calibrate::joint_basis()). The cache is the same.
template <class Backend = Cpu>
using StarKVStatic = StarKV<Backend>;

/// @brief StarKVStatic on the tokens that H2O keeps.
template <class Backend = Cpu>
using StarKVH2O = CompressedKVCache<Backend, JointValues, Static, Compose<SinkRecent, HeavyHitters>,
                                    BlockHadamard>;

/// @brief DLRP: the four maps of a Deep Low-Rank Projector, as trained.
template <class Backend = Cpu>
using Dlrp = CompressedKVCache<Backend, Projector, Static, CompressAll, NoQuantizer>;

/// @brief llama.cpp's q8_0 cache: every row in blocks of 32 8-bit codes. Takes an empty basis.
template <class Backend = Cpu>
using Q8_0 = CompressedKVCache<Backend, Identity, Static, CompressAll, GgmlBlocks<8>>;

/// @brief llama.cpp's q4_0 cache: every row in blocks of 32 4-bit codes. Takes an empty basis.
template <class Backend = Cpu>
using Q4_0 = CompressedKVCache<Backend, Identity, Static, CompressAll, GgmlBlocks<4>>;

/// @brief vLLM's fp8 cache: every number in E4M3, by default without scales. Takes an empty basis.
template <class Backend = Cpu>
using Fp8 = CompressedKVCache<Backend, Identity, Static, CompressAll, Fp8Rows>;

/// @brief TurboQuant: every row rotated at random, its norm, and Lloyd's levels; 4 bits unless
/// policies.quantizer.bits says otherwise. Takes an empty basis.
template <class Backend = Cpu>
using TurboQuant = CompressedKVCache<Backend, Identity, Static, CompressAll, RotatedLevels>;

/// @brief KIVI: keys per channel in groups of tokens, values per token, the latest 128 tokens at
/// full rank; 2 bits unless policies.quantizer.bits says otherwise. Takes an empty basis.
template <class Backend = Cpu>
using Kivi = CompressedKVCache<Backend, Identity, Static, RecentFull, ChannelGroups>;

/// @brief SnapKV alone: prompt tokens are kept at full rank or dropped.
template <class Backend = Cpu>
using SnapKVOnly =
    CompressedKVCache<Backend, PerHead, Static, Compose<KeepFull, SnapKV>, NoQuantizer>;

/// @brief StreamingLLM: sinks and a sliding window.
template <class Backend = Cpu>
using StreamingLLM = CompressedKVCache<Backend, PerHead, Static, SlidingWindow, NoQuantizer>;

/// @brief H2O: heavy hitters and a recent window at full rank.
template <class Backend = Cpu>
using H2O =
    CompressedKVCache<Backend, PerHead, Static, Compose<KeepFull, HeavyHitters>, NoQuantizer>;

/// @brief The library's own method: transform coding under one byte budget, query-aware keys,
/// residual outliers. Bases, bits and policies for a budget: budgeted.hpp.
template <class Backend = Cpu>
using Budgeted = CompressedKVCache<Backend, PerHead, Static, Compose<SinkRecent, ResidualOutliers>,
                                   TransformCode>;

LOWRANKKV_NAMESPACE_END
