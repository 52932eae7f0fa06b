// SPDX-License-Identifier: Apache-2.0
#include "kv_store.hpp"

#include <stdexcept>
#include <utility>

#include "lowrankkv/layer_stack.hpp"
#include "lowrankkv/presets.hpp"

namespace llama {
namespace {

using namespace lowrankkv;  // the names of the library are what this file is about

template <class Cache>
class StackStore final : public KvStore {
 public:
  StackStore(const CacheConfig& config, std::vector<LayerBasis> bases, const typename Cache::PolicySet& policies, std::shared_ptr<cpu::ThreadPool> threads)
      : shape_(config.shape), stack_(config, std::move(bases), policies, std::move(threads)) {}

  void create(SequenceId seq) override { stack_.create(seq); }
  void erase(SequenceId seq) override { stack_.erase(seq); }
  void prefill(int layer, SequenceId seq, std::int64_t n, const float* query, const float* key, const float* value, float* out) override {
    stack_.layer(layer).prefill(seq, queries(query, n), keys(key, n), values(value, n), outputs(out, n));
  }
  void ingest(int layer, SequenceId seq, std::int64_t n, const float* query, const float* key, const float* value) override {
    stack_.layer(layer).ingest(seq, keys(key, n), values(value, n), queries(query, n));
  }
  void decode(int layer, SequenceId seq, std::int64_t n, const float* query, const float* key, const float* value, float* out) override {
    stack_.layer(layer).append(seq, keys(key, n), values(value, n));
    stack_.layer(layer).attend(seq, queries(query, n), outputs(out, n));
  }
  void maintain(SequenceId seq) override { stack_.maintain(seq); }
  MemoryUsage memory(SequenceId seq) const override { return stack_.memory(seq); }
  MemoryUsage memory() const override { return stack_.memory(); }
  std::int64_t num_tokens(SequenceId seq) const override { return stack_.num_tokens(seq); }

 private:
  QueryView queries(const float* rows, std::int64_t n) const { return {rows, n, shape_.num_qo_heads, shape_.head_dim}; }
  KeyView keys(const float* rows, std::int64_t n) const { return {rows, n, shape_.num_kv_heads, shape_.head_dim}; }
  ValueView values(const float* rows, std::int64_t n) const { return {rows, n, shape_.num_kv_heads, shape_.head_dim}; }
  OutputView outputs(float* rows, std::int64_t n) const { return {rows, n, shape_.num_qo_heads, shape_.head_dim}; }

  CacheShape shape_;
  LayerStack<Cache> stack_;
};

/// The policies of a preset with what the command line asks for.
template <class Cache>
std::unique_ptr<KvStore> build(const MethodOptions& options, const CacheConfig& config, std::vector<LayerBasis> bases, const PerHead& basis,
                               const std::shared_ptr<cpu::ThreadPool>& threads) {
  typename Cache::PolicySet policies;
  policies.basis = basis;
  policies.quantizer.type = options.storage;
  if constexpr (std::is_same_v<Cache, OjaKV<>>) {
    if (options.prefill_rate >= 0.0F) policies.updater.prefill_rate = options.prefill_rate;
    if (options.decode_rate >= 0.0F) policies.updater.decode_rate = options.decode_rate;
  }
  return std::make_unique<StackStore<Cache>>(config, std::move(bases), policies, threads);
}

}  // namespace

const std::vector<MethodInfo>& methods() {
  static const std::vector<MethodInfo> list = {
      {"FullKV", "every token at full rank (the baseline)", false},
      {"StaticPCA", "every token projected onto the calibrated bases of [Q; K] and V; only rows waiting for a flush are at full rank"},
      {"StaticPCAHybrid", "StaticPCA with 32 sinks and 32 recent tokens at full rank"},
      {"OjaKV", "the hybrid, with bases that one Oja step adapts to the prompt's salient tokens and one every 32 decoded tokens"},
  };
  return list;
}

const MethodInfo& find_method(const std::string& name) {
  std::string known;
  for (const MethodInfo& info : methods()) {
    if (info.name == name) return info;
    known += " " + info.name;
  }
  throw std::runtime_error("method " + name + " is unknown; there are:" + known);
}

std::unique_ptr<KvStore> make_store(const MethodOptions& options, const CacheShape& shape, int num_layers, std::int64_t max_tokens,
                                    const std::vector<calibrate::LayerMoments>& moments, const std::shared_ptr<cpu::ThreadPool>& threads) {
  const MethodInfo& info = find_method(options.method);
  CacheConfig config;
  config.shape = shape;
  config.max_tokens = max_tokens;
  config.full_type = options.storage;
  config.epoch_type = options.storage == DType::f32 ? DType::f32 : DType::f16;
  config.prefill_chunk = options.prefill_chunk;
  config.publish_interval = options.publish_interval;
  std::vector<LayerBasis> bases(static_cast<std::size_t>(num_layers));
  PerHead policy;
  policy.centred = options.centred;
  if (options.key_basis == KeyBasis::query_aware) policy.key_metric = KeyMetric::query_aware;
  if (info.has_ratio) {
    if (moments.size() != bases.size()) {
      throw std::runtime_error(info.name + " needs bases for " + std::to_string(num_layers) + " layers, given " + std::to_string(moments.size()) + "; see --bases");
    }
    const auto source = options.key_basis == KeyBasis::keys ? calibrate::KeySource::keys : calibrate::KeySource::queries_and_keys;
    const calibrate::BasisOptions basis{.key_ratio = options.ratio, .value_ratio = options.ratio, .key_source = source, .policy = policy};
    for (std::size_t layer = 0; layer < bases.size(); ++layer) bases[layer] = moments[layer].basis(basis);
  }
  if (info.name == "FullKV") return build<FullKV<>>(options, config, std::move(bases), policy, threads);
  if (info.name == "StaticPCA") return build<StaticPCA<>>(options, config, std::move(bases), policy, threads);
  if (info.name == "StaticPCAHybrid") return build<StaticPCAHybrid<>>(options, config, std::move(bases), policy, threads);
  return build<OjaKV<>>(options, config, std::move(bases), policy, threads);
}

}  // namespace llama
