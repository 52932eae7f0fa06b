// SPDX-License-Identifier: Apache-2.0
// SnapKV scores against attention written plainly, and the rows that they choose.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "lowrankkv/cpu/snapkv_scores.hpp"
#include "lowrankkv/cpu/top_rows.hpp"
#include "support/random_layer.hpp"

namespace snapkv_scores_tests {

using namespace lowrankkv;
using support::Random;

TEST_CASE(
    "SnapKV scores are the attention that the last queries pay, causal, summed over the group") {
  Random random(8);
  const int n = 50, window = 6, group = 3, dim = 8;
  const auto keys = support::random_rows(random, n, 1, dim),
             queries = support::random_rows(random, window * group, 1, dim);
  const auto scores = cpu::snapkv_scores({queries.data(), window * group, dim}, group,
                                         {keys.data(), n, dim}, 0.35F);
  std::vector<double> expected(n, 0.0);
  for (int row = 0; row < window * group; ++row) {
    const int visible = n - window + row / group + 1;
    Eigen::VectorXd logits(visible);
    for (int t = 0; t < visible; ++t)
      logits[t] =
          0.35 * support::row_of(keys, t, 1, 0, dim).dot(support::row_of(queries, row, 1, 0, dim));
    const Eigen::VectorXd weights = (logits.array() - logits.maxCoeff()).exp();
    for (int t = 0; t < visible; ++t)
      expected[static_cast<std::size_t>(t)] += weights[t] / weights.sum();
  }
  for (int t = 0; t < n; ++t)
    CHECK(scores[static_cast<std::size_t>(t)] ==
          doctest::Approx(expected[static_cast<std::size_t>(t)]).epsilon(1e-4));
  CHECK(cpu::top_rows(std::vector<float>{1.0F, 5.0F, 5.0F, 0.5F}, 2) ==
        std::vector<std::int64_t>{1, 2});
  CHECK(cpu::top_rows(std::vector<float>{1.0F, 5.0F, 5.0F, 0.5F}, 99).size() == 4);
  CHECK_THROWS_WITH_AS(
      cpu::snapkv_scores({queries.data(), 18, dim}, 3, {keys.data(), 4, dim}, 1.0F),
      "snapkv_scores: 6 queries, 4 keys", ShapeError);
}

}  // namespace snapkv_scores_tests
