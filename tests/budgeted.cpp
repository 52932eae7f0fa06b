// SPDX-License-Identifier: Apache-2.0
// Budgeted: what it costs, to the byte, and how it spreads bits over layers.
#include <doctest/doctest.h>

#include <Eigen/Dense>
#include <algorithm>
#include <cstddef>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "lowrankkv/budgeted.hpp"
#include "lowrankkv/layer_stack.hpp"
#include "support/random_model.hpp"

using namespace lowrankkv;
using support::activations;
using support::random_model;

TEST_CASE(
    "Budgeted costs what was asked for, to the byte that pages allow, and keeps what it says") {
  std::mt19937_64 random(3);
  const CacheShape shape{4, 2, 64};
  const auto model = random_model(random, shape, 3, 400);
  for (const double ratio : {0.3, 0.15, 0.1}) {
    for (const double outliers : {0.0, 0.02}) {
      calibrate::BudgetOptions options;
      options.ratio = ratio;
      options.context = 2000;
      options.outlier_share = outliers;
      if (outliers > 0.0) options.early_outliers = 0;
      options.page_bytes = 2048;
      const calibrate::BudgetedModel budgeted = calibrate::budgeted(model, options);
      CacheConfig config;
      config.shape = shape;
      config.max_tokens = 2100;
      LayerStack<Budgeted<>> stack(budgeted.configs(config), budgeted.bases, budgeted.policies);
      stack.create(0);
      const int n = 2000;
      const auto k = activations(random, n * 2 * 64, 0.06, 64),
                 v = activations(random, n * 2 * 64, 0.09, 64);
      for (int layer = 0; layer < 3; ++layer)
        stack.layer(layer).ingest(0, {k.data(), n, 2, 64}, {v.data(), n, 2, 64});
      const double measured =
          static_cast<double>(stack.memory(0).total()) / (2.0 * 3 * 2 * 64 * 2 * n);
      CHECK(measured <= ratio * 1.0001);
      CHECK(measured > ratio * (outliers > 0.0 ? 0.9 : 0.97));
      // What is stored resembles the rows, the more so the larger the budget.
      std::vector<float> decoded_k(k.size()), decoded_v(v.size());
      stack.layer(0).reconstruct(0, 0, {decoded_k.data(), n, 2, 64}, {decoded_v.data(), n, 2, 64});
      const Eigen::Map<const Eigen::VectorXf> exact(k.data(), n * 128),
          close(decoded_k.data(), n * 128);
      CHECK((exact - close).norm() < (ratio > 0.2 ? 0.35 : 0.8) * exact.norm());
    }
  }
  calibrate::BudgetOptions device;  // bytes as the Cuda backend has them
  device.ratio = 0.2;
  device.context = 2000;
  const calibrate::BudgetedModel on_device = calibrate::budgeted(model, device.for_cuda());
  CacheConfig config{.shape = shape, .page_bytes = 512};
  config = on_device.configs(config)[0];
  CHECK(config.page_bytes == on_device.options.page_bytes);
  // Room for a tile of 32 rows in 8 bits, and for one of 64 rows of codes.
  CHECK(config.page_bytes >= 4224);
  CHECK(config.page_bytes % 256 == 0);
  CHECK(on_device.bytes_at(2000) <= 0.2 * 2000 * 3 * 2 * 256);
  CHECK(on_device.bytes_at(2000) > 0.95 * 0.2 * 2000 * 3 * 2 * 256);
  CHECK(config.full_row_bits == 8);
  for (const LayerBasis& layer : on_device.bases) {
    for (const HeadBasis& head : layer.heads) {
      for (const std::vector<std::uint8_t>* bits : {&head.key_bits, &head.value_bits}) {
        for (std::size_t channel = 0; channel < bits->size(); ++channel) {
          const int width = (*bits)[channel];
          CHECK((width > 0 || bits->size() == 1));
          CHECK((channel == 0 || width <= (*bits)[channel - 1]));
        }
      }
    }
  }
  calibrate::BudgetOptions tiny;
  tiny.ratio = 0.001;
  CHECK_THROWS_AS(calibrate::budgeted(model, tiny), ValueError);
  CHECK_THROWS_AS(calibrate::budgeted(std::span<const calibrate::LayerMoments>(), {}), ShapeError);
  std::vector<calibrate::LayerMoments> without = model;
  without[1].coding() = calibrate::CodingStatistics(shape);
  CHECK_THROWS_WITH_AS(calibrate::budgeted(without, {}),
                       "budgeted: layer 1 has coding statistics of 0 queries, at least 1 needed "
                       "(CodingStatistics::add)",
                       ValueError);
  std::vector<calibrate::LayerMoments> two_kinds = model;
  two_kinds[2].coding().set_metric(calibrate::CodingMetric::loss);
  CHECK_THROWS_WITH_AS(calibrate::budgeted(two_kinds, {}),
                       "budgeted: layer 0 has a metric of the output, layer 2 of the loss, the "
                       "same expected (CodingStatistics::metric)",
                       ValueError);
}

