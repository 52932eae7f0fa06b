// SPDX-License-Identifier: Apache-2.0
#include "device_caches.hpp"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <utility>

#include "lowrankkv/cuda.hpp"

namespace llama {
namespace {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too

/// Whether rows are evicted by the attention that they received, which steps have to tell the
/// cache.
template <class Cache>
constexpr bool accumulates = requires(Cache& cache, const ScoreView& accumulated) {
  cache.accumulate(0, accumulated);
};

template <class Cache>
class Caches final : public DeviceCaches {
 public:
  using Stack = LayerStack<Cache>;
  using PolicySet = typename Cache::PolicySet;

  Caches(std::vector<CacheConfig> configs, const std::vector<LayerBasis>& bases,
         const PolicySet& policies, bool pre_rope, std::size_t pool_bytes, DeviceStream stream)
      : configs_(sized(std::move(configs), bases, policies, pool_bytes)),
        bases_(bases),
        policies_(policies),
        shape_(configs_.front().shape),
        pre_rope_(pre_rope),
        stream_(stream),
        stack_(configs_, bases, policies) {}

  void create(SequenceId seq) override { stack_.create(seq, stream_); }
  void erase(SequenceId seq) override { stack_.erase(seq, stream_); }
  void prefill(int layer, SequenceId seq, std::int64_t n, const Projected& rows, Prompt prompt,
               float* out) override {
    cache(layer).prefill(seq, queries(rows, n), keys(rows, n), values(rows, n), outputs(out, n), {},
                         prompt, stream_);
  }
  void ingest(int layer, SequenceId seq, std::int64_t n, const Projected& rows,
              std::int64_t of_queries) override {
    cache(layer).ingest(seq, keys(rows, n), values(rows, n), queries(rows, of_queries), stream_);
  }
  void decode(int layer, SequenceId seq, std::int64_t n, const Projected& rows,
              float* out) override {
    cache(layer).append(seq, keys(rows, n), values(rows, n), stream_);
    if constexpr (accumulates<Cache>) {
      const std::size_t most = static_cast<std::size_t>(shape_.num_kv_heads) *
                               static_cast<std::size_t>(cache(layer).config().max_tokens);
      if (accumulated_.size() < most) accumulated_ = gpu::DeviceArray<float>(most);
      const ScoreView accumulated(accumulated_.data(), 1, shape_.num_kv_heads,
                                  cache(layer).num_tokens(seq));
      cache(layer).attend(seq, queries(rows, n), outputs(out, n), {}, accumulated, stream_);
      cache(layer).accumulate(seq, accumulated, stream_);
    } else {
      cache(layer).attend(seq, queries(rows, n), outputs(out, n), {}, stream_);
    }
  }
  void decode(int layer, const SlotView& slots, const Projected& rows, float* out) override {
    if constexpr (accumulates<Cache>) {
      throw std::runtime_error(
          "steps of many sequences: this method evicts by accumulated attention scores, methods "
          "that do not are expected");
    } else {
      const std::int64_t n = slots.count;
      cache(layer).append(slots, keys(rows, n), values(rows, n), stream_);
      cache(layer).attend(slots, queries(rows, n), outputs(out, n), {}, stream_);
    }
  }
  int slot(SequenceId seq) const override { return stack_.slot(seq); }
  void advance(Sequences seqs) override { stack_.advance(seqs, 1); }
  void maintain(Sequences seqs) override { stack_.maintain(seqs, stream_); }
  MemoryUsage memory(SequenceId seq) const override { return stack_.memory(seq); }
  MemoryUsage memory() const override { return stack_.memory(); }
  std::int64_t num_tokens(SequenceId seq) const override { return stack_.num_tokens(seq); }
  std::int64_t pages_for(std::int64_t tokens) const override {
    std::vector<CacheConfig> one = configs_;
    for (CacheConfig& of_layer : one) {
      of_layer.max_sequences = 1;
      of_layer.max_tokens = tokens;
      of_layer.page_bytes = page_bytes();
    }
    return Stack::pool_size(one, bases_, policies_).num_pages;
  }
  std::int64_t num_pages() const override { return stack_.pool().allocator().num_pages(); }
  std::int64_t num_free_pages() const override { return stack_.pool().allocator().num_free(); }
  std::size_t page_bytes() const override { return stack_.pool().page_bytes(); }

 private:
  static std::vector<CacheConfig> sized(std::vector<CacheConfig> configs,
                                        const std::vector<LayerBasis>& bases,
                                        const PolicySet& policies, std::size_t pool_bytes) {
    if (pool_bytes == 0) return configs;
    const PoolSize size = Stack::pool_size(configs, bases, policies);
    const auto pages = static_cast<std::int64_t>(pool_bytes / size.page_bytes);
    for (CacheConfig& of_layer : configs) of_layer.num_pages = std::max<std::int64_t>(1, pages);
    return configs;
  }
  Cache& cache(int layer) { return stack_.layer(layer); }
  QueryView queries(const Projected& rows, std::int64_t n) const {
    return {rows.query, n, shape_.num_qo_heads, shape_.head_dim};
  }
  KeyView keys(const Projected& rows, std::int64_t n) const {
    return {pre_rope_ ? rows.pre_rope_key : rows.key, n, shape_.num_kv_heads, shape_.head_dim};
  }
  ValueView values(const Projected& rows, std::int64_t n) const {
    return {rows.value, n, shape_.num_kv_heads, shape_.head_dim};
  }
  OutputView outputs(float* rows, std::int64_t n) const {
    return {rows, n, shape_.num_qo_heads, shape_.head_dim};
  }

  std::vector<CacheConfig> configs_;
  std::vector<LayerBasis> bases_;
  PolicySet policies_;
  CacheShape shape_;
  bool pre_rope_ = false;
  cudaStream_t stream_ = nullptr;
  Stack stack_;
  gpu::DeviceArray<float> accumulated_;
};

}  // namespace

std::unique_ptr<DeviceCaches> make_device_caches(const std::vector<CacheConfig>& configs,
                                                 const std::vector<LayerBasis>& bases,
                                                 const device::AnyPolicies& policies, bool pre_rope,
                                                 std::size_t pool_bytes, DeviceStream stream) {
  return std::visit(
      [&]<class Basis, class Updater, class TokenPolicy, class Quantizer>(
          const Policies<Basis, Updater, TokenPolicy, Quantizer>& own)
          -> std::unique_ptr<DeviceCaches> {
        using Cache = CompressedKVCache<Cuda, Basis, Updater, TokenPolicy, Quantizer>;
        return std::make_unique<Caches<Cache>>(configs, bases, own, pre_rope, pool_bytes, stream);
      },
      policies);
}

}  // namespace llama
