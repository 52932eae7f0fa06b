// SPDX-License-Identifier: Apache-2.0
// One model's caches in device memory: no Eigen here, no CUDA.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <variant>
#include <vector>

#include "attention_rows.hpp"
#include "device_stream.hpp"
#include "lowrankkv/basis/joint_values.hpp"
#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/basis/per_head.hpp"
#include "lowrankkv/basis/projector.hpp"
#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/calls.hpp"
#include "lowrankkv/core/memory_usage.hpp"
#include "lowrankkv/core/views.hpp"
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

/// The caches of a model's layers in device memory. Rows are in device memory, dense, in f32; which
/// form of the keys is stored was said when they were made. All work is on one stream.
class DeviceCaches {
 public:
  using Sequences = std::span<const lowrankkv::SequenceId>;

  virtual ~DeviceCaches() = default;
  virtual void create(lowrankkv::SequenceId seq) = 0;
  virtual void erase(lowrankkv::SequenceId seq) = 0;
  /// Attends to n tokens of a prompt, and stores them.
  virtual void prefill(int layer, lowrankkv::SequenceId seq, std::int64_t n, const Projected& rows,
                       lowrankkv::Prompt prompt, float* out) = 0;
  /// Stores a prompt that was attended to. @param queries  rows.query are of so many last tokens
  virtual void ingest(int layer, lowrankkv::SequenceId seq, std::int64_t n, const Projected& rows,
                      std::int64_t queries) = 0;
  /// Appends n tokens and attends to everything up to each of them.
  virtual void decode(int layer, lowrankkv::SequenceId seq, std::int64_t n, const Projected& rows,
                      float* out) = 0;
  /// Appends a token to each sequence of a step, and attends. Capturable.
  /// @throws std::runtime_error where attention has to say what it attended to (H2O)
  virtual void decode(int layer, const lowrankkv::SlotView& slots, const Projected& rows,
                      float* out) = 0;
  /// Where a sequence stands in the slots of a step, until it is erased.
  virtual int slot(lowrankkv::SequenceId seq) const = 0;
  /// The host's count of a token more for each sequence, before the step of slots that appends it.
  virtual void advance(Sequences seqs) = 0;
  virtual void maintain(Sequences seqs) = 0;
  virtual lowrankkv::MemoryUsage memory(lowrankkv::SequenceId seq) const = 0;
  virtual lowrankkv::MemoryUsage memory() const = 0;
  virtual std::int64_t num_tokens(lowrankkv::SequenceId seq) const = 0;
  /// Pages of all layers that a sequence of so many tokens can ever need.
  virtual std::int64_t pages_for(std::int64_t tokens) const = 0;
  virtual std::int64_t num_pages() const = 0;
  virtual std::int64_t num_free_pages() const = 0;
  virtual std::size_t page_bytes() const = 0;
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
/// @param configs     one a layer; num_pages is not read
/// @param pre_rope    keys are stored before their rotary embedding
/// @param pool_bytes  of pages; 0: what the sequences can ever need
/// @param stream      of all work, null: the default stream
/// @throws std::runtime_error in a program built without CUDA
std::unique_ptr<DeviceCaches> make_device_caches(const std::vector<lowrankkv::CacheConfig>& configs,
                                                 const std::vector<lowrankkv::LayerBasis>& bases,
                                                 const device::AnyPolicies& policies, bool pre_rope,
                                                 std::size_t pool_bytes = 0,
                                                 DeviceStream stream = nullptr);

}  // namespace llama
