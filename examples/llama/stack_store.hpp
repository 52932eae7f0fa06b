// SPDX-License-Identifier: Apache-2.0
// From a preset of the library to a KvStore, and what all methods are built from.
#pragma once

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "device_caches.hpp"
#include "kv_store.hpp"
#include "lowrankkv/layer_stack.hpp"
#include "lowrankkv/presets.hpp"

namespace llama {

template <class Cache>
class StackStore final : public KvStore {
 public:
  /// @param configs   one a layer
  /// @param pre_rope  keys are stored before their rotary embedding
  StackStore(const std::vector<lowrankkv::CacheConfig>& configs, bool pre_rope,
             std::vector<lowrankkv::LayerBasis> bases, const typename Cache::PolicySet& policies,
             std::shared_ptr<lowrankkv::cpu::ThreadPool> threads)
      : shape_(configs.front().shape),
        pre_rope_(pre_rope),
        stack_(configs, std::move(bases), policies, std::move(threads)) {}

  void create(lowrankkv::SequenceId seq) override { stack_.create(seq); }
  void erase(lowrankkv::SequenceId seq) override { stack_.erase(seq); }
  void prefill(int layer, lowrankkv::SequenceId seq, std::int64_t n, const Projected& rows,
               float* out) override {
    stack_.layer(layer).prefill(seq, queries(rows, n), keys(rows, n), values(rows, n),
                                outputs(out, n));
  }
  void ingest(int layer, lowrankkv::SequenceId seq, std::int64_t n,
              const Projected& rows) override {
    stack_.layer(layer).ingest(seq, keys(rows, n), values(rows, n), queries(rows, n));
  }
  void decode(int layer, lowrankkv::SequenceId seq, std::int64_t n, const Projected& rows,
              float* out) override {
    Cache& cache = stack_.layer(layer);
    cache.append(seq, keys(rows, n), values(rows, n));
    // Eviction by accumulated attention needs to be told what the step's queries attended to.
    if constexpr (requires(const lowrankkv::ScoreView& accumulated) {
                    cache.accumulate(seq, accumulated);
                  }) {
      accumulated_.resize(static_cast<std::size_t>(shape_.num_kv_heads * cache.num_tokens(seq)));
      const lowrankkv::ScoreView accumulated(accumulated_.data(), 1, shape_.num_kv_heads,
                                             cache.num_tokens(seq));
      cache.attend(seq, queries(rows, n), outputs(out, n), {}, accumulated);
      cache.accumulate(seq, accumulated);
    } else {
      cache.attend(seq, queries(rows, n), outputs(out, n));
    }
  }
  void maintain(lowrankkv::SequenceId seq) override { stack_.maintain(seq); }
  lowrankkv::MemoryUsage memory(lowrankkv::SequenceId seq) const override {
    return stack_.memory(seq);
  }
  lowrankkv::MemoryUsage memory() const override { return stack_.memory(); }
  std::int64_t num_tokens(lowrankkv::SequenceId seq) const override {
    return stack_.num_tokens(seq);
  }

 private:
  lowrankkv::QueryView queries(const Projected& rows, std::int64_t n) const {
    return {rows.query, n, shape_.num_qo_heads, shape_.head_dim};
  }
  lowrankkv::KeyView keys(const Projected& rows, std::int64_t n) const {
    return {pre_rope_ ? rows.pre_rope_key : rows.key, n, shape_.num_kv_heads, shape_.head_dim};
  }
  lowrankkv::ValueView values(const Projected& rows, std::int64_t n) const {
    return {rows.value, n, shape_.num_kv_heads, shape_.head_dim};
  }
  lowrankkv::OutputView outputs(float* rows, std::int64_t n) const {
    return {rows, n, shape_.num_qo_heads, shape_.head_dim};
  }

  lowrankkv::CacheShape shape_;
  bool pre_rope_ = false;
  lowrankkv::LayerStack<Cache> stack_;
  std::vector<float> accumulated_;
};

/// Caches in device memory behind the same interface, for a model that is computed on the GPU: rows
/// are in device memory too.
class DeviceStore final : public KvStore {
 public:
  explicit DeviceStore(std::unique_ptr<DeviceCaches> caches) : caches_(std::move(caches)) {}
  void create(lowrankkv::SequenceId seq) override { caches_->create(seq); }
  void erase(lowrankkv::SequenceId seq) override { caches_->erase(seq); }
  void prefill(int layer, lowrankkv::SequenceId seq, std::int64_t n, const Projected& rows,
               float* out) override {
    caches_->prefill(layer, seq, n, rows, lowrankkv::Prompt::complete, out);
  }
  void ingest(int layer, lowrankkv::SequenceId seq, std::int64_t n,
              const Projected& rows) override {
    caches_->ingest(layer, seq, n, rows, n);
  }
  void decode(int layer, lowrankkv::SequenceId seq, std::int64_t n, const Projected& rows,
              float* out) override {
    caches_->decode(layer, seq, n, rows, out);
  }
  void maintain(lowrankkv::SequenceId seq) override { caches_->maintain({&seq, 1}); }
  lowrankkv::MemoryUsage memory(lowrankkv::SequenceId seq) const override {
    return caches_->memory(seq);
  }
  lowrankkv::MemoryUsage memory() const override { return caches_->memory(); }
  std::int64_t num_tokens(lowrankkv::SequenceId seq) const override {
    return caches_->num_tokens(seq);
  }
  DeviceCaches* on_device() override { return caches_.get(); }

