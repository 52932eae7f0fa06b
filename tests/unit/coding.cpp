// SPDX-License-Identifier: Apache-2.0
// Transform coding's calibration: the metric predicts what errors do, bits are spread optimally,
// budgets are met to the byte.
#include <doctest/doctest.h>

#include <Eigen/Dense>
#include <algorithm>
#include <cstdio>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "lowrankkv/calibrate/allocate_bits.hpp"
#include "lowrankkv/budgeted.hpp"
#include "lowrankkv/calibrate/bundle.hpp"
#include "lowrankkv/calibrate/residual_thresholds.hpp"
#include "lowrankkv/layer_stack.hpp"

using namespace lowrankkv;
using Eigen::MatrixXd;
using Eigen::VectorXd;

namespace {

std::vector<float> random_rows(std::mt19937_64& random, int count, double decay = 0.0,
                               int dim = 1) {
  std::normal_distribution<double> normal;
  std::vector<float> rows(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < rows.size(); ++i)
    rows[i] = static_cast<float>(normal(random) *
                                 std::exp(-decay * static_cast<double>(static_cast<int>(i) % dim)));
  return rows;
}

/// A calibrated model of random activations.
std::vector<calibrate::LayerMoments> random_model(std::mt19937_64& random, const CacheShape& shape,
                                                  int layers, int tokens) {
  std::vector<calibrate::LayerMoments> model(static_cast<std::size_t>(layers),
                                             calibrate::LayerMoments(shape));
  for (auto& layer : model) {
    const auto q =
        random_rows(random, tokens * shape.num_qo_heads * shape.head_dim, 0.03, shape.head_dim);
    const auto k =
        random_rows(random, tokens * shape.num_kv_heads * shape.head_dim, 0.06, shape.head_dim);
    const auto v =
        random_rows(random, tokens * shape.num_kv_heads * shape.head_dim, 0.09, shape.head_dim);
    const QueryView query(q.data(), tokens, shape.num_qo_heads, shape.head_dim);
    const KeyView key(k.data(), tokens, shape.num_kv_heads, shape.head_dim);
    const ValueView value(v.data(), tokens, shape.num_kv_heads, shape.head_dim);
    layer.add(query, key, value);
    layer.coding().add(query, key, value, tokens * 3 / 4);
    layer.coding().add_residual_stream({q.data(), tokens, shape.num_qo_heads * shape.head_dim});
  }
  return model;
}

}  // namespace

