// SPDX-License-Identifier: Apache-2.0
// Methods that cut ranks: FullKV for comparison, StaticPCA, OjaKV in both versions, DLRP.
#include <type_traits>

#include "stack_store.hpp"

namespace llama {
namespace {

using namespace lowrankkv;  // the names of the library are what this file is about

template <class Cache>
std::unique_ptr<KvStore> low_rank(Recipe recipe) {
  typename Cache::PolicySet policies;
  policies.basis = recipe.basis_options(1.0).policy;
  policies.quantizer.type = recipe.options.storage;
  if constexpr (std::is_same_v<decltype(policies.updater), Oja>) {
    if (recipe.options.prefill_rate >= 0.0F)
      policies.updater.prefill_rate = recipe.options.prefill_rate;
    if (recipe.options.decode_rate >= 0.0F)
      policies.updater.decode_rate = recipe.options.decode_rate;
  }
  if constexpr (std::is_same_v<decltype(policies.token_policy), SinkRecent>)
    recipe.use_window(policies.token_policy);
  if constexpr (std::is_same_v<Cache, OjaKVv2<>>) {
    recipe.use_window(policies.token_policy.template get<SinkRecent>());
    policies.token_policy.template get<ResidualOutliers>().share =
        recipe.options.outlier_share >= 0.0F ? recipe.options.outlier_share : 0.05F;
  }
  return recipe.store<Cache>(recipe.bases(recipe.options.ratio), policies);
}

std::unique_ptr<KvStore> full(Recipe recipe) {
  FullKV<>::PolicySet policies;
  policies.quantizer.type = recipe.options.storage;
  return recipe.store<FullKV<>>({}, policies);
}

/// The projectors of DLRP are trained; without training, what a trained one starts from: the
/// query-aware principal axes.
std::unique_ptr<KvStore> dlrp(Recipe recipe) {
  recipe.need_moments();
  calibrate::BasisOptions options = recipe.basis_options(recipe.options.ratio);
  options.policy.key_metric = KeyMetric::query_aware;
  std::vector<LayerBasis> bases;
  for (const auto& layer : recipe.moments) {
    LayerBasis basis = layer.basis(options);
    for (HeadBasis& head : basis.heads) {
      head.output_up = linalg::to_row_major(
          linalg::to_matrix({head.value_down.data(), recipe.config.shape.head_dim, head.value_rank})
              .transpose());
      head.key_metric.clear();
      head.key_metric_inverse.clear();
    }
    bases.push_back(std::move(basis));
  }
  Dlrp<>::PolicySet policies;
  policies.quantizer.type = recipe.options.storage;
  return recipe.store<Dlrp<>>(std::move(bases), policies);
}

}  // namespace

std::vector<Method> low_rank_methods() {
  return {
      {{"FullKV", "", "every token at full rank (the baseline)", {1.0}}, full},
      {{"StaticPCA",
        "rank / head_dim",
        "every token projected onto the calibrated bases of [Q; K] and V; only rows waiting for a "
        "flush are at full rank",
        {0.6, 0.4}},
       low_rank<StaticPCA<>>},
      {{"StaticPCAHybrid",
        "rank / head_dim",
        "StaticPCA with 32 sinks and 32 recent tokens at full rank",
        {0.6, 0.4}},
       low_rank<StaticPCAHybrid<>>},
      {{"OjaKV",
        "rank / head_dim",
        "the hybrid, with bases that one Oja step adapts to the prompt's salient tokens and one "
        "every 32 decoded tokens",
        {0.6, 0.4}},
       low_rank<OjaKV<>>},
      {{"OjaKVv2",
        "rank / head_dim",
        "OjaKV, with the 5 % of tokens that its basis reconstructs worst at full rank",
        {0.6, 0.4}},
       low_rank<OjaKVv2<>>},
      {{"Dlrp",
        "rank / head_dim",
        "four maps per head, here the untrained query-aware axes that training would start from; "
        "every token projected",
        {0.6, 0.4}},
       dlrp},
  };
}

}  // namespace llama
