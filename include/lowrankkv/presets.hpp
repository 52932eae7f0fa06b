// SPDX-License-Identifier: Apache-2.0
/// @file presets.hpp  The papers' systems as one-line aliases.
#pragma once

#include "lowrankkv/compressed_kv_cache.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Every token at full rank: the baseline.
template <class Backend = Cpu>
using FullKV = CompressedKVCache<Backend, PerHead, Static, KeepFull, NoQuantizer>;

/// @brief Everything projected onto the calibrated bases (Eigen Attention; the StaticPCA of OjaKV's tables).
template <class Backend = Cpu>
using StaticPCA = CompressedKVCache<Backend, PerHead, Static, CompressAll, NoQuantizer>;

/// @brief StaticPCA with sinks and a recent window at full rank (the StaticPCA-H of OjaKV's tables).
template <class Backend = Cpu>
using StaticPCAHybrid = CompressedKVCache<Backend, PerHead, Static, SinkRecent, NoQuantizer>;

/// @brief OjaKV: the hybrid, its bases updated on the prompt's salient tokens and every T decoded tokens.
template <class Backend = Cpu>
using OjaKV = CompressedKVCache<Backend, PerHead, Oja, SinkRecent, NoQuantizer>;

LOWRANKKV_NAMESPACE_END