TEST_CASE(
    "the coding metrics are the expected squared change of the layer's output, to first order") {
  std::mt19937_64 random(1);
  std::normal_distribution<double> normal;
  const int dim = 6, n = 60, context = 44, exempt = 5, hidden = 9;
  const CacheShape shape{4, 2, dim};
  const auto q = random_rows(random, n * 4 * dim), k = random_rows(random, n * 2 * dim),
             v = random_rows(random, n * 2 * dim);
  std::vector<MatrixXd> projections, grams;
  for (int head = 0; head < 4; ++head) {
    projections.push_back(MatrixXd::NullaryExpr(dim, hidden, [&] { return normal(random); }));
    grams.push_back(projections.back() * projections.back().transpose());
  }
  calibrate::CodingStatistics statistics(shape, {}, exempt);
  statistics.set_output_grams(grams);
  const int stride = 3;
  statistics.add({q.data(), n, 4, dim}, {k.data(), n, 2, dim}, {v.data(), n, 2, dim}, context,
                 stride);
  const auto row = [&](const std::vector<float>& all, int token, int heads, int head) {
    return VectorXd(
        Eigen::Map<const Eigen::VectorXf>(all.data() + (token * heads + head) * dim, dim)
            .cast<double>());
  };
  // The layer's output for a reading token, with keys and values as given.
  const auto output = [&](const std::vector<float>& keys, const std::vector<float>& values,
                          int token) {
    VectorXd out = VectorXd::Zero(hidden);
    for (int head = 0; head < 4; ++head) {
      VectorXd logits(token + 1);
      for (int j = 0; j <= token; ++j)
        logits[j] = row(q, token, 4, head).dot(row(keys, j, 2, head / 2)) /
                    std::sqrt(static_cast<double>(dim));
      const VectorXd weights = (logits.array() - logits.maxCoeff()).exp();
      for (int j = 0; j <= token; ++j)
        out += weights[j] / weights.sum() *
               projections[static_cast<std::size_t>(head)].transpose() *
               row(values, j, 2, head / 2);
    }
    return out;
  };
  // Errors of covariance S in one KV head's keys (or values), independent from token to token: the
  // sum over readers and over stored tokens of the squared first-order change is tr(A S).
  // Derivatives by central differences.
  for (const bool keys : {true, false}) {
    for (int kv = 0; kv < 2; ++kv) {
      // The metric takes the heads of a group as independent, without cross terms: one head's
      // projection at a time.
      const MatrixXd& got =
          keys ? statistics.head(kv).key_metric : statistics.head(kv).value_metric;
      MatrixXd independent = MatrixXd::Zero(dim, dim);
      for (int head = 2 * kv; head < 2 * kv + 2; ++head) {
        const auto saved = projections;
        for (int other = 0; other < 4; ++other) {
          if (other != head) projections[static_cast<std::size_t>(other)].setZero();
        }
        for (int token = context; token < n; token += stride) {
          for (int j = exempt; j < context; ++j) {
            MatrixXd jacobian(hidden, dim);
            for (int c = 0; c < dim; ++c) {
              const auto moved = [&](float step) {
                auto changed_keys = k, changed_values = v;
                (keys ? changed_keys
                      : changed_values)[static_cast<std::size_t>((j * 2 + kv) * dim + c)] += step;
                return output(changed_keys, changed_values, token);
              };
              jacobian.col(c) = (moved(0.01F) - moved(-0.01F)) / 0.02;
            }
            independent += jacobian.transpose() * jacobian;
          }
        }
        projections = saved;
      }
      CHECK((got - independent).norm() < 0.01 * independent.norm());
    }
  }
  CHECK(statistics.num_queries() == 6.0);
  CHECK(statistics.head(0).key.count == context - exempt);
}

