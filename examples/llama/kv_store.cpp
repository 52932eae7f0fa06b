// SPDX-License-Identifier: Apache-2.0
#include "kv_store.hpp"

#include <stdexcept>

#include "stack_store.hpp"

namespace llama {
namespace {

const std::vector<Method>& registry() {
  static const std::vector<Method> all = [] {
    std::vector<Method> list = low_rank_methods();
    for (const auto& more : {selection_methods(), coded_methods(), baseline_methods()})
      list.insert(list.end(), more.begin(), more.end());
    return list;
  }();
  return all;
}

const Method& find(const std::string& name) {
  std::string known;
  for (const Method& method : registry()) {
    if (method.info.name == name) return method;
    known += " " + method.info.name;
  }
  throw std::runtime_error("method " + name + " is unknown; there are:" + known);
}

}  // namespace

void Recipe::need_moments() const {
  if (moments.size() != static_cast<std::size_t>(model.num_layers)) {
    const std::string form = config.rope.keys == lowrankkv::Rope::pre ? "unrotated" : "rotated";
    throw std::runtime_error(options.method + " needs bases for " + form + " keys of " +
                             std::to_string(model.num_layers) + " layers, given " +
                             std::to_string(moments.size()) + "; calibrate it first");
  }
}

lowrankkv::calibrate::BasisOptions Recipe::basis_options(double ratio) const {
  lowrankkv::calibrate::BasisOptions basis{.key_ratio = ratio, .value_ratio = ratio};
  basis.key_source = options.key_basis == KeyBasis::keys
                         ? lowrankkv::calibrate::KeySource::keys
                         : lowrankkv::calibrate::KeySource::queries_and_keys;
  basis.policy.centred = options.centred;
  if (options.key_basis == KeyBasis::query_aware)
    basis.policy.key_metric = lowrankkv::KeyMetric::query_aware;
  return basis;
}

std::vector<lowrankkv::LayerBasis> Recipe::bases(double ratio) const {
  need_moments();
  std::vector<lowrankkv::LayerBasis> bases;
  for (const auto& layer : moments) bases.push_back(layer.basis(basis_options(ratio)));
  return bases;
}

const std::vector<MethodInfo>& methods() {
  static const std::vector<MethodInfo> infos = [] {
    std::vector<MethodInfo> list;
    for (const Method& method : registry()) list.push_back(method.info);
    return list;
  }();
  return infos;
}

const MethodInfo& find_method(const std::string& name) { return find(name).info; }

std::vector<MethodOptions> at_ratios(const std::vector<std::string>& names,
                                     const std::vector<double>& ratios, MethodOptions options) {
  std::vector<MethodOptions> all;
  for (const std::string& name : names) {
    const MethodInfo& info = find_method(name);
    options.method = name;
    for (const double ratio : info.ratio.empty() || ratios.empty() ? info.ratios : ratios) {
      options.ratio = ratio;
      all.push_back(options);
    }
  }
  return all;
}

std::unique_ptr<KvStore> make_store(const MethodOptions& options, const Config& model,
                                    std::int64_t max_tokens, const Calibration& calibration,
                                    const std::shared_ptr<lowrankkv::cpu::ThreadPool>& threads) {
  const Method& method = find(options.method);
  const lowrankkv::Rope keys =
      options.pre_rope || method.info.pre_rope ? lowrankkv::Rope::pre : lowrankkv::Rope::post;
  Recipe recipe{options, {}, model, calibration.of(keys), threads, calibration.star_kv};
  recipe.config.shape = model.cache_shape();
  recipe.config.max_tokens = max_tokens;
  recipe.config.max_sequences = options.sequences;
  recipe.config.full_type = options.storage;
  recipe.config.epoch_type =
      options.storage == lowrankkv::DType::f32 ? lowrankkv::DType::f32 : lowrankkv::DType::f16;
  recipe.config.prefill_chunk = options.prefill_chunk;
  recipe.config.publish_interval = options.publish_interval;
  recipe.config.rope = model.rope(keys);
  return method.build(recipe);
}

}  // namespace llama