TEST_CASE("a budget keeps within the units of codes that a kernel set has") {
  std::mt19937_64 random(19);
  const auto model = random_model(random, {4, 2, 64}, 2, 300);
  calibrate::BudgetOptions device;
  device.ratio = 0.3;
  device.context = 2000;
  for (const int most : {1, 3}) {
    device.max_code_units = most;
    for (const LayerBasis& layer : calibrate::budgeted(model, device.for_cuda()).bases) {
      for (const HeadBasis& head : layer.heads) {
        CHECK(code_units(head.key_bits).count() <= most);
        CHECK(code_units(head.value_bits).count() <= most);
      }
    }
  }
}

TEST_CASE("a budget chooses the page size that leaves most bytes for codes") {
  std::mt19937_64 random(11);
  const CacheShape shape{4, 2, 64};
  const auto model = random_model(random, shape, 2, 300);
  const auto bits_of = [](const calibrate::BudgetedModel& budgeted) {
    std::int64_t sum = 0;
    for (const LayerBasis& layer : budgeted.bases) {
      for (const HeadBasis& head : layer.heads) {
        for (const std::uint8_t width : head.key_bits) sum += width;
        for (const std::uint8_t width : head.value_bits) sum += width;
      }
    }
    return sum;
  };
  for (const double ratio : {0.08, 0.2}) {
    calibrate::BudgetOptions options;
    options.ratio = ratio;
    options.context = 3000;
    const calibrate::BudgetedModel chosen = calibrate::budgeted(model, options);
    CHECK(chosen.options.page_bytes % 256 == 0);
    CHECK(chosen.ratio_at(3000) <= ratio);
    CacheConfig config{.shape = shape, .max_tokens = 3000};
    config = chosen.configs(config)[1];
    CHECK(config.page_bytes == chosen.options.page_bytes);
    for (const std::size_t size : std::initializer_list<std::size_t>{512, 1024, 4096, 8192}) {
      options.page_bytes = size;
      const calibrate::BudgetedModel fixed = calibrate::budgeted(model, options);
      CHECK(fixed.options.page_bytes == size);
      CHECK(bits_of(chosen) >= bits_of(fixed));
    }
  }
  // A row at full rank in f32 takes 2048 bytes of a page.
  calibrate::BudgetOptions wide;
  wide.ratio = 0.6;
  wide.context = 3000;
  wide.full_type = DType::f32;
  wide.full_row_bits = 0;
  CHECK(calibrate::budgeted(model, wide).options.page_bytes >= 512);
  calibrate::BudgetOptions two;
  two.outlier_share = 0.25;
  CHECK_THROWS_WITH_AS(calibrate::budgeted(model, two),
                       "budget: outlier_share 0.25 beside early_outliers 8; one of them must be 0",
                       ValueError);
  two.early_outliers = 129;
  CHECK_THROWS_WITH_AS(calibrate::budgeted(model, two),
                       "budget: early_outliers is in [0, 128], given 129", ValueError);
  // The Cuda backend's tiles have sizes of their own.
  calibrate::BudgetOptions device;
  device.context = 3000;
  CHECK(calibrate::budgeted(model, device.for_cuda()).options.page_bytes >= 4224);
  device.page_bytes = 4096;
  CHECK_THROWS_WITH_AS(calibrate::budgeted(model, device),
                       "budget: page_bytes: a tile of full rows needs 4224, a page has 4096",
                       CapacityError);
}

