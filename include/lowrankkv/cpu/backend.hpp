// SPDX-License-Identifier: Apache-2.0
/// @file cpu/backend.hpp  The Cpu backend: host memory, Eigen, threads. Includes every policy's CPU
/// implementation.
#pragma once

#include "lowrankkv/cpu/basis/joint_values.hpp"
#include "lowrankkv/cpu/basis/per_head.hpp"
#include "lowrankkv/cpu/basis/projector.hpp"
#include "lowrankkv/cpu/layer.hpp"
#include "lowrankkv/cpu/page_pool.hpp"
#include "lowrankkv/cpu/quantizer/block_hadamard.hpp"
#include "lowrankkv/cpu/quantizer/int8.hpp"
#include "lowrankkv/cpu/quantizer/no_quantizer.hpp"
#include "lowrankkv/cpu/quantizer/transform_code.hpp"
#include "lowrankkv/cpu/thread_pool.hpp"
#include "lowrankkv/cpu/token_policy/compose.hpp"
#include "lowrankkv/cpu/token_policy/compress_all.hpp"
#include "lowrankkv/cpu/token_policy/heavy_hitters.hpp"
#include "lowrankkv/cpu/token_policy/keep_full.hpp"
#include "lowrankkv/cpu/token_policy/residual_outliers.hpp"
#include "lowrankkv/cpu/token_policy/sink_recent.hpp"
#include "lowrankkv/cpu/token_policy/sliding_window.hpp"
#include "lowrankkv/cpu/token_policy/snapkv.hpp"
#include "lowrankkv/cpu/updater/frequent_directions.hpp"
#include "lowrankkv/cpu/updater/oja.hpp"
#include "lowrankkv/cpu/updater/static.hpp"
#include "lowrankkv/fwd.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Backend tag: everything is in host memory, and calls return when the work is done.
struct Cpu {
  using Pool = cpu::PagePool;
  using Executor = cpu::ThreadPool;
  template <class Basis, class Updater, class TokenPolicy, class Quantizer, class EpochPolicy>
  using Layer = cpu::Layer<Basis, Updater, TokenPolicy, Quantizer, EpochPolicy>;
};

LOWRANKKV_NAMESPACE_END