TEST_CASE("bits: no other allocation of at most as many loses less") {
  std::mt19937_64 random(2);
  const std::vector<int> widths{2, 3, 4, 6, 8};
  for (int trial = 0; trial < 30; ++trial) {
    std::vector<VectorXd> energies;
    for (int spectrum = 0; spectrum < 2; ++spectrum)
      energies.push_back(VectorXd::NullaryExpr(
          2, [&] { return std::exp(4.0 * std::uniform_real_distribution<double>()(random)); }));
    const double budget = static_cast<double>(random() % 30);
    const auto bits = calibrate::allocate_bits(energies, budget, widths);
    const auto cost = [&](const std::vector<int>& all) {
      double sum = 0.0;
      for (int i = 0; i < 4; ++i)
        sum += energies[static_cast<std::size_t>(i / 2)][i % 2] *
               calibrate::gaussian_distortion(all[static_cast<std::size_t>(i)]);
      return sum;
    };
    std::vector<int> got;
    int used = 0;
    for (const auto& spectrum : bits) {
      for (const auto width : spectrum) {
        got.push_back(width);
        used += width;
      }
    }
    REQUIRE(used <= budget);
    // Optimal for the bits it used: no allocation of as many bits is better.
    double best = std::numeric_limits<double>::infinity();
    const int options[] = {0, 2, 3, 4, 6, 8};
    for (int code = 0; code < 1296; ++code) {
      const std::vector<int> all{options[code % 6], options[code / 6 % 6], options[code / 36 % 6],
                                 options[code / 216]};
      if (all[0] + all[1] + all[2] + all[3] <= used) best = std::min(best, cost(all));
    }
    // Steps that did not fit leave a gap of at most one step.
    REQUIRE(cost(got) <= best * 1.30 + 1e-12);
  }
  const std::vector<VectorXd> many{VectorXd::LinSpaced(50, 10.0, 0.1),
                                   VectorXd::LinSpaced(50, 100.0, 1.0)};
  const auto bits = calibrate::allocate_bits(many, 200.0, widths);
  for (const auto& spectrum : bits) CHECK(std::is_sorted(spectrum.rbegin(), spectrum.rend()));
  CHECK(bits[1][0] > bits[0][0]);
  // Channels that share a width: the same over every group, as good as any other choice for the
  // groups' mean energies.
  const auto grouped = calibrate::allocate_bits(many, 200.0, widths, 5);
  int spent = 0;
  for (std::size_t spectrum = 0; spectrum < many.size(); ++spectrum) {
    for (std::size_t channel = 0; channel < grouped[spectrum].size(); ++channel) {
      CHECK(grouped[spectrum][channel] == grouped[spectrum][channel / 5 * 5]);
      spent += grouped[spectrum][channel];
    }
  }
  CHECK(spent <= 200);
  CHECK(spent > 200 - 5 * 8);
  for (int budget = 0; budget < 700;
       ++budget) {  // groups that do not divide the channels: still widths that never rise
    for (const auto& spectrum :
         calibrate::allocate_bits(many, static_cast<double>(budget), widths, 32))
      CHECK(std::is_sorted(spectrum.rbegin(), spectrum.rend()));
  }
  CHECK_THROWS_AS(calibrate::allocate_bits(many, 10.0, widths, 0), ValueError);
  CHECK_THROWS_AS(calibrate::allocate_bits(many, 10.0, std::vector<int>{3, 2}), ValueError);
  CHECK_THROWS_AS(calibrate::allocate_bits(std::vector<VectorXd>{-VectorXd::Ones(2)}, 10.0, widths),
                  ValueError);
}

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
      options.page_bytes = 2048;
      const calibrate::BudgetedModel budgeted = calibrate::budgeted(model, options);
      CacheConfig config;
      config.shape = shape;
      config.max_tokens = 2100;
      budgeted.configure(config);
      LayerStack<Budgeted<>> stack(config, budgeted.bases, budgeted.policies);
      stack.create(0);
      const int n = 2000;
      const auto k = random_rows(random, n * 2 * 64, 0.06, 64),
                 v = random_rows(random, n * 2 * 64, 0.09, 64);
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
  calibrate::BudgetOptions
      device;  // what the Cuda backend's kernels want: channels by 32, of 2, 4 or 8 bits
  device.ratio = 0.2;
  device.context = 2000;
  device.page_bytes = 2048;
  for (const LayerBasis& layer : calibrate::budgeted(model, device.for_cuda()).bases) {
    for (const HeadBasis& head : layer.heads) {
      for (const std::vector<std::uint8_t>* bits : {&head.key_bits, &head.value_bits}) {
        for (std::size_t channel = 0; channel < bits->size(); ++channel) {
          const int width = (*bits)[channel];
          CHECK((width == 2 || width == 4 || width == 8 || (width == 0 && bits->size() == 1)));
          CHECK(width == (*bits)[channel / 32 * 32]);
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

TEST_CASE("residual thresholds are percentiles") {
  const MatrixXd rows = (MatrixXd(4, 2) << 1, 1, 2, 2, 3, 3, 4, 4).finished();
  const MatrixXd axis = (MatrixXd(2, 1) << 1, 0).finished();
  CHECK(calibrate::residual_percentile(rows, axis, 0.5) == doctest::Approx(2.0));
  CHECK(calibrate::residual_percentile(rows, axis, 1.0) == doctest::Approx(4.0));
  CHECK(calibrate::residual_percentile(rows, axis, 0.0) == doctest::Approx(1.0));
  CHECK_THROWS_AS(calibrate::residual_percentile(rows, axis, 1.5), ValueError);
  std::mt19937_64 random(4);
  const CacheShape shape{2, 1, 16};
  const auto model = random_model(random, shape, 1, 300);
  LayerBasis basis = model[0].basis({.key_ratio = 0.5, .value_ratio = 0.5});
  calibrate::set_residual_thresholds(model[0], {}, 0.9, basis);
  CHECK(basis.heads[0].key_threshold > 0.0F);
  const float at90 = basis.heads[0].key_threshold;
  calibrate::set_residual_thresholds(model[0], {}, 0.5, basis);
  CHECK(basis.heads[0].key_threshold < at90);
}

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
