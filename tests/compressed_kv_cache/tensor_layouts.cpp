// SPDX-License-Identifier: Apache-2.0
// Tensors of an engine: any type, any strides.
#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

#include "lowrankkv/presets.hpp"
#include "support/grouped_cache.hpp"
#include "support/random_layer.hpp"

namespace tensor_layouts_tests {

using namespace lowrankkv;
using namespace support::grouped;

TEST_CASE("tensors of any type and layout are taken as they are") {
  support::Random random(4);
  const int n = 90;
  const auto q = support::random_rows(random, n, 8, 64);
  auto k = support::random_rows(random, n, 2, 64), v = support::random_rows(random, n, 2, 64);
  for (float& x : k) x = round_to(DType::bf16, x);
  for (float& x : v) x = round_to(DType::f16, x);
  StaticPCAHybrid<> plain({.shape = kShape}, basis()), foreign({.shape = kShape}, basis());
  std::vector<float> out(q.size()), transposed(q.size());
  plain.create(0);
  foreign.create(0);
  plain.prefill(0, {q.data(), n, 8, 64}, {k.data(), n, 2, 64}, {v.data(), n, 2, 64},
                {out.data(), n, 8, 64});
  // Keys as bf16 head-major, values as f16 with channels outermost, outputs head-major.
  std::vector<BFloat16> keys(k.size());
  std::vector<Half> values(v.size());
  for (int t = 0; t < n; ++t) {
    for (int h = 0; h < 2; ++h) {
      for (int i = 0; i < 64; ++i) {
        const std::size_t from = static_cast<std::size_t>((t * 2 + h) * 64 + i);
        keys[static_cast<std::size_t>((h * n + t) * 64 + i)] = to_bfloat16(k[from]);
        values[static_cast<std::size_t>((i * 2 + h) * n + t)] = to_half(v[from]);
      }
    }
  }
  foreign.prefill(0, {q.data(), n, 8, 64}, {keys.data(), DType::bf16, n, 2, 64, 64, n * 64},
                  {values.data(), DType::f16, n, 2, 64, 1, n, 2 * n},
                  {transposed.data(), n, 8, 64, 64, n * 64});
  for (int t = 0; t < n; ++t) {
    for (int h = 0; h < 8; ++h) {
      for (int i = 0; i < 64; ++i)
        CHECK(out[static_cast<std::size_t>((t * 8 + h) * 64 + i)] ==
              transposed[static_cast<std::size_t>((h * n + t) * 64 + i)]);
    }
  }
}

}  // namespace tensor_layouts_tests
