// SPDX-License-Identifier: Apache-2.0
// Coding statistics: the metric predicts what errors of keys and values do to the output.
#include <doctest/doctest.h>

#include <Eigen/Dense>
#include <cmath>
#include <random>
#include <vector>

#include "lowrankkv/calibrate/coding_statistics.hpp"
#include "support/random_model.hpp"
#include "support/rope.hpp"

namespace coding_statistics_tests {

using namespace lowrankkv;
using Eigen::MatrixXd;
using Eigen::VectorXd;
using support::activations;
using support::gaussian_rows;
using support::pre_rope;
using support::rotate_rows;

TEST_CASE(
    "the coding metrics are the expected squared change of the layer's output, to first order") {
  std::mt19937_64 random(1);
  std::normal_distribution<double> normal;
  const int dim = 6, n = 60, context = 44, exempt = 5, hidden = 9;
  const CacheShape shape{4, 2, dim};
  const auto q = activations(random, n * 4 * dim), k = activations(random, n * 2 * dim),
             v = activations(random, n * 2 * dim);
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

TEST_CASE("coding statistics of pre-RoPE keys: every reader rotated back by the token it reads") {
  std::mt19937_64 random(8);
  constexpr int dim = 8, n = 400, context = 300, exempt = 10;
  const CacheShape shape{2, 1, dim};
  const RopeConfig rope = pre_rope(RopePairing::interleaved, 100.0);
  auto q = gaussian_rows(random, n * 2 * dim), k = gaussian_rows(random, n * dim),
       v = gaussian_rows(random, n * dim);
  for (float& x : q) x *= 2.0F;
  calibrate::CodingStatistics statistics(shape, rope, exempt);
  statistics.add({q.data(), n, 2, dim}, {k.data(), n, 1, dim}, {v.data(), n, 1, dim}, context);
  const auto keys = rotate_rows(k, 1, dim, rope);
  const auto row = [&](const std::vector<float>& all, int token, int heads, int head) {
    return Eigen::VectorXd(
        Eigen::Map<const Eigen::VectorXf>(all.data() + (token * heads + head) * dim, dim)
            .cast<double>());
  };
  Eigen::MatrixXd expected = Eigen::MatrixXd::Zero(dim, dim);
  for (int token = context; token < n; ++token) {
    for (int head = 0; head < 2; ++head) {
      const Eigen::VectorXd query = row(q, token, 2, head) / std::sqrt(static_cast<double>(dim));
      Eigen::VectorXd weights(token + 1), out = Eigen::VectorXd::Zero(dim);
      for (int j = 0; j <= token; ++j) weights[j] = query.dot(row(keys, j, 1, 0));
      weights = (weights.array() - weights.maxCoeff()).exp();
      weights /= weights.sum();
      for (int j = 0; j <= token; ++j) out += weights[j] * row(v, j, 1, 0);
      std::vector<float> back(dim);
      for (int j = exempt; j < context; ++j) {
        Eigen::Map<Eigen::VectorXf>(back.data(), dim) = query.cast<float>();
        const auto rotated_back = rotate_rows(back, 1, dim, rope, -j);
        const Eigen::VectorXd reader = row(rotated_back, 0, 1, 0);
        expected += weights[j] * weights[j] * (row(v, j, 1, 0) - out).squaredNorm() * reader *
                    reader.transpose();
      }
    }
  }
  const Eigen::MatrixXd& found = statistics.head(0).key_metric;
  CHECK(std::abs(found.trace() / expected.trace() - 1.0) <
        1e-4);  // sampling keeps every reader's total
  CHECK((found - expected).norm() < 0.05 * expected.norm());
  // Statistics of rotated keys are something else.
  calibrate::CodingStatistics rotated(shape, {}, exempt);
  rotated.add({q.data(), n, 2, dim}, {keys.data(), n, 1, dim}, {v.data(), n, 1, dim}, context);
  CHECK((rotated.head(0).key_metric - expected).norm() > 0.2 * expected.norm());
  CHECK((rotated.head(0).value_metric - statistics.head(0).value_metric).norm() <
        1e-3 * rotated.head(0).value_metric.norm());
}

TEST_CASE("statistics of both forms of the keys in one pass are those of two passes") {
  std::mt19937_64 random(9);
  constexpr int dim = 8, n = 200, context = 120, exempt = 10;
  const CacheShape shape{4, 2, dim};
  const RopeConfig rope = pre_rope(RopePairing::half_split, 100.0);
  const auto q = gaussian_rows(random, n * 4 * dim), k = gaussian_rows(random, n * 2 * dim),
             v = gaussian_rows(random, n * 2 * dim);
  const auto rotated = rotate_rows(k, 2, dim, rope);
  const QueryView query(q.data(), n, 4, dim);
  const KeyView key(rotated.data(), n, 2, dim), pre_rope_key(k.data(), n, 2, dim);
  const ValueView value(v.data(), n, 2, dim);
  std::vector<MatrixXd> grams;
  for (int head = 0; head < 4; ++head) {
    const MatrixXd weight = MatrixXd::Identity(dim, dim) * (1.0 + head);
    grams.push_back(weight * weight.transpose());
  }
  calibrate::CodingStatistics post(shape, {}, exempt), pre(shape, rope, exempt);
  for (auto* statistics : {&post, &pre}) statistics->set_output_grams(grams);
  auto both_post = post, both_pre = pre;
  const auto run = [](int count, auto&& function) {
    for (int index = 0; index < count; ++index) function(index);
  };
  for (int pass = 0; pass < 2; ++pass) {
    post.add(query, key, value, context, 3);
    pre.add(query, pre_rope_key, value, context, 3);
    both_post.add_both(both_pre, query, key, pre_rope_key, value, context, 3, run);
  }
  CHECK(both_post.num_queries() == post.num_queries());
  CHECK(both_pre.num_queries() == pre.num_queries());
  for (int head = 0; head < 2; ++head) {
    CHECK(both_post.head(head).key.second == post.head(head).key.second);
    CHECK(both_post.head(head).value.second == post.head(head).value.second);
    CHECK(both_post.head(head).key_metric == post.head(head).key_metric);
    CHECK(both_post.head(head).value_metric == post.head(head).value_metric);
    CHECK(both_pre.head(head).key.second == pre.head(head).key.second);
    CHECK(both_pre.head(head).value.second == pre.head(head).value.second);
    // Weights are those of the keys as they came, not as rotated here: to rounding.
    const auto close = [](const MatrixXd& a, const MatrixXd& b) {
      return (a - b).norm() < 1e-4 * b.norm();
    };
    CHECK(close(both_pre.head(head).key_metric, pre.head(head).key_metric));
    CHECK(close(both_pre.head(head).value_metric, pre.head(head).value_metric));
    CHECK_FALSE(close(both_pre.head(head).key_metric, post.head(head).key_metric));
  }
  const auto refused = [&](calibrate::CodingStatistics first, calibrate::CodingStatistics second,
                           const char* message) {
    CHECK_THROWS_WITH_AS(first.add_both(second, query, key, pre_rope_key, value, context, 3, run),
                         message, Error);
    CHECK(first.num_queries() + second.num_queries() == 0.0);
  };
  const calibrate::CodingStatistics fresh(shape, {}, exempt), of_pre(shape, rope, exempt);
  refused(of_pre, fresh,
          "coding statistics: of pre-RoPE and of post-RoPE keys, post and pre expected");
  refused(fresh, fresh,
          "coding statistics: of post-RoPE and of post-RoPE keys, post and pre expected");
  refused(fresh, calibrate::CodingStatistics(shape, rope, 3),
          "exempt: coding statistics 10, those of pre-RoPE keys 3");
  refused(
      fresh,
      calibrate::CodingStatistics({4, 2, 2 * dim}, support::pre_rope(rope.pairing, 100.0), exempt),
      "head_dim: coding statistics 8, those of pre-RoPE keys 16: shapes differ");
  calibrate::CodingStatistics other_grams(shape, rope, exempt);
  other_grams.set_output_grams(grams);
  refused(fresh, other_grams,
          "output grams: coding statistics and those of pre-RoPE keys have others, the same "
          "expected");
}

TEST_CASE("metrics of the loss are the second moments of gradients") {
  std::mt19937_64 random(11);
  constexpr int dim = 8, n = 50, exempt = 3;
  const CacheShape shape{4, 2, dim};
  const auto k = gaussian_rows(random, n * 2 * dim), v = gaussian_rows(random, n * 2 * dim),
             dk = gaussian_rows(random, n * 2 * dim), dv = gaussian_rows(random, n * 2 * dim);
  const KeyView key(k.data(), n, 2, dim), key_gradient(dk.data(), n, 2, dim);
  const ValueView value(v.data(), n, 2, dim), value_gradient(dv.data(), n, 2, dim);
  calibrate::CodingStatistics statistics(shape, {}, exempt);
  statistics.add_gradients(key, value, key_gradient, value_gradient);
  CHECK(statistics.metric() == calibrate::CodingMetric::loss);
  CHECK(statistics.error_scale() == n - exempt);
  for (int head = 0; head < 2; ++head) {
    const calibrate::CodingHead& own = statistics.head(head);
    CHECK(own.key.count == n - exempt);
    CHECK(own.value_sample.size() == n - exempt);
    const auto check = [&](const std::vector<float>& gradients, const MatrixXd& metric) {
      MatrixXd expected = MatrixXd::Zero(dim, dim);
      for (int token = exempt; token < n; ++token) {
        VectorXd row(dim);
        for (int i = 0; i < dim; ++i)
          row[i] = static_cast<double>(
              gradients[static_cast<std::size_t>((token * 2 + head) * dim + i)]);
        expected += row * row.transpose();
      }
      CHECK((metric - expected).norm() < 1e-5 * expected.norm());
    };
    check(dk, own.key_metric);
    check(dv, own.value_metric);
  }
  // The two kinds of metric have different units.
  const auto q = gaussian_rows(random, n * 4 * dim);
  const double before = statistics.head(0).key.count;
  CHECK_THROWS_WITH_AS(statistics.add({q.data(), n, 4, dim}, key, value, n / 2),
                       "coding statistics: rows with a metric of the output added to those of the "
                       "loss",
                       ValueError);
  CHECK(statistics.head(0).key.count == before);
  CHECK_THROWS_AS(statistics.add_gradients(key, value, key_gradient, {dv.data(), n - 1, 2, dim}),
                  ShapeError);
}

TEST_CASE("combined metrics have the mean shape and the geometric mean size of loss and output") {
  std::mt19937_64 random(12);
  constexpr int dim = 8, n = 60, exempt = 3;
  const CacheShape shape{4, 2, dim};
  const auto q = gaussian_rows(random, n * 4 * dim), k = gaussian_rows(random, n * 2 * dim),
             v = gaussian_rows(random, n * 2 * dim), dk = gaussian_rows(random, n * 2 * dim),
             dv = gaussian_rows(random, n * 2 * dim), h = gaussian_rows(random, n * 16);
  const KeyView key(k.data(), n, 2, dim), key_gradient(dk.data(), n, 2, dim);
  const ValueView value(v.data(), n, 2, dim), value_gradient(dv.data(), n, 2, dim);
  calibrate::CodingStatistics loss(shape, {}, exempt), output(shape, {}, exempt);
  calibrate::CodingStatistics combined = loss;
  CHECK_THROWS_WITH_AS(combined.combine(output),
                       "coding statistics: metrics of the output and of the output, loss and "
                       "output expected",
                       ValueError);
  loss.add_gradients(key, value, key_gradient, value_gradient);
  combined = loss;
  CHECK_THROWS_WITH_AS(combined.combine(output),
                       "coding statistics: the metric of the output is of 0 rows, at least 1 "
                       "needed",
                       ValueError);
  output.add({q.data(), n, 4, dim}, key, value, n / 2);
  output.add_residual_stream({h.data(), n, 16});
  CHECK_THROWS_AS(combined.combine(calibrate::CodingStatistics({4, 2, 2 * dim})), ShapeError);
  CHECK_THROWS_WITH_AS(combined.combine(calibrate::CodingStatistics(
                           shape, support::pre_rope(RopePairing::half_split, 100.0), exempt)),
                       "coding statistics: of post-RoPE and of pre-RoPE keys, the same expected",
                       ValueError);
  CHECK(combined.metric() == calibrate::CodingMetric::loss);  // errors change nothing
  combined.combine(output);
  CHECK(combined.metric() == calibrate::CodingMetric::combined);
  CHECK(combined.error_scale() == n - exempt);
  for (int head = 0; head < 2; ++head) {
    const auto check = [&](const MatrixXd& metric, const MatrixXd& of_loss,
                           const MatrixXd& of_output) {
      const MatrixXd f = of_loss / (n - exempt),
                     o = of_output / (output.num_queries() * output.stream_square());
      const MatrixXd expected =
          (f / f.trace() + o / o.trace()) / 2.0 * std::sqrt(f.trace() * o.trace());
      CHECK((metric / combined.error_scale() - expected).norm() < 1e-12 * expected.norm());
    };
    check(combined.head(head).key_metric, loss.head(head).key_metric, output.head(head).key_metric);
    check(combined.head(head).value_metric, loss.head(head).value_metric,
          output.head(head).value_metric);
    CHECK(combined.head(head).key.count == loss.head(head).key.count);
  }
  CHECK_THROWS_AS(combined.combine(output), ValueError);  // once
  CHECK_THROWS_AS(combined.add_gradients(key, value, key_gradient, value_gradient), ValueError);
  // A head that nothing reads stays without a metric.
  calibrate::CodingStatistics unread = loss;
  calibrate::CodingStatistics silent = output;
  silent.head(1).key_metric.setZero();
  unread.combine(silent);
  CHECK(unread.head(1).key_metric.norm() == 0.0);
  CHECK(unread.head(1).value_metric.norm() > 0.0);
}

}  // namespace coding_statistics_tests
