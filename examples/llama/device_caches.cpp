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
  Caches(const CacheConfig& config, const std::vector<LayerBasis>& bases,
         const typename Cache::PolicySet& policies)
      : shape_(config.shape), stack_(config, bases, policies) {}
  void create(SequenceId seq) override { stack_.create(seq); }
  void erase(SequenceId seq) override { stack_.erase(seq); }
  void prefill(int layer, SequenceId seq, std::int64_t n, const float* query, const float* key,
               const float* value, float* out) override {
    send(n, query, key, value);
    cache(layer).prefill(seq, queries(n), keys(n), values(n), outputs(n));
    receive(n, out);
  }
  void ingest(int layer, SequenceId seq, std::int64_t n, const float* query, const float* key,
              const float* value) override {
    send(n, query, key, value);
    cache(layer).ingest(seq, keys(n), values(n), queries(n));
  }
  void decode(int layer, SequenceId seq, std::int64_t n, const float* query, const float* key,
              const float* value, float* out) override {
    send(n, query, key, value);
    cache(layer).append(seq, keys(n), values(n));
    // Eviction by accumulated attention needs to be told what the step's queries attended to.
    if constexpr (requires(Cache & cache, const ScoreView& accumulated) {
                    cache.accumulate(seq, accumulated);
                  }) {
      const std::size_t most = static_cast<std::size_t>(shape_.num_kv_heads) *
                               static_cast<std::size_t>(cache(layer).config().max_tokens);
      if (accumulated_.size() < most) accumulated_ = gpu::DeviceArray<float>(most);
      const ScoreView accumulated(accumulated_.data(), 1, shape_.num_kv_heads,
                                  cache(layer).num_tokens(seq));
      cache(layer).attend(seq, queries(n), outputs(n), {}, accumulated);
      cache(layer).accumulate(seq, accumulated);
    } else {
      cache(layer).attend(seq, queries(n), outputs(n));
    }
    receive(n, out);
  }
  void maintain(SequenceId seq) override { stack_.maintain(seq); }
  MemoryUsage memory(SequenceId seq) const override { return stack_.memory(seq); }
  MemoryUsage memory() const override { return stack_.memory(); }
  std::int64_t num_tokens(SequenceId seq) const override { return stack_.num_tokens(seq); }

 private:
  Cache& cache(int layer) { return stack_.layer(layer); }
  std::size_t size(std::int64_t n, int heads) const {
    return static_cast<std::size_t>(n * heads * shape_.head_dim);
  }
  static void copy_in(gpu::DeviceArray<float>& target, const float* source, std::size_t size) {
    if (target.size() < size) target = gpu::DeviceArray<float>(size);
    if (source != nullptr)
      gpu::check(cudaMemcpy(target.data(), source, size * sizeof(float), cudaMemcpyHostToDevice),
                 "cudaMemcpy");
  }
  void send(std::int64_t n, const float* query, const float* key, const float* value) {
    copy_in(query_, query, size(n, shape_.num_qo_heads));
    copy_in(out_, nullptr, size(n, shape_.num_qo_heads));
    copy_in(key_, key, size(n, shape_.num_kv_heads));
    copy_in(value_, value, size(n, shape_.num_kv_heads));
  }
  void receive(std::int64_t n, float* out) {
    gpu::check(cudaMemcpy(out, out_.data(), size(n, shape_.num_qo_heads) * sizeof(float),
                          cudaMemcpyDeviceToHost),
               "cudaMemcpy");
  }
  QueryView queries(std::int64_t n) const {
    return {query_.data(), n, shape_.num_qo_heads, shape_.head_dim};
  }
  KeyView keys(std::int64_t n) const {
    return {key_.data(), n, shape_.num_kv_heads, shape_.head_dim};
  }
  ValueView values(std::int64_t n) const {
    return {value_.data(), n, shape_.num_kv_heads, shape_.head_dim};
  }
  OutputView outputs(std::int64_t n) const {
    return {out_.data(), n, shape_.num_qo_heads, shape_.head_dim};
  }

  CacheShape shape_;
  LayerStack<Cache> stack_;
  gpu::DeviceArray<float> query_, key_, value_, out_, accumulated_;
};

}  // namespace

std::unique_ptr<DeviceCaches> make_device_caches(const CacheConfig& config,
                                                 const std::vector<LayerBasis>& bases,
                                                 const device::AnyPolicies& policies) {
  return std::visit(
      [&]<class Basis, class Updater, class TokenPolicy, class Quantizer>(
          const Policies<Basis, Updater, TokenPolicy, Quantizer>& own)
          -> std::unique_ptr<DeviceCaches> {
        return std::make_unique<
            Caches<CompressedKVCache<Cuda, Basis, Updater, TokenPolicy, Quantizer>>>(config, bases,
                                                                                     own);
      },
      policies);
}

}  // namespace llama
