// SPDX-License-Identifier: Apache-2.0
// Configurations that the backend refuses, before any device is touched.
#include <doctest/doctest.h>

#include <string>

#include "lowrankkv/cuda/presets.cuh"

namespace layer_rules_tests {

using namespace lowrankkv;

TEST_CASE("what this backend cannot do is refused with both values, before any device is touched") {
  const auto message = [](CacheConfig config, auto policies) {
    using Cache = CompressedKVCache<Cuda, decltype(policies.basis), decltype(policies.updater),
                                    decltype(policies.token_policy), decltype(policies.quantizer)>;
    if (config.shape.head_dim == 0) config.shape = {4, 2, 64};
    try {
      Cache::num_pages(config, {}, policies);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("nothing was raised");
  };
  const FullKV<Cuda>::PolicySet full;
  CHECK(message({}, full) == "nothing was raised");
  CHECK(message({.shape = {4, 2, 40}}, full) ==
        "head_dim: 40, a multiple of 16 up to 256 expected on this backend");
  CHECK(message({.shape = {4, 2, 272}}, full) ==
        "head_dim: 272, a multiple of 16 up to 256 expected on this backend");
  CHECK(message({.full_type = DType::f32}, full) ==
        "full_type: f32, f16 or bf16 expected on this backend");
  CHECK(message({.full_row_bits = 8}, full) == "nothing was raised");
  CHECK(message({.full_row_bits = 4}, full) == "full_row_bits: 0 or 8, given 4");
  CHECK(message({.keep_residuals = true}, full) == "nothing was raised");
  CHECK(message({.rope = {.keys = Rope::pre, .rotary_dim = 24}}, full) ==
        "rope: rotary_dim 24, a multiple of 16 expected on this backend");
  CHECK(message({.max_query_tokens = 0}, full) == "max_query_tokens: at least 1, given 0");
  CHECK(message({.page_bytes = 1024}, full) == "page_bytes: a tile needs 8192, a page has 1024");
  CHECK(message({.tail_capacity = 64}, full) ==
        "tail_capacity: 64, must exceed recent + flush_interval = 64");
  StaticPCA<Cuda>::PolicySet plain;
  plain.quantizer.type = DType::f32;
  CHECK(message({}, plain) == "NoQuantizer: type f32, f16 or bf16 expected on this backend");
}

}  // namespace layer_rules_tests