TEST_CASE("rows at full rank have 16 bits in layers where 8 would lose them") {
  std::mt19937_64 random(17);
  const CacheShape shape{4, 2, 64};
  for (const float constant : {0.0F, 10.0F, 200.0F}) {  // of one channel of keys
    CAPTURE(constant);
    calibrate::BudgetOptions options;
    options.ratio = 0.3;
    options.context = 2000;
    CHECK(options.full_row_bits == calibrate::BudgetOptions::kChooseBits);
    auto model = random_model(random, shape, 2, 400, constant);
    model.push_back(random_model(random, shape, 1, 400)[0]);  // a layer without the constant
    const calibrate::BudgetedModel chosen = calibrate::budgeted(model, options);
    const int bits = constant < 100.0F ? 8 : 0;
    CHECK(chosen.full_row_bits == std::vector{bits, bits, 8});
    CHECK(chosen.ratio_at(2000) <= 0.3);
    CacheConfig config{.shape = shape};
    const std::vector<CacheConfig> configs = chosen.configs(config);
    for (std::size_t layer = 0; layer < 3; ++layer)
      CHECK(configs[layer].full_row_bits == chosen.full_row_bits[layer]);
    // 24 rows are much of the budget then: enough for one of the layers, or for none.
    options.context = 300;
    const std::vector<int> few = calibrate::budgeted(model, options).full_row_bits;
    CHECK(few[2] == 8);
    CHECK((few[0] == 8) + (few[1] == 8) >= (bits == 8 ? 2 : 1));
    options.context = 2000;
    // What one row of each loses, beside what rows vary.
    double lost[2] = {}, variance = 0.0;
    for (const int own : {8, 0}) {
      options.full_row_bits = own;
      const calibrate::BudgetedModel budgeted = calibrate::budgeted(model, options);
      CacheConfig of_rows{.shape = shape, .max_tokens = 2100};
      Budgeted<> cache(budgeted.configs(of_rows)[0], budgeted.bases[0], budgeted.policies);
      auto k = activations(random, 40 * 2 * 64, 0.06, 64),
           v = activations(random, 40 * 2 * 64, 0.09, 64);
      for (std::size_t i = 0; i < k.size(); i += 64) k[i] += constant;
      cache.create(0);
      cache.ingest(0, {k.data(), 40, 2, 64}, {v.data(), 40, 2, 64});
      std::vector<float> stored(k.size()), values(v.size());
      cache.reconstruct(0, 0, {stored.data(), 40, 2, 64}, {values.data(), 40, 2, 64});
      for (std::size_t i = 0; i < 16 * 2 * 64; ++i) {  // sinks
        if (i % 64 == 0) continue;
        const double error = static_cast<double>(stored[i]) - static_cast<double>(k[i]);
        lost[own / 8] += error * error;
        variance += 0.5 * static_cast<double>(k[i]) * static_cast<double>(k[i]);
      }
    }
    CHECK(lost[0] < 1e-6 * variance);
    CHECK((lost[1] > 0.005 * variance) == (bits == 0));
  }
}

