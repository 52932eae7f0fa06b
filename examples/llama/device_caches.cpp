// SPDX-License-Identifier: Apache-2.0
#include "device_caches.hpp"

#include <cstddef>

#include "lowrankkv/cuda.hpp"

namespace llama {
namespace {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too

template <class Cache>
class Caches final : public DeviceCaches {
 public:
  Caches(const std::vector<CacheConfig>& configs, const std::vector<LayerBasis>& bases,
         const typename Cache::PolicySet& policies)
      : shape_(configs.front().shape), stack_(configs, bases, policies) {}
  void create(SequenceId seq) override { stack_.create(seq); }
  void erase(SequenceId seq) override { stack_.erase(seq); }
  void prefill(int layer, SequenceId seq, std::int64_t n, const float* query, const float* key,
               const float* value, float* out) override {
    cache(layer).prefill(seq, queries(query, n), keys(key, n), values(value, n), outputs(out, n));
  }
  void ingest(int layer, SequenceId seq, std::int64_t n, const float* query, const float* key,
              const float* value) override {
    cache(layer).ingest(seq, keys(key, n), values(value, n), queries(query, n));
  }
  void decode(int layer, SequenceId seq, std::int64_t n, const float* query, const float* key,
              const float* value, float* out) override {
    cache(layer).append(seq, keys(key, n), values(value, n));
    // Eviction by accumulated attention needs to be told what the step's queries attended to.
    if constexpr (requires(Cache & cache, const ScoreView& accumulated) {
                    cache.accumulate(seq, accumulated);
                  }) {
      const std::size_t most = static_cast<std::size_t>(shape_.num_kv_heads) *
                               static_cast<std::size_t>(cache(layer).config().max_tokens);
      if (accumulated_.size() < most) accumulated_ = gpu::DeviceArray<float>(most);
      const ScoreView accumulated(accumulated_.data(), 1, shape_.num_kv_heads,
                                  cache(layer).num_tokens(seq));
      cache(layer).attend(seq, queries(query, n), outputs(out, n), {}, accumulated);
      cache(layer).accumulate(seq, accumulated);
    } else {
      cache(layer).attend(seq, queries(query, n), outputs(out, n));
    }
  }
  void maintain(SequenceId seq) override { stack_.maintain(seq); }
  MemoryUsage memory(SequenceId seq) const override { return stack_.memory(seq); }
  MemoryUsage memory() const override { return stack_.memory(); }
  std::int64_t num_tokens(SequenceId seq) const override { return stack_.num_tokens(seq); }

 private:
  Cache& cache(int layer) { return stack_.layer(layer); }
  QueryView queries(const float* rows, std::int64_t n) const {
    return {rows, n, shape_.num_qo_heads, shape_.head_dim};
  }
  KeyView keys(const float* rows, std::int64_t n) const {
    return {rows, n, shape_.num_kv_heads, shape_.head_dim};
  }
  ValueView values(const float* rows, std::int64_t n) const {
    return {rows, n, shape_.num_kv_heads, shape_.head_dim};
  }
  OutputView outputs(float* rows, std::int64_t n) const {
    return {rows, n, shape_.num_qo_heads, shape_.head_dim};
  }

  CacheShape shape_;
  LayerStack<Cache> stack_;
  gpu::DeviceArray<float> accumulated_;
};

}  // namespace

std::unique_ptr<DeviceCaches> make_device_caches(const std::vector<CacheConfig>& configs,
                                                 const std::vector<LayerBasis>& bases,
                                                 const device::AnyPolicies& policies) {
  return std::visit(
      [&]<class Basis, class Updater, class TokenPolicy, class Quantizer>(
          const Policies<Basis, Updater, TokenPolicy, Quantizer>& own)
          -> std::unique_ptr<DeviceCaches> {
        return std::make_unique<
            Caches<CompressedKVCache<Cuda, Basis, Updater, TokenPolicy, Quantizer>>>(configs, bases,
                                                                                     own);
      },
      policies);
}

}  // namespace llama
