// SPDX-License-Identifier: Apache-2.0
#include "cuda/support/cpu_side.hpp"

#include "lowrankkv/presets.hpp"

namespace support {
namespace {

using namespace lowrankkv;

template <class Cache>
class Side : public CpuSide {
 public:
  Side(const CacheConfig& config, const LayerBasis& basis,
       const typename Cache::PolicySet& policies)
      : cache_(config, basis, policies) {
    cache_.create(1);
  }
  void ingest(const std::vector<float>& key, const std::vector<float>& value,
              const std::vector<float>& window, Prompt prompt) override {
    const CacheShape& shape = cache_.config().shape;
    const std::int64_t w =
        static_cast<std::int64_t>(window.size()) / (shape.num_qo_heads * shape.head_dim);
    cache_.ingest(
        1, keys(key), values(value),
        w == 0 ? QueryView{} : QueryView{window.data(), w, shape.num_qo_heads, shape.head_dim},
        prompt);
  }
  std::int64_t publications() const override { return cache_.statistics().publications; }
  std::int64_t merges() const override { return cache_.statistics().merges; }
  std::int64_t rows_reprojected() const override { return cache_.statistics().rows_reprojected; }
  void append_maintained(const std::vector<float>& key, const std::vector<float>& value) override {
    cache_.append_maintained(1, keys(key), values(value));
  }
  void truncate(std::int64_t length) override { cache_.truncate(1, length); }
  void remove(std::int64_t first, std::int64_t count) override {
    cache_.remove(1, first, count);
    if (cache_.config().rope.keys == Rope::pre) cache_.shift_positions(1, first, -count);
  }
  int tail_length() const override { return cache_.tail_length(1); }
  void reconstruct(std::vector<float>& key, std::vector<float>& value) const override {
    const CacheShape& shape = cache_.config().shape;
    const std::int64_t tokens = cache_.num_tokens(1);
    key.resize(static_cast<std::size_t>(tokens * shape.num_kv_heads * shape.head_dim));
    value.resize(key.size());
    cache_.reconstruct(1, 0, {key.data(), tokens, shape.num_kv_heads, shape.head_dim},
                       {value.data(), tokens, shape.num_kv_heads, shape.head_dim});
  }
  void attend(const std::vector<float>& query, std::vector<float>& out,
              std::vector<float>& lse) override {
    const CacheShape& shape = cache_.config().shape;
    const std::int64_t m =
        static_cast<std::int64_t>(query.size()) / (shape.num_qo_heads * shape.head_dim);
    out.resize(query.size());
    lse.resize(static_cast<std::size_t>(m * shape.num_qo_heads));
    cache_.attend(1, {query.data(), m, shape.num_qo_heads, shape.head_dim},
                  {out.data(), m, shape.num_qo_heads, shape.head_dim},
                  {lse.data(), m, shape.num_qo_heads});
  }