TEST_CASE("a budget says what a sequence takes at every length, and with tokens that wait") {
  std::mt19937_64 random(7);
  const CacheShape shape{4, 2, 64};
  const auto model = random_model(random, shape, 2, 300);
  calibrate::BudgetOptions options;
  options.ratio = 0.15;
  options.context = 2000;
  options.page_bytes = 1024;
  options.recent = 32;
  const calibrate::BudgetedModel budgeted = calibrate::budgeted(model, options);
  CHECK(budgeted.ratio_at(2000) <= 0.15);
  CHECK(budgeted.ratio_at(2000) > 0.145);
  CHECK(budgeted.ratio_at(500) > 1.3 * 0.15);  // 36 rows at full rank in 500
  CHECK(budgeted.ratio_at(0) == 0.0);
  CacheConfig config;
  config.shape = shape;
  config.max_tokens = 2100;
  LayerStack<Budgeted<>> stack(budgeted.configs(config), budgeted.bases, budgeted.policies);
  const auto k = activations(random, 2000 * 2 * 64, 0.06, 64),
             v = activations(random, 2000 * 2 * 64, 0.09, 64);
  // Runs of neighbouring early rows are one: of 8 rows in 4 heads there are 64 at most.
  const auto check = [&](std::int64_t tokens, std::int64_t waiting) {
    const auto stored = static_cast<std::int64_t>(stack.memory(0).total()),
               said = budgeted.bytes_at(tokens, waiting);
    CHECK(stored <= said);
    CHECK(stored >= said - 64 * 8);
  };
  for (const std::int64_t n : {1, 30, 36, 37, 70, 128, 160, 500, 2000}) {
    CAPTURE(n);
    stack.create(0);
    for (int layer = 0; layer < 2; ++layer)
      stack.layer(layer).ingest(0, {k.data(), n, 2, 64}, {v.data(), n, 2, 64});
    check(n, 0);
    stack.erase(0);
  }
  // Decoded tokens wait at full rank until a flush takes 32 of them.
  stack.create(0);
  for (int layer = 0; layer < 2; ++layer)
    stack.layer(layer).ingest(0, {k.data(), 400, 2, 64}, {v.data(), 400, 2, 64});
  for (std::int64_t decoded = 1; decoded <= 70; ++decoded) {
    CAPTURE(decoded);
    const std::int64_t at = (400 + decoded) * 2 * 64;
    for (int layer = 0; layer < 2; ++layer)
      stack.layer(layer).append(0, {k.data() + at, 1, 2, 64}, {v.data() + at, 1, 2, 64});
    stack.maintain(0);
    const std::int64_t waiting = (decoded - 1) % config.flush_interval + 1;
    check(400 + decoded, waiting);
  }
  CHECK(budgeted.ratio_at(470, 32) > budgeted.ratio_at(470));
}

TEST_CASE("an error counts as its share of the residual stream it is added to") {
  std::mt19937_64 random(11);
  const CacheShape shape{2, 1, 16};
  const auto model = random_model(random, shape, 2, 300);
  calibrate::BudgetOptions options;
  options.ratio = 0.2;
  options.context = 2000;
  options.page_bytes = 1024;
  // The second layer in other units: its output projection, and with it the stream behind it,
  // twenty times as large.
  auto scaled = model;
  calibrate::CodingStatistics& coding = scaled[1].coding();
  coding.set_stream_squares(calibrate::RowSample(1, 4096));
  CHECK_THROWS_WITH_AS(calibrate::budgeted(scaled, options),
                       "budgeted: 1 of 2 layers know their residual stream, all or none expected "
                       "(CodingStatistics::add_residual_stream)",
                       ValueError);
  CHECK_THROWS_AS(coding.stream_square(), ValueError);
  std::vector<float> squares = model[1].coding().stream_squares().values();
  for (float& square : squares) square *= 400.0F;
  coding.set_stream_squares(calibrate::RowSample(1, squares));
  coding.head(0).key_metric *= 400.0;
  coding.head(0).value_metric *= 400.0;
  const auto same = calibrate::budgeted(model, options),
             other = calibrate::budgeted(scaled, options);
  for (std::size_t layer = 0; layer < 2; ++layer) {
    CHECK(other.bases[layer].heads[0].key_bits == same.bases[layer].heads[0].key_bits);
    CHECK(other.bases[layer].heads[0].value_bits == same.bases[layer].heads[0].value_bits);
  }
  // Without the stream the same factor moves the bits.
  auto absolute = scaled;
  for (auto& layer : absolute) layer.coding().set_stream_squares(calibrate::RowSample(1, 4096));
  const auto moved = calibrate::budgeted(absolute, options);
  const auto bits = [](const calibrate::BudgetedModel& of, std::size_t layer) {
    int sum = 0;
    for (const std::uint8_t width : of.bases[layer].heads[0].key_bits) sum += width;
    for (const std::uint8_t width : of.bases[layer].heads[0].value_bits) sum += width;
    return sum;
  };
  CHECK(bits(moved, 1) > bits(same, 1));
  CHECK(bits(moved, 0) < bits(same, 0));
  // The median: a token that is thousands of times larger than the others does not count.
  calibrate::CodingStatistics stream(shape);
  std::vector<float> rows(9 * 4, 1.0F);
  std::fill_n(rows.begin(), 4, 1000.0F);
  stream.add_residual_stream({rows.data(), 9, 4});
  CHECK(stream.stream_square() == doctest::Approx(4.0));
}

