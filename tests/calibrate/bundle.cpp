// SPDX-License-Identifier: Apache-2.0
// A calibration bundle gives back what was saved.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
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

TEST_CASE("a bundle knows what its metrics measure, and earlier ones are read") {
  std::mt19937_64 random(6);
  const CacheShape shape{4, 2, 16};
  auto model = random_model(random, shape, 2, 120);
  const std::string path = "coding_metric_bundle.safetensors";
  const auto reread = [&](const io::SafetensorsWriter& writer) {
    writer.write(path);
    auto loaded = calibrate::load_moments(path, shape, 2);
    std::remove(path.c_str());
    return loaded;
  };
  const auto same = reread(calibrate::write_moments(model));
  CHECK(same[0].coding().metric() == calibrate::CodingMetric::output);
  CHECK(same[1].coding().head(1).key_sample.values() ==
        model[1].coding().head(1).key_sample.values());
  CHECK(same[1].coding().head(1).key_sample.size() > 0);
  auto writer = calibrate::write_moments(model);
  writer.set_metadata("version", "4");
  const auto earlier = reread(writer);
  CHECK(earlier[1].coding().head(1).key_sample.size() == 0);
  CHECK(earlier[1].coding().error_scale() == model[1].coding().error_scale());
  model[0].coding().set_metric(calibrate::CodingMetric::loss);
  CHECK_THROWS_WITH_AS(calibrate::write_moments(model),
                       "calibration bundle: the metric of the first layer is of the loss, of "
                       "another of the output",
                       ShapeError);
  for (const auto metric : {calibrate::CodingMetric::loss, calibrate::CodingMetric::combined}) {
    for (auto& layer : model) layer.coding().set_metric(metric);
    writer = calibrate::write_moments(model);
    CHECK(reread(writer)[1].coding().metric() == metric);
  }
  writer.set_metadata("coded_metric", "other");
  CHECK_THROWS_WITH_AS(reread(writer),
                       "calibration bundle: coded_metric other, expected output, loss or "
                       "combined",
                       FormatError);
  std::remove(path.c_str());
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
  std::vector<std::byte> bytes = calibrate::write_moments(layers).bytes();
  const double wrong = std::nan("");  // in place of the first frequency
  for (std::size_t at = 0; at + 16 <= bytes.size(); ++at) {
    if (std::memcmp(bytes.data() + at, loaded[1].rope().frequencies.data(), 16) != 0) continue;
    std::memcpy(bytes.data() + at, &wrong, sizeof wrong);
  }
  CHECK_THROWS_WITH_AS(
      calibrate::read_moments(io::Safetensors(bytes), shape, 2),
      "calibration bundle: rope.frequencies holds nan at element 0, finite expected", FormatError);
  std::remove(path);
}

TEST_CASE("numbers that no rows have are refused") {
  const CacheShape shape{2, 1, 8};
  std::mt19937_64 random(9);
  const auto refused = [&](auto&& change, const char* expected) {
    auto layers = random_model(random, shape, 1, 60);
    change(layers[0]);
    const io::Safetensors file(calibrate::write_moments(layers).bytes());
    try {
      calibrate::read_moments(file, shape, 1);
    } catch (const FormatError& error) {
      INFO(error.what());
      CHECK(std::string(error.what()).find(expected) != std::string::npos);
      return;
    }
    FAIL_CHECK("nothing was raised");
  };
  const double nan = std::nan("");
  refused([](auto& layer) { layer.head(0).key.first[3] = 1e300; }, "sums up to 1e+300");
  refused([](auto& layer) { layer.head(0).query.second(1, 1) = 1e300; }, "products up to 1e+300");
  refused([&](auto& layer) { layer.values().second(0, 0) = nan; }, "products up to inf");
  refused([&](auto& layer) { layer.values().count = nan; }, "are of nan rows");
  refused([](auto& layer) { layer.head(0).value.count = 1e17; }, "are of 1e+17 rows");
  refused([](auto& layer) { layer.coding().set_num_queries(HUGE_VAL); }, "coded_queries is inf");
  // Samples are sorted, and NaN has no place in an order.
  const std::vector<float> row{0, 1, 2, 3, 4, std::nanf(""), 6, 7};
  refused([&](auto& layer) { layer.head(0).key_sample = calibrate::RowSample(8, row); },
          "layers.0.key.sample holds nan at element 5");
  refused([&](auto& layer) { layer.coding().set_stream_squares(calibrate::RowSample(1, row)); },
          "layers.0.stream_squares holds nan at element 5");
}

TEST_CASE("a residual stream with NaN has no median") {
  calibrate::CodingStatistics coding(CacheShape{2, 1, 8});
  const std::vector<float> rows{1, 2, std::nanf(""), 4};
  coding.add_residual_stream({rows.data(), 2, 2});
  CHECK_THROWS_WITH_AS(coding.stream_square(),
                       "residual stream: a row's |h|^2 is nan, a number expected", ValueError);
}

}  // namespace bundle_tests
