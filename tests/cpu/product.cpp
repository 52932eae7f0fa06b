// SPDX-License-Identifier: Apache-2.0
// The f32 product by the processor's kernels against a plain one.
#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <vector>

#include "lowrankkv/cpu/product.hpp"

namespace product_tests {

using namespace lowrankkv;

TEST_CASE(
    "the product equals the plain product for all small shapes, and the order of its sums does not "
    "depend on m and n") {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (const int m : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 33}) {
    for (const int n : {1, 7, 16, 17, 40, 64, 80}) {
      for (const int k : {1, 3, 40, 77}) {
        const int ld = cpu::padded(n);
        std::vector<float> a(static_cast<std::size_t>(m * k)), b(static_cast<std::size_t>(k * ld)),
            c(static_cast<std::size_t>(m * ld), 1.0F), row(static_cast<std::size_t>(ld));
        for (float& x : a) x = normal(random);
        for (float& x : b) x = normal(random);
        std::vector<float> sum = c;
        cpu::product(m, ld, k, a.data(), k, b.data(), ld, c.data(), ld);
        cpu::add_product(m, ld, k, a.data(), k, b.data(), ld, sum.data(), ld);
        for (int i = 0; i < m; ++i) {
          cpu::product(1, ld, k, a.data() + i * k, k, b.data(), ld, row.data(), ld);
          for (int j = 0; j < n; ++j) {
            double expected = 0.0;
            for (int p = 0; p < k; ++p)
              expected += static_cast<double>(a[static_cast<std::size_t>(i * k + p)]) *
                          b[static_cast<std::size_t>(p * ld + j)];
            const float got = c[static_cast<std::size_t>(i * ld + j)];
            REQUIRE(std::abs(got - expected) < 1e-5 * (1.0 + std::sqrt(k)));
            REQUIRE(std::abs(sum[static_cast<std::size_t>(i * ld + j)] - expected - 1.0) <
                    2e-5 * (1.0 + std::sqrt(k)));
            REQUIRE(row[static_cast<std::size_t>(j)] == got);
          }
        }
      }
    }
  }
}

}  // namespace product_tests
