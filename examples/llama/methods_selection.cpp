// SPDX-License-Identifier: Apache-2.0
// Methods that choose tokens: SnapKV, StreamingLLM, H2O, and OjaKV on what SnapKV keeps.
#include <algorithm>
#include <cmath>

#include "stack_store.hpp"

namespace llama {
namespace {

using namespace lowrankkv;  // the names of the library are what this file is about

std::unique_ptr<KvStore> snapkv(Recipe recipe) {
  SnapKVOnly<>::PolicySet policies;
  policies.token_policy.get<SnapKV>().keep = static_cast<float>(recipe.options.ratio);
  return recipe.store<SnapKVOnly<>>({}, policies);
}

std::unique_ptr<KvStore> streaming(Recipe recipe) {
  StreamingLLM<>::PolicySet policies;
  const auto kept =
      static_cast<int>(std::lround(recipe.options.ratio * static_cast<double>(recipe.context())));
  policies.token_policy.recent = std::max(1, kept - policies.token_policy.sinks);
  return recipe.store<StreamingLLM<>>({}, policies);
}

std::unique_ptr<KvStore> heavy_hitters(Recipe recipe) {
  // Half of the budget for heavy hitters, half for the recent window, as in the paper.
  H2O<>::PolicySet policies;
  const double half = recipe.options.ratio / 2.0;
  const int recent =
      std::max(1, static_cast<int>(std::lround(half * static_cast<double>(recipe.context()))));
  policies.token_policy.get<KeepFull>().recent = recent;
  policies.token_policy.get<HeavyHitters>() = {static_cast<float>(half), 0, recent};
  return recipe.store<H2O<>>({}, policies);
}

std::unique_ptr<KvStore> oja_snapkv(Recipe recipe) {
  OjaKVSnapKV<>::PolicySet policies;
  const double part = std::sqrt(recipe.options.ratio);
  policies.basis = recipe.basis_options(part).policy;
  policies.quantizer.type = recipe.options.storage;
  recipe.use_window(policies.token_policy.get<SinkRecent>());
  policies.token_policy.get<SnapKV>().keep = static_cast<float>(part);
  return recipe.store<OjaKVSnapKV<>>(recipe.bases(part), policies);
}

}  // namespace

std::vector<Method> selection_methods() {
  return {
      {{"SnapKVOnly",
        "tokens kept",
        "prompt tokens that the last 32 queries attend to, at full rank; the others are dropped",
        {0.5, 0.25}},
       snapkv},
      {{"StreamingLLM",
        "tokens kept",
        "4 sinks and a sliding window at full rank; the others are dropped",
        {0.5, 0.25}},
       streaming},
      {{"H2O",
        "tokens kept",
        "heavy hitters and a recent window of equal size at full rank; the others are dropped",
        {0.5, 0.25}},
       heavy_hitters},
      {{"OjaKV+SnapKV",
        "tokens kept x rank / head_dim",
        "OjaKV on the tokens that SnapKV keeps, both at the root of the ratio",
        {0.4}},
       oja_snapkv},
  };
}

}  // namespace llama
