// SPDX-License-Identifier: Apache-2.0
// Baselines that only quantise, and need no calibration: the formats of llama.cpp and vLLM,
// TurboQuant, KIVI.
#include "stack_store.hpp"

namespace llama {
namespace {

using namespace lowrankkv;  // the names of the library are what this file is about

/// Small pages leave little of the last one empty.
template <class Cache>
std::unique_ptr<KvStore> whole_rows(Recipe recipe) {
  recipe.config.page_bytes = recipe.context() <= 2048 ? 1024 : 4096;
  return recipe.store<Cache>({}, {});
}

template <int bits>
std::unique_ptr<KvStore> turbo_quant(Recipe recipe) {
  recipe.config.page_bytes = recipe.context() <= 2048 ? 1024 : 4096;
  return recipe.store<TurboQuant<>>({}, {.quantizer = {.bits = bits}});
}

/// A page of one group of rows.
template <int bits>
std::unique_ptr<KvStore> kivi(Recipe recipe) {
  const Kivi<>::PolicySet policies{.quantizer = {.bits = bits}};
  const int dim = recipe.config.shape.head_dim, tokens = policies.quantizer.tokens;
  for (const bool keys : {true, false})
    recipe.config.page_bytes +=
        channel_group_layout(policies.quantizer, keys, dim).block_bytes(tokens);
  return recipe.store<Kivi<>>({}, policies);
}

}  // namespace

std::vector<Method> baseline_methods() {
  const std::string turbo =
      "rows rotated at random, their norm, Lloyd's levels (TurboQuant for the mean squared "
      "error): ";
  const std::string of_kivi =
      "keys per channel over 32 tokens, values per token over 32 channels, least and step in f16; "
      "128 recent tokens at full rank: ";
  return {
      {{"Q8_0",
        "",
        "llama.cpp's q8_0: blocks of 32 channels in 8 bits, a scale each",
        {8.5 / 16.0}},
       whole_rows<Q8_0<>>},
      {{"Q4_0",
        "",
        "llama.cpp's q4_0: blocks of 32 channels in 4 bits, a scale each",
        {4.5 / 16.0}},
       whole_rows<Q4_0<>>},
      {{"Fp8", "", "8-bit floating point, E4M3, without scales, as in vLLM", {0.5}},
       whole_rows<Fp8<>>},
      {{"TurboQuant4", "", turbo + "4 bits", {4.0 / 16.0}}, turbo_quant<4>},
      {{"TurboQuant3", "", turbo + "3 bits", {3.0 / 16.0}}, turbo_quant<3>},
      {{"TurboQuant2", "", turbo + "2 bits", {2.0 / 16.0}}, turbo_quant<2>},
      {{"Kivi4", "", of_kivi + "4 bits", {5.0 / 16.0}}, kivi<4>},
      {{"Kivi2", "", of_kivi + "2 bits", {3.0 / 16.0}}, kivi<2>},
  };
}

}  // namespace llama
