// SPDX-License-Identifier: Apache-2.0
// Tokens that leave the middle of a sequence.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "cuda/support/compositions.cuh"

namespace remove_tokens_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too
using support::Random;

TEST_CASE("tokens leave the middle of a long sequence: rows behind them move up in several steps") {
  const int heads = 8, dim = 256;
  const std::int64_t tokens = 9000;  // 73 MB: more than kShiftBytes
  CacheConfig config;
  config.shape = {heads, heads, dim};
  config.max_tokens = tokens + 64;
  FullKV<Cuda> cache(config);
  cache.create(1);
  Random random(91);
  std::vector<__half> keys, values;
  for (std::int64_t i = 0; i < tokens * heads * dim; ++i) {
    keys.push_back(__float2half(static_cast<float>(random() % 2048) / 64.0F));
    values.push_back(__float2half(static_cast<float>(random() % 2048) / 64.0F));
  }
  const gpu::DeviceArray<__half> key(keys), value(values);
  cache.ingest(1, KeyView(key.data(), DType::f16, tokens, heads, dim, heads * dim, dim),
               ValueView(value.data(), DType::f16, tokens, heads, dim, heads * dim, dim));
  REQUIRE(static_cast<std::size_t>(tokens * heads * dim) * 4 > 2 * gpu::kShiftBytes);
  for (const auto& [first, count] : {std::pair<std::int64_t, std::int64_t>{256, 512},
                                     {101, 333},
                                     {7000, 1}}) {  // whole tiles, and others
    cache.remove(1, first, count);
    for (std::vector<__half>* rows : {&keys, &values})
      rows->erase(rows->begin() + first * heads * dim,
                  rows->begin() + (first + count) * heads * dim);
    const std::int64_t left = cache.num_tokens(1);
    REQUIRE(left * heads * dim == static_cast<std::int64_t>(keys.size()));
    const gpu::DeviceArray<__half> key_out(keys.size()), value_out(keys.size());
    for (const auto* out : {&key_out, &value_out})
      gpu::check(cudaMemset(out->data(), 0xff, out->bytes()), "cudaMemset");
    cache.reconstruct(
        1, 0, KeyTargetView(key_out.data(), DType::f16, left, heads, dim, heads * dim, dim),
        ValueTargetView(value_out.data(), DType::f16, left, heads, dim, heads * dim, dim));
    std::vector<__half> found(keys.size());
    for (const auto& [expected, stored] : {std::pair{&keys, &key_out}, {&values, &value_out}}) {
      gpu::check(cudaMemcpy(found.data(), stored->data(), found.size() * sizeof(__half),
                            cudaMemcpyDeviceToHost),
                 "cudaMemcpy");
      CHECK(std::memcmp(found.data(), expected->data(), found.size() * sizeof(__half)) == 0);
    }
  }
}

}  // namespace remove_tokens_tests