 private:
  std::int64_t tokens_of(const std::vector<float>& rows) const {
    return static_cast<std::int64_t>(rows.size()) /
           (cache_.config().shape.num_kv_heads * cache_.config().shape.head_dim);
  }
  KeyView keys(const std::vector<float>& rows) const {
    return {rows.data(), tokens_of(rows), cache_.config().shape.num_kv_heads,
            cache_.config().shape.head_dim};
  }
  ValueView values(const std::vector<float>& rows) const {
    return {rows.data(), tokens_of(rows), cache_.config().shape.num_kv_heads,
            cache_.config().shape.head_dim};
  }
  Cache cache_;
};

template <class Cache>
class HeavyCache : public HeavySide {
 public:
  HeavyCache(const CacheConfig& config, const LayerBasis& basis,
             const typename Cache::PolicySet& policies)
      : cache_(config, basis, policies) {
    cache_.create(1);
  }
  void ingest(const std::vector<float>& query, const std::vector<float>& key,
              const std::vector<float>& value) override {
    cache_.ingest(1, {key.data(), tokens_of(key), shape().num_kv_heads, shape().head_dim},
                  {value.data(), tokens_of(key), shape().num_kv_heads, shape().head_dim},
                  {query.data(), tokens_of(key), shape().num_qo_heads, shape().head_dim});
  }
  void append(const std::vector<float>& key, const std::vector<float>& value) override {
    cache_.append(1, {key.data(), tokens_of(key), shape().num_kv_heads, shape().head_dim},
                  {value.data(), tokens_of(key), shape().num_kv_heads, shape().head_dim});
  }
  void maintain() override { cache_.maintain(1); }
  void accumulate(std::vector<float>& accumulated) override {
    cache_.accumulate(1, {accumulated.data(), 1, shape().num_kv_heads, cache_.num_tokens(1)});
  }
  void truncate(std::int64_t length) override { cache_.truncate(1, length); }
  void remove(std::int64_t first, std::int64_t count) override { cache_.remove(1, first, count); }
  int tail_length() const override { return cache_.tail_length(1); }
  void reconstruct(std::vector<float>& key, std::vector<float>& value) const override {
    const std::int64_t tokens = cache_.num_tokens(1);
    key.resize(static_cast<std::size_t>(tokens * shape().num_kv_heads * shape().head_dim));
    value.resize(key.size());
    cache_.reconstruct(1, 0, {key.data(), tokens, shape().num_kv_heads, shape().head_dim},
                       {value.data(), tokens, shape().num_kv_heads, shape().head_dim});
  }
  std::vector<RowState> states(int head) const override {
    std::vector<RowState> all(static_cast<std::size_t>(cache_.num_tokens(1)));
    cache_.row_states(1, head, 0, all);
    return all;
  }
  std::size_t updater_bytes() const override { return cache_.memory(1).updater_bytes; }
  std::int64_t publications() const override { return cache_.statistics().publications; }
  std::int64_t merges() const override { return cache_.statistics().merges; }

