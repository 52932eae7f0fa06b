// SPDX-License-Identifier: Apache-2.0
/// @file fwd.hpp  Forward declarations and every default template argument.
#pragma once

#include "lowrankkv/config.hpp"
#include "lowrankkv/core/kernel_set.hpp"
#include "lowrankkv/updater/epoch_policy.hpp"

LOWRANKKV_NAMESPACE_BEGIN

struct Cpu;
template <class Set>
struct CudaWith;
/// @brief The Cuda backend with every kernel.
using Cuda = CudaWith<KernelSet>;

struct PerHead;
struct JointValues;
struct Projector;
struct Identity;
struct Static;
struct Oja;
struct FrequentDirections;
struct SinkRecent;
struct CompressAll;
struct RecentFull;
struct KeepFull;
struct SlidingWindow;
struct SnapKV;
struct HeavyHitters;
struct ResidualOutliers;
template <class... Members>
struct Compose;
struct NoQuantizer;
struct Int8;
struct BlockHadamard;
struct TransformCode;
template <int bits>
struct GgmlBlocks;
struct Fp8Rows;
struct RotatedLevels;
struct ChannelGroups;

/// @brief The implementation of a policy on a backend. Specialise it to add your own policy.
///
/// The primary template is undefined on purpose: for a policy without an implementation, the
/// diagnostics in concepts/ then print one line that names it.
template <class Policy, class Backend>
struct Impl;

/// @brief The KV cache of one attention layer; see compressed_kv_cache.hpp. Only the backend has no
/// default.
template <class Backend, class Basis = PerHead, class Updater = Static,
          class TokenPolicy = SinkRecent, class Quantizer = NoQuantizer,
          class EpochPolicy = KeepEpochs<8>>
class CompressedKVCache;

LOWRANKKV_NAMESPACE_END