TEST_CASE("codes are fitted to the channels' distributions, and more bytes bring smaller errors") {
  std::mt19937_64 random(8);
  const CacheShape shape{2, 1, 32};
  constexpr int n = 1200;
  // Rows of different sizes; every second channel has a Laplace distribution, the others two
  // values.
  const auto heavy_rows = [&](int heads) {
    std::exponential_distribution<double> exponential;
    std::vector<float> rows;
    for (int row = 0; row < n * heads; ++row) {
      const double size = std::exp(std::normal_distribution<double>(0.0, 0.3)(random));
      for (int channel = 0; channel < 32; ++channel) {
        const double sign = random() % 2 == 0 ? 1.0 : -1.0;
        const double magnitude = channel % 2 == 0 ? exponential(random) : 1.4;
        rows.push_back(static_cast<float>(sign * size * magnitude * std::exp(-0.08 * channel)));
      }
    }
    return rows;
  };
  const auto q = heavy_rows(2), k = heavy_rows(1), v = heavy_rows(1);
  std::vector<calibrate::LayerMoments> fitted(1, calibrate::LayerMoments(shape));
  fitted[0].coding().add({q.data(), n, 2, 32}, {k.data(), n, 1, 32}, {v.data(), n, 1, 32}, 900);
  auto gaussian = fitted;
  gaussian[0].coding().head(0).key_sample = {};
  gaussian[0].coding().head(0).value_sample = {};
  const auto fresh_k = heavy_rows(1), fresh_v = heavy_rows(1);
  // Mean squared error of fresh rows, in the metrics that the bits are distributed by.
  const auto error_of = [&](const std::vector<calibrate::LayerMoments>& model, double ratio) {
    calibrate::BudgetOptions options;
    options.ratio = ratio;
    options.context = n;
    options.page_bytes = 1024;
    const calibrate::BudgetedModel budgeted = calibrate::budgeted(model, options);
    CacheConfig config;
    config.shape = shape;
    config.max_tokens = n + 100;
    LayerStack<Budgeted<>> stack(budgeted.configs(config), budgeted.bases, budgeted.policies);
    stack.create(0);
    stack.layer(0).ingest(0, {fresh_k.data(), n, 1, 32}, {fresh_v.data(), n, 1, 32});
    std::vector<float> decoded_k(fresh_k.size()), decoded_v(fresh_v.size());
    stack.layer(0).reconstruct(0, 0, {decoded_k.data(), n, 1, 32}, {decoded_v.data(), n, 1, 32});
    using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    const auto in_metric = [&](const std::vector<float>& exact, const std::vector<float>& decoded,
                               const Eigen::MatrixXd& metric) {
      const Eigen::MatrixXd difference = (Eigen::Map<const Rows>(exact.data(), n, 32) -
                                          Eigen::Map<const Rows>(decoded.data(), n, 32))
                                             .cast<double>();
      return (difference * metric).cwiseProduct(difference).sum();
    };
    const calibrate::CodingHead& head = model[0].coding().head(0);
    return in_metric(fresh_k, decoded_k, head.key_metric) +
           in_metric(fresh_v, decoded_v, head.value_metric);
  };
  double last = std::numeric_limits<double>::infinity();
  for (const double ratio : {0.1, 0.13, 0.16, 0.2, 0.25, 0.3}) {
    CAPTURE(ratio);
    const double own = error_of(fitted, ratio);
    CHECK(own < 0.985 * error_of(gaussian, ratio));
    CHECK(own < last);
    last = own;
  }
}
