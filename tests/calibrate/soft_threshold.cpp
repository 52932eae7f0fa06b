// SPDX-License-Identifier: Apache-2.0
// The soft threshold of singular values.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "lowrankkv/calibrate/soft_threshold.hpp"
#include "support/matrices.hpp"

namespace soft_threshold_tests {

using namespace lowrankkv;
using Eigen::MatrixXd;
using Eigen::VectorXd;
using support::Random;
using support::uniform;

TEST_CASE("the soft threshold approaches the hard one, and a threshold exists for every rank") {
  using calibrate::rank_by_threshold, calibrate::soft_threshold, calibrate::threshold_for_rank;
  CHECK(soft_threshold(3.0, 1.0, 0.5) == doctest::Approx(3.0 * std::tanh(1.0)));
  CHECK(soft_threshold(0.999, 1.0, 5.0) == 0.0);
  CHECK(soft_threshold(1.0, 1.0, 5.0) == 0.0);
  Random random(35);
  for (int round = 0; round < 50; ++round) {
    const int size = uniform(random, 1, 40);
    VectorXd values = support::gaussian(random, size, 1).cwiseAbs();
    std::sort(values.data(), values.data() + size, std::greater<>());
    for (int rank = 0; rank <= size; ++rank) {
      const double alpha = threshold_for_rank(values, rank);
      CHECK(rank_by_threshold(values, alpha) == rank);
      const VectorXd soft = soft_threshold(values, alpha, 4.0),
                     sharp = soft_threshold(values, alpha, 1e12);
      for (int i = 0; i < size; ++i) {
        CHECK(soft[i] <= values[i]);
        CHECK(soft[i] <= sharp[i]);
        CHECK(sharp[i] == doctest::Approx(i < rank ? values[i] : 0.0).epsilon(1e-9));
        if (i > 0) CHECK(soft[i] <= soft[i - 1]);
      }
    }
  }
  const VectorXd neighbours = (VectorXd(3) << std::nextafter(1.0, 2.0), 1.0, 0.0).finished();
  for (int rank = 0; rank <= 3; ++rank)
    CHECK(rank_by_threshold(neighbours, threshold_for_rank(neighbours, rank)) == rank);
  CHECK(threshold_for_rank({}, 0) == 0.0);
  const std::vector<double> alphas{0.0, 1.0, -0.5};
  CHECK(calibrate::compression_loss(alphas) ==
        doctest::Approx(1.0 + std::exp(-1.0) + std::exp(0.5)));
  CHECK(calibrate::compression_loss({}) == 0.0);
  const VectorXd tied = (VectorXd(3) << 2.0, 1.0, 1.0).finished(),
                 rising = (VectorXd(2) << 1.0, 2.0).finished();
  CHECK_THROWS_WITH_AS(threshold_for_rank(tied, 2),
                       "threshold: no alpha gives rank 2: the singular values on both sides are 1",
                       ValueError);
  CHECK_THROWS_WITH_AS(threshold_for_rank(tied, 4), "threshold: rank in [0, 3], given 4",
                       ValueError);
  CHECK_THROWS_WITH_AS(threshold_for_rank(rising, 1),
                       "threshold: singular value 1 is 2, expected in [0, 1], descending",
                       ValueError);
  CHECK_THROWS_WITH_AS(soft_threshold(1.0, 0.5, 0.0), "soft threshold: sharpness above 0, given 0",
                       ValueError);
  CHECK_THROWS_AS(soft_threshold(1.0, std::nan(""), 1.0), ValueError);
  CHECK_THROWS_AS(rank_by_threshold(tied, std::nan("")), ValueError);
}

}  // namespace soft_threshold_tests
