// SPDX-License-Identifier: Apache-2.0
// Methods that quantise: SubSpace-G and -A, STAR-KV, and the library's own Budgeted.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "lowrankkv/budgeted.hpp"
#include "lowrankkv/calibrate/joint_values.hpp"
#include "lowrankkv/calibrate/residual_thresholds.hpp"
#include "stack_store.hpp"

namespace llama {
namespace {

using namespace lowrankkv;  // the names of the library are what this file is about

/// Rows of codes are short: small pages leave little of the last one empty, large ones lose little
/// to whole rows. On the GPU tiles say what a page is.
std::size_t page_bytes(const Recipe& recipe) {
  return recipe.options.on_gpu ? 0 : recipe.context() <= 2048 ? 1024 : 4096;
}

std::unique_ptr<KvStore> subspace_g(Recipe recipe) {
  recipe.config.page_bytes = page_bytes(recipe);
  SubSpaceG<>::PolicySet policies;
  policies.basis = recipe.basis_options(1.0).policy;
  return recipe.store<SubSpaceG<>>(recipe.bases(std::min(1.0, recipe.options.ratio * 16.0 / 8.0)),
                                   policies);
}

std::unique_ptr<KvStore> subspace_a(Recipe recipe) {
  recipe.config.page_bytes = page_bytes(recipe);
  SubSpaceA<>::PolicySet policies;
  recipe.use_window(policies.token_policy);
  policies.basis = recipe.basis_options(1.0).policy;
  std::vector<LayerBasis> bases = recipe.bases(std::min(1.0, recipe.options.ratio * 16.0 / 8.0));
  for (std::size_t layer = 0; layer < bases.size(); ++layer)
    calibrate::set_residual_thresholds(recipe.moments[layer], policies.basis, 0.99, bases[layer]);
  return recipe.store<SubSpaceA<>>(std::move(bases), policies);
}

/// Per-head keys and joint values at the rank that 3.2 bits a coefficient leave of the ratio.
std::vector<LayerBasis> star_bases(const Recipe& recipe, double ratio, const BlockHadamard& codes) {
  recipe.need_moments();
  const double outliers = static_cast<double>(codes.outlier_share);
  const double bits = outliers * codes.high_bits + (1.0 - outliers) * codes.low_bits;
  const double share = std::min(1.0, ratio * 16.0 / bits);
  std::vector<LayerBasis> bases;
  for (const auto& layer : recipe.moments)
    bases.push_back(calibrate::joint_basis(layer, recipe.basis_options(share)));
  return bases;
}

std::unique_ptr<KvStore> star(Recipe recipe) {
  recipe.config.page_bytes = page_bytes(recipe);
  StarKV<>::PolicySet policies;
  policies.basis.keys = recipe.basis_options(1.0).policy;
  recipe.use_window(policies.token_policy);
  return recipe.store<StarKV<>>(star_bases(recipe, recipe.options.ratio, policies.quantizer),
                                policies);
}

std::unique_ptr<KvStore> star_trained(Recipe recipe) {
  if (recipe.star_kv.empty())
    throw std::runtime_error(recipe.options.method +
                             " needs ranks that train-projector learned; --trained names its file "
                             "(StarKVStatic has ranks from activations)");
  recipe.config.page_bytes = page_bytes(recipe);
  StarKV<>::PolicySet policies;
  policies.basis.keys.centred = recipe.model.attention_bias;
  recipe.use_window(policies.token_policy);
  return recipe.store<StarKV<>>(recipe.star_kv, policies);
}

std::unique_ptr<KvStore> star_h2o(Recipe recipe) {
  recipe.config.page_bytes = page_bytes(recipe);
  StarKVH2O<>::PolicySet policies;
  policies.basis.keys = recipe.basis_options(1.0).policy;
  recipe.use_window(policies.token_policy.get<SinkRecent>());
  const double keep = std::min(1.0, std::sqrt(5.0 * recipe.options.ratio));
  policies.token_policy.get<HeavyHitters>().keep = static_cast<float>(keep);
  return recipe.store<StarKVH2O<>>(
      star_bases(recipe, recipe.options.ratio / keep, policies.quantizer), policies);
}

std::unique_ptr<KvStore> budgeted(Recipe recipe) {
  recipe.need_moments();
  calibrate::BudgetOptions options;
  options.ratio = recipe.options.ratio;
  options.context = recipe.context();
  options.full_type = recipe.options.storage;
  recipe.use_window(options);
  static_assert(MethodOptions::kChooseRowBits == calibrate::BudgetOptions::kChooseBits);
  options.full_row_bits = recipe.options.full_row_bits;
  if (recipe.options.on_gpu && !recipe.options.cpu_codes) options.for_cuda();
  if (recipe.options.unit_bits >= 0.0) options.unit_bits = recipe.options.unit_bits;
  if (!recipe.options.widths.empty()) options.widths = recipe.options.widths;
  if (recipe.options.outlier_share >= 0.0F)
    options.outlier_share = static_cast<double>(recipe.options.outlier_share);
  if (recipe.options.early_outliers >= 0)
    options.early_outliers = recipe.options.early_outliers;
  else if (options.outlier_share > 0.0)
    options.early_outliers = 0;
  const calibrate::BudgetedModel model = calibrate::budgeted(recipe.moments, options);
  recipe.configs = model.configs(recipe.config);
  if (recipe.options.on_gpu && !options.on_device)
    for (CacheConfig& of_layer : recipe.configs) of_layer.page_bytes = 0;
  return recipe.store<Budgeted<>>(model.bases, model.policies);
}

}  // namespace

std::vector<Method> coded_methods() {
  return {
      {{"SubSpaceG",
        "rank / head_dim x 8 / 16",
        "every token projected, coefficients in 8 bits",
        {0.4, 0.2}},
       subspace_g},
      {{"SubSpaceA",
        "rank / head_dim x 8 / 16",
        "chunks under bases from a Frequent Directions sketch, 32 tokens of warm-up, coefficients "
        "in 8 bits",
        {0.4, 0.2}},
       subspace_a},
      {{"StarKVStatic",
        "rank / head_dim x 3.2 / 16",
        "per-head keys, joint values, rotated blocks of 4 and 3 bits; 32 sinks and 32 recent "
        "tokens at full rank",
        {0.2, 0.14}},
       star},
      {{"StarKV",
        "",
        "StarKVStatic with the weights and ranks of each head that train-projector learned "
        "(--trained)",
        {1.0},
        true,
        true},
       star_trained},
      {{"StarKV+H2O",
        "tokens kept x rank / head_dim x 3.2 / 16",
        "StarKVStatic on the tokens that H2O keeps",
        {0.14}},
       star_h2o},
      {{"Budgeted",
        "bytes, everything counted",
        "transform coding in the metric of the layer's output, bits by reverse water-filling; "
        "16 sinks, 8 of the first 128 and 8 recent tokens at full rank",
        {0.2, 0.14, 0.1, 0.07}},
       budgeted},
      {{"Budgeted+PreRoPE",
        "bytes, everything counted",
        "Budgeted on keys before their rotary embedding: they are up-projected and rotated when "
        "they are read",
        {0.1, 0.05},
        true},
       budgeted},
  };
}

}  // namespace llama