 private:
  std::unique_ptr<DeviceCaches> caches_;
};

/// What the command line asks for, and the model that it is for.
struct Recipe {
  const MethodOptions& options;
  lowrankkv::CacheConfig config;  // of all layers
  const Config& model;
  const std::vector<lowrankkv::calibrate::LayerMoments>& moments;
  const std::shared_ptr<lowrankkv::cpu::ThreadPool>& threads;
  const std::vector<lowrankkv::LayerBasis>& star_kv;  // Calibration::star_kv
  std::vector<lowrankkv::CacheConfig> configs{};      // one a layer, where layers differ

  std::int64_t context() const { return options.context > 0 ? options.context : config.max_tokens; }
  /// Per-head bases at one ratio, of the rows and in the metric that the options name.
  lowrankkv::calibrate::BasisOptions basis_options(double ratio) const;
  std::vector<lowrankkv::LayerBasis> bases(double ratio) const;
  /// Raises std::runtime_error unless every layer was calibrated.
  void need_moments() const;
  /// Sets the first and last tokens at full rank, if they were asked for.
  template <class Policy>
  void use_window(Policy& policy) const {
    if (options.sinks >= 0) policy.sinks = options.sinks;
    if (options.recent >= 0) policy.recent = options.recent;
  }

  template <class Cache>
  std::unique_ptr<KvStore> store(std::vector<lowrankkv::LayerBasis> bases,
                                 const typename Cache::PolicySet& policies) const {
    const auto layers = static_cast<std::size_t>(model.num_layers);
    if (bases.empty()) bases.resize(layers);
    std::vector<lowrankkv::CacheConfig> own = configs;
    if (own.empty()) own.assign(layers, config);
    // Keys of layers without a rotary embedding are stored as they are.
    for (int layer = 0; layer < model.num_layers; ++layer)
      if (!model.rotates(layer)) own[static_cast<std::size_t>(layer)].rope = {};
    const bool pre_rope = config.rope.keys == lowrankkv::Rope::pre;
    if (options.on_gpu) return device_store(own, pre_rope, bases, policies);
    return std::make_unique<StackStore<Cache>>(own, pre_rope, std::move(bases), policies, threads);
  }

 private:
  template <class PolicySet>
  std::unique_ptr<KvStore> device_store(const std::vector<lowrankkv::CacheConfig>& of_layers,
                                        bool pre_rope,
                                        const std::vector<lowrankkv::LayerBasis>& bases,
                                        const PolicySet& policies) const {
    if constexpr (std::is_constructible_v<device::AnyPolicies, const PolicySet&>) {
      std::vector<lowrankkv::CacheConfig> on_device = of_layers;
      for (lowrankkv::CacheConfig& of_layer : on_device)
        of_layer.max_query_tokens = options.query_tokens;
      return std::make_unique<DeviceStore>(make_device_caches(on_device, bases, policies, pre_rope,
                                                              options.pool_bytes, options.stream));
    } else {
      throw std::runtime_error(
          options.method +
          " is not on the GPU yet; there are FullKV, StaticPCA, StaticPCAHybrid, OjaKV, OjaKVv2, "
          "OjaKV+SnapKV, SubSpaceG, SubSpaceA, StarKV, StarKVStatic, StarKV+H2O, Dlrp, SnapKVOnly, "
          "StreamingLLM, H2O, Budgeted, Budgeted+PreRoPE");
    }
  }
};

/// A method: what it is called and how it is made. The lists are in four files only to keep each
/// one's compilation short.
struct Method {
  MethodInfo info;
  std::unique_ptr<KvStore> (*build)(Recipe recipe);
};
std::vector<Method> low_rank_methods();
std::vector<Method> selection_methods();
std::vector<Method> coded_methods();
std::vector<Method> baseline_methods();

}  // namespace llama