 private:
  const CacheShape& shape() const { return cache_.config().shape; }
  std::int64_t tokens_of(const std::vector<float>& rows) const {
    return static_cast<std::int64_t>(rows.size()) / (shape().num_kv_heads * shape().head_dim);
  }
  Cache cache_;
};

}  // namespace

std::unique_ptr<HeavySide> make_heavy_side(const HeavySettings& settings, const CacheConfig& config,
                                           const LayerBasis& basis) {
  using Tokens = Compose<SinkRecent, HeavyHitters>;
  const auto make =
      [&]<class Cache>(typename Cache::PolicySet policies) -> std::unique_ptr<HeavySide> {
    policies.token_policy.template get<SinkRecent>() = settings.sinks;
    policies.token_policy.template get<HeavyHitters>() = settings.heavy;
    if constexpr (has_member<decltype(policies.token_policy), SnapKV>)
      policies.token_policy.template get<SnapKV>() = settings.scores;
    if constexpr (has_member<decltype(policies.token_policy), ResidualOutliers>)
      policies.token_policy.template get<ResidualOutliers>() = settings.outliers;
    if constexpr (has_member<decltype(policies.token_policy), KeepFull>)
      policies.token_policy.template get<KeepFull>().recent = 0;
    if constexpr (requires { policies.basis.heads_per_group; })
      policies.basis.heads_per_group = settings.heads_per_group;
    if constexpr (requires { policies.quantizer.type; })
      policies.quantizer.type = settings.coefficients;
    configure(policies.updater, settings);
    return std::make_unique<HeavyCache<Cache>>(config, basis, policies);
  };
  if (settings.exempts && settings.scored) {
    using Chosen = Compose<SinkRecent, SnapKV, ResidualOutliers, HeavyHitters>;
    if (settings.form == HeavyForm::plain)
      return make.template operator()<CompressedKVCache<Cpu, PerHead, Static, Chosen, NoQuantizer>>(
          {});
    if (settings.form == HeavyForm::directions)
      return make.template operator()<
          CompressedKVCache<Cpu, PerHead, FrequentDirections, Chosen, NoQuantizer, RotateNow>>({});
    return nullptr;
  }
  if (settings.exempts) {
    using Chosen = Compose<SinkRecent, ResidualOutliers, HeavyHitters>;
    if (settings.form == HeavyForm::plain)
      return make.template operator()<CompressedKVCache<Cpu, PerHead, Static, Chosen, NoQuantizer>>(
          {});
    if (settings.form == HeavyForm::codes)
      return make
          .template operator()<CompressedKVCache<Cpu, PerHead, Static, Chosen, TransformCode>>({});
    if (settings.form == HeavyForm::joint_codes)
      return make.template
      operator()<CompressedKVCache<Cpu, JointValues, Static, Chosen, TransformCode>>({});
    if (settings.form == HeavyForm::oja)
      return make.template
      operator()<CompressedKVCache<Cpu, PerHead, Oja, Chosen, NoQuantizer, KeepEpochs<2>>>({});
    if (settings.form == HeavyForm::directions)
      return make.template operator()<
          CompressedKVCache<Cpu, PerHead, FrequentDirections, Chosen, NoQuantizer, RotateNow>>({});
    return nullptr;
  }
  if (settings.scored) {
    using Chosen = Compose<SinkRecent, SnapKV, HeavyHitters>;
    if (settings.form == HeavyForm::plain)
      return make.template operator()<CompressedKVCache<Cpu, PerHead, Static, Chosen, NoQuantizer>>(
          {});
    if (settings.form == HeavyForm::star)
      return make.template
      operator()<CompressedKVCache<Cpu, JointValues, Static, Chosen, BlockHadamard>>({});
    if (settings.form == HeavyForm::oja_codes)
      return make.template
      operator()<CompressedKVCache<Cpu, PerHead, Oja, Chosen, TransformCode, KeepEpochs<3>>>({});
    if (settings.form == HeavyForm::directions)
      return make.template operator()<
          CompressedKVCache<Cpu, PerHead, FrequentDirections, Chosen, NoQuantizer, RotateNow>>({});
    if (settings.form == HeavyForm::full)
      return make.template operator()<CompressedKVCache<
          Cpu, PerHead, Static, Compose<KeepFull, SinkRecent, SnapKV, HeavyHitters>, NoQuantizer>>(
          {});
    return nullptr;
  }
  switch (settings.form) {
    case HeavyForm::plain:
      return make.template operator()<CompressedKVCache<Cpu, PerHead, Static, Tokens, NoQuantizer>>(
          {});
    case HeavyForm::codes:
      return make
          .template operator()<CompressedKVCache<Cpu, PerHead, Static, Tokens, TransformCode>>({});
    case HeavyForm::joint:
      return make.template
      operator()<CompressedKVCache<Cpu, JointValues, Static, Tokens, NoQuantizer>>({});
    case HeavyForm::joint_codes:
      return make.template
      operator()<CompressedKVCache<Cpu, JointValues, Static, Tokens, TransformCode>>({});
    case HeavyForm::oja:
      return make.template
      operator()<CompressedKVCache<Cpu, PerHead, Oja, Tokens, NoQuantizer, KeepEpochs<2>>>({});
    case HeavyForm::oja_codes:
      return make.template
      operator()<CompressedKVCache<Cpu, PerHead, Oja, Tokens, TransformCode, KeepEpochs<3>>>({});
    case HeavyForm::directions:
      return make.template operator()<
          CompressedKVCache<Cpu, PerHead, FrequentDirections, Tokens, NoQuantizer, RotateNow>>({});
    case HeavyForm::star:
      return make.template operator()<StarKVH2O<>>({});
    case HeavyForm::full:
      break;
  }
  return make.template operator()<CompressedKVCache<
      Cpu, PerHead, Static, Compose<KeepFull, SinkRecent, HeavyHitters>, NoQuantizer>>({});
}

std::unique_ptr<CpuSide> make_star_side(const StarSettings& settings, const CacheConfig& config,
                                        const LayerBasis& basis) {
  if (settings.outliers && settings.joint) {
    const auto make = [&]<class Quantizer>(const Quantizer& quantizer) -> std::unique_ptr<CpuSide> {
      using Cache = CompressedKVCache<Cpu, JointValues, Static,
                                      Compose<SinkRecent, ResidualOutliers>, Quantizer>;
      return std::make_unique<Side<Cache>>(
          config, basis,
          typename Cache::PolicySet{{settings.heads_per_group, settings.basis},
                                    {},
                                    Compose(settings.tokens, settings.errors),
                                    quantizer});
    };
    if (settings.allocated) return make(TransformCode{});
    if (settings.coded) return make(settings.quantizer);
    return make(NoQuantizer{DType::f16});
  }
  if (settings.outliers) {
    using Cache = CompressedKVCache<Cpu, PerHead, Static, Compose<SinkRecent, ResidualOutliers>,
                                    BlockHadamard>;
    Cache::PolicySet policies;
    policies.basis = settings.basis;
    policies.token_policy.get<SinkRecent>() = settings.tokens;
    policies.token_policy.get<ResidualOutliers>() = settings.errors;
    policies.quantizer = settings.quantizer;
    return std::make_unique<Side<Cache>>(config, basis, policies);
  }
  if (settings.scored) {
    using Cache =
        CompressedKVCache<Cpu, JointValues, Static, Compose<SinkRecent, SnapKV>, BlockHadamard>;
    return std::make_unique<Side<Cache>>(
        config, basis,
        Cache::PolicySet{{settings.heads_per_group, settings.basis},
                         {},
                         Compose(settings.tokens, settings.scores),
                         settings.quantizer});
  }
  if (settings.joint && settings.bytes) {
    using Cache = CompressedKVCache<Cpu, JointValues, Static, SinkRecent, Int8>;
    return std::make_unique<Side<Cache>>(
        config, basis,
        Cache::PolicySet{{settings.heads_per_group, settings.basis}, {}, settings.tokens, {}});
  }
  if (settings.joint && settings.allocated) {
    using Cache = CompressedKVCache<Cpu, JointValues, Static, SinkRecent, TransformCode>;
    return std::make_unique<Side<Cache>>(
        config, basis,
        Cache::PolicySet{{settings.heads_per_group, settings.basis}, {}, settings.tokens, {}});
  }
  if (settings.joint && settings.coded) {
    return std::make_unique<Side<StarKV<>>>(
        config, basis,
        StarKV<>::PolicySet{
            {settings.heads_per_group, settings.basis}, {}, settings.tokens, settings.quantizer});
  }
  if (settings.joint) {
    using Cache = CompressedKVCache<Cpu, JointValues, Static, SinkRecent, NoQuantizer>;
    return std::make_unique<Side<Cache>>(
        config, basis,
        Cache::PolicySet{
            {settings.heads_per_group, settings.basis}, {}, settings.tokens, {DType::f16}});
  }
  using Cache = CompressedKVCache<Cpu, PerHead, Static, SinkRecent, BlockHadamard>;
  return std::make_unique<Side<Cache>>(
      config, basis, Cache::PolicySet{settings.basis, {}, settings.tokens, settings.quantizer});
}

std::unique_ptr<CpuSide> make_cpu_side(const Settings& settings, const CacheConfig& config,
                                       const LayerBasis& basis) {
  const auto make =
      [&]<class Cache>(typename Cache::PolicySet policies) -> std::unique_ptr<CpuSide> {
    return std::make_unique<Side<Cache>>(config, basis, configured(policies, settings));
  };
  switch (settings.method) {
    case Method::full:
      return make.template operator()<FullKV<>>({});
    case Method::static_pca:
      return make.template operator()<StaticPCA<>>({});
    case Method::hybrid:
      return make.template operator()<StaticPCAHybrid<>>({});
    case Method::projector:
      return make.template operator()<Dlrp<>>({});
    case Method::oja:
      return make.template operator()<OjaKV<>>({});
    case Method::oja_merging:
      return make.template
      operator()<CompressedKVCache<Cpu, PerHead, Oja, SinkRecent, NoQuantizer, KeepEpochs<2>>>({});
    case Method::oja_rotating:
      return make.template
      operator()<CompressedKVCache<Cpu, PerHead, Oja, SinkRecent, NoQuantizer, RotateNow>>({});
    case Method::oja_int8:
      return make.template operator()<CompressedKVCache<Cpu, PerHead, Oja, SinkRecent, Int8>>({});
    case Method::oja_codes:
      return make.template operator()<CompressedKVCache<
          Cpu, PerHead, Oja, Compose<SinkRecent, ResidualOutliers>, TransformCode, KeepEpochs<2>>>(
          {});
    case Method::oja_blocks:
      return make.template
      operator()<CompressedKVCache<Cpu, PerHead, Oja, SinkRecent, BlockHadamard, RotateNow>>({});
    case Method::directions_codes:
      return make.template operator()<CompressedKVCache<Cpu, PerHead, FrequentDirections,
                                                        SinkRecent, TransformCode, KeepEpochs<3>>>(
          {});
    case Method::subspace_a:
      return make.template operator()<SubSpaceA<>>({});
    case Method::directions:
      return make.template operator()<CompressedKVCache<Cpu, PerHead, FrequentDirections,
                                                        SinkRecent, NoQuantizer, KeepEpochs<3>>>(
          {});
    case Method::directions_outliers:
      return make.template operator()<CompressedKVCache<
          Cpu, PerHead, FrequentDirections, Compose<SinkRecent, ResidualOutliers>, Int8>>({});
    case Method::directions_snapkv:
      return make.template operator()<
          CompressedKVCache<Cpu, PerHead, FrequentDirections, Compose<SinkRecent, SnapKV>, Int8>>(
          {});
    case Method::directions_evicting:
      return make.template operator()<CompressedKVCache<
          Cpu, PerHead, FrequentDirections, Compose<SinkRecent, SnapKV, ResidualOutliers>, Int8>>(
          {});
    case Method::oja_outliers:
      return make.template operator()<OjaKVv2<>>({});
    case Method::oja_snapkv:
      return make.template operator()<OjaKVSnapKV<>>({});
    case Method::snapkv:
      return make.template
      operator()<CompressedKVCache<Cpu, PerHead, Static, Compose<SinkRecent, SnapKV>, NoQuantizer>>(
          {});
    case Method::oja_evicting:
      return make.template operator()<CompressedKVCache<
          Cpu, PerHead, Oja, Compose<SinkRecent, SnapKV, ResidualOutliers>, NoQuantizer>>({});
    case Method::budgeted_evicting:
      return make.template operator()<CompressedKVCache<
          Cpu, PerHead, Static, Compose<SinkRecent, SnapKV, ResidualOutliers>, TransformCode>>({});
    case Method::snapkv_only:
      return make.template operator()<SnapKVOnly<>>({});
    case Method::streaming:
      return make.template operator()<StreamingLLM<>>({});
    case Method::int8:
      return make.template operator()<CompressedKVCache<Cpu, PerHead, Static, SinkRecent, Int8>>(
          {});
    case Method::outliers:
      return make.template operator()<CompressedKVCache<
          Cpu, PerHead, Static, Compose<SinkRecent, ResidualOutliers>, NoQuantizer>>({});
    case Method::budgeted:
      return make.template operator()<Budgeted<>>({});
    case Method::codes:
      return make.template
      operator()<CompressedKVCache<Cpu, PerHead, Static, SinkRecent, TransformCode>>({});
  }
  return nullptr;
}

}  // namespace support
