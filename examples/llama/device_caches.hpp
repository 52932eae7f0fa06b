// SPDX-License-Identifier: Apache-2.0
// One model's caches in device memory: no Eigen here, no CUDA.
#pragma once

#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "lowrankkv/basis/joint_values.hpp"
#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/basis/per_head.hpp"
#include "lowrankkv/basis/projector.hpp"
#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/calls.hpp"
#include "lowrankkv/core/memory_usage.hpp"
#include "lowrankkv/quantizer/block_hadamard.hpp"
#include "lowrankkv/quantizer/int8.hpp"
#include "lowrankkv/quantizer/no_quantizer.hpp"
#include "lowrankkv/quantizer/transform_code.hpp"
#include "lowrankkv/token_policy/compose.hpp"
#include "lowrankkv/token_policy/compress_all.hpp"
#include "lowrankkv/token_policy/heavy_hitters.hpp"
#include "lowrankkv/token_policy/keep_full.hpp"
#include "lowrankkv/token_policy/residual_outliers.hpp"
#include "lowrankkv/token_policy/sink_recent.hpp"
#include "lowrankkv/token_policy/sliding_window.hpp"
#include "lowrankkv/token_policy/snapkv.hpp"
#include "lowrankkv/updater/frequent_directions.hpp"
#include "lowrankkv/updater/oja.hpp"
#include "lowrankkv/updater/static.hpp"

namespace llama {

/// What KvStore asks of its caches. Rows are in device memory, dense, in f32; all work is on the
/// default stream.
class DeviceCaches {
 public:
  virtual ~DeviceCaches() = default;
  virtual void create(lowrankkv::SequenceId seq) = 0;
  virtual void erase(lowrankkv::SequenceId seq) = 0;
  virtual void prefill(int layer, lowrankkv::SequenceId seq, std::int64_t n, const float* query,
                       const float* key, const float* value, float* out) = 0;
  virtual void ingest(int layer, lowrankkv::SequenceId seq, std::int64_t n, const float* query,
                      const float* key, const float* value) = 0;
  virtual void decode(int layer, lowrankkv::SequenceId seq, std::int64_t n, const float* query,
                      const float* key, const float* value, float* out) = 0;
  virtual void maintain(lowrankkv::SequenceId seq) = 0;
  virtual lowrankkv::MemoryUsage memory(lowrankkv::SequenceId seq) const = 0;
  virtual lowrankkv::MemoryUsage memory() const = 0;
  virtual std::int64_t num_tokens(lowrankkv::SequenceId seq) const = 0;
};

namespace device {
using namespace lowrankkv;
/// The compositions that the Cuda backend is built with here, in the order of
/// lowrankkv/detail/preset_aliases.hpp: FullKV, StaticPCA, StaticPCAHybrid, OjaKV, OjaKVv2,
/// OjaKVSnapKV, SubSpaceG, SubSpaceA, StarKV, StarKVH2O, Dlrp, SnapKVOnly, StreamingLLM, H2O,
/// Budgeted.
using AnyPolicies =
    std::variant<Policies<PerHead, Static, KeepFull, NoQuantizer>,
                 Policies<PerHead, Static, CompressAll, NoQuantizer>,
                 Policies<PerHead, Static, SinkRecent, NoQuantizer>,
                 Policies<PerHead, Oja, SinkRecent, NoQuantizer>,
                 Policies<PerHead, Oja, Compose<SinkRecent, ResidualOutliers>, NoQuantizer>,
                 Policies<PerHead, Oja, Compose<SinkRecent, SnapKV>, NoQuantizer>,
                 Policies<PerHead, Static, CompressAll, Int8>,
                 Policies<PerHead, FrequentDirections, SinkRecent, Int8>,
                 Policies<JointValues, Static, SinkRecent, BlockHadamard>,
                 Policies<JointValues, Static, Compose<SinkRecent, HeavyHitters>, BlockHadamard>,
                 Policies<Projector, Static, CompressAll, NoQuantizer>,
                 Policies<PerHead, Static, Compose<KeepFull, SnapKV>, NoQuantizer>,
                 Policies<PerHead, Static, SlidingWindow, NoQuantizer>,
                 Policies<PerHead, Static, Compose<KeepFull, HeavyHitters>, NoQuantizer>,
                 Policies<PerHead, Static, Compose<SinkRecent, ResidualOutliers>, TransformCode>>;
}  // namespace device

/// Caches on the current GPU, one per layer.
/// @param configs  one a layer
/// @throws std::runtime_error in a program built without CUDA
std::unique_ptr<DeviceCaches> make_device_caches(const std::vector<lowrankkv::CacheConfig>& configs,
                                                 const std::vector<lowrankkv::LayerBasis>& bases,
                                                 const device::AnyPolicies& policies);

}  // namespace llama
