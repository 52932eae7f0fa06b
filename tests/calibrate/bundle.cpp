// SPDX-License-Identifier: Apache-2.0
// A calibration bundle gives back what was saved.
#include <doctest/doctest.h>

#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "lowrankkv/calibrate/bundle.hpp"
#include "support/random_model.hpp"
#include "support/rope.hpp"

namespace bundle_tests {

using namespace lowrankkv;
using support::gaussian_rows;
using support::pre_rope;
using support::random_model;

TEST_CASE("a bundle gives back everything that calibration knows") {
  std::mt19937_64 random(5);
  const CacheShape shape{4, 2, 16};
  const auto model = random_model(random, shape, 2, 120);
  const std::string path = "coding_bundle.safetensors";
  calibrate::save_moments(path, model);
  const auto loaded = calibrate::load_moments(path, shape, 2);
  std::remove(path.c_str());
  for (std::size_t layer = 0; layer < 2; ++layer) {
    CHECK(loaded[layer].values().second == model[layer].values().second);
    CHECK(loaded[layer].coding().num_queries() == model[layer].coding().num_queries());
    CHECK(loaded[layer].coding().stream_squares().values() ==
          model[layer].coding().stream_squares().values());
    CHECK(loaded[layer].coding().error_scale() == model[layer].coding().error_scale());
    for (int head = 0; head < 2; ++head) {
      CHECK(loaded[layer].head(head).key.second == model[layer].head(head).key.second);
      CHECK(loaded[layer].head(head).value_sample.values() ==
            model[layer].head(head).value_sample.values());
      CHECK(loaded[layer].coding().head(head).key.second ==
            model[layer].coding().head(head).key.second);
      CHECK((loaded[layer].coding().head(head).key_metric -
             model[layer].coding().head(head).key_metric)
                .norm() <= 1e-12 * model[layer].coding().head(head).key_metric.norm());
      CHECK((loaded[layer].coding().head(head).value_metric -
             model[layer].coding().head(head).value_metric)
                .norm() <= 1e-12 * model[layer].coding().head(head).value_metric.norm());
    }
  }
}

TEST_CASE("a calibration bundle knows the form of its keys") {
  const CacheShape shape{2, 1, 8};
  std::mt19937_64 random(9);
  const auto q = gaussian_rows(random, 50 * 2 * 8), k = gaussian_rows(random, 50 * 8),
             v = gaussian_rows(random, 50 * 8);
  std::vector<calibrate::LayerMoments> layers(
      2, calibrate::LayerMoments(shape, pre_rope(RopePairing::interleaved, 50.0)));
  for (auto& layer : layers)
    layer.add({q.data(), 50, 2, 8}, {k.data(), 50, 1, 8}, {v.data(), 50, 1, 8});
  const char* path = "unrotated_test.safetensors";
  calibrate::save_moments(path, layers);
  const auto loaded = calibrate::load_moments(path, shape, 2);
  CHECK(loaded[1].rope().keys == Rope::pre);
  CHECK(loaded[1].rope().pairing == RopePairing::interleaved);
  CHECK(loaded[1].rope().frequencies == rope_frequencies(layers[0].rope(), 8));
  CHECK(loaded[1].head(0).key.second == layers[1].head(0).key.second);
  std::remove(path);
}

}  // namespace bundle_tests
