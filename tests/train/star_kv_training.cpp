// SPDX-License-Identifier: Apache-2.0
// STAR-KV's objective, its two phases, protected layers, and a training that finds what matters.
#include "lowrankkv/train/star_kv_training.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "support/matrices.hpp"

namespace star_kv_training_tests {

using namespace lowrankkv;
using Eigen::MatrixXd;
using support::FloatRows;
using support::gaussian;
using support::Random;
using support::uniform;
using train::Decomposition;
using train::StarKvFactors;
using train::StarKvLayer;
using train::StarKvOptions;
using train::StarKvPhase;
using train::StarKvProjection;
using train::StarKvTraining;
using train::StarKvWeights;

/// The weights of some layers, which views point into.
struct Model {
  Model(Random& random, int num_layers, int rows, int hidden) {
    for (int i = 0; i < num_layers; ++i) {
      keys.emplace_back(gaussian(random, rows, hidden));
      values.emplace_back(gaussian(random, rows, hidden));
    }
  }
  std::vector<StarKvWeights> views() const {
    std::vector<StarKvWeights> all;
    for (std::size_t i = 0; i < keys.size(); ++i) all.push_back({keys[i].view(), values[i].view()});
    return all;
  }
  std::vector<FloatRows> keys, values;
};

StarKvOptions short_training(std::int64_t compress, std::int64_t recover) {
  StarKvOptions options;
  options.compress_steps = compress;
  options.recover_steps = recover;
  return options;
}

/// A step without a change, of the shapes of `like`.
StarKvLayer no_change(StarKvLayer like) {
  for (StarKvProjection* part : {&like.keys, &like.values}) {
    for (StarKvFactors& block : part->blocks) {
      block.left.setZero(), block.sigma.setZero(), block.right.setZero();
      block.alpha = 0.0;
    }
  }
  return like;
}

/// Moves every threshold of a layer by a step.
void move_thresholds(StarKvTraining& training, int layer, double step) {
  StarKvLayer change = no_change(training.layer(layer));
  for (StarKvFactors& block : change.keys.blocks) block.alpha = step;
  for (StarKvFactors& block : change.values.blocks) block.alpha = step;
  training.move(layer, change);
}

TEST_CASE("the gradient of the objective is that of finite differences, in both phases") {
  Random random(51);
  for (int round = 0; round < 12; ++round) {
    const int heads = uniform(random, 1, 3), dim = uniform(random, 1, 4),
              hidden = uniform(random, 2, 9), width = heads * dim, num_layers = 3;
    const Model model(random, num_layers, width, hidden);
    StarKvOptions options = short_training(1, 5);
    options.keys = round % 2 == 0 ? Decomposition::head_wise : Decomposition::joint;
    options.values = round % 4 < 2 ? Decomposition::joint : Decomposition::head_wise;
    options.sharpness = 2.0;
    options.first_alpha = 0.3;
    options.gamma = 0.7;
    options.freeze_thresholds = round % 3 == 0;
    options.protected_layers = {1};
    StarKvTraining training(options, {heads, heads, dim}, model.views());
    CHECK(training.layer(1).keys.blocks.empty());
    CHECK(training.layer(0).keys.blocks.size() ==
          static_cast<std::size_t>(options.keys == Decomposition::joint ? 1 : heads));

    // In place of KL: |W~_K - A|^2 / 2 + |W~_V - A|^2 / 2 over the layers that are trained.
    const MatrixXd target = gaussian(random, width, hidden);
    const auto distillation = [&](const StarKvTraining& of) {
      double loss = 0.0;
      for (const int i : {0, 2})
        loss += 0.5 * (of.key_weight(i) - target).squaredNorm() +
                0.5 * (of.value_weight(i) - target).squaredNorm();
      return loss;
    };
    for (const StarKvPhase phase : {StarKvPhase::compress, StarKvPhase::recover}) {
      REQUIRE(training.progress().phase == phase);
      const bool moves = phase == StarKvPhase::compress || !options.freeze_thresholds;
      const StarKvLayer gradient =
          training.gradient(2, training.key_weight(2) - target, training.value_weight(2) - target);
      // The objective after a step of h in one number of layer 2, by move().
      const auto difference = [&](const std::function<double&(StarKvLayer&)>& number) {
        const double h = 1e-5;
        const auto stepped = [&](double step) {
          StarKvTraining moved = training;
          StarKvLayer change = no_change(training.layer(2));
          number(change) = step;
          moved.move(2, change);
          return moved.objective(distillation(moved));
        };
        return (stepped(h) - stepped(-h)) / (2.0 * h);
      };
      const auto check = [&](double slope, const std::function<double&(StarKvLayer&)>& number) {
        CHECK(slope == doctest::Approx(difference(number)).epsilon(1e-6).scale(0.1));
      };
      for (StarKvProjection StarKvLayer::*part : {&StarKvLayer::keys, &StarKvLayer::values}) {
        for (std::size_t i = 0; i < (gradient.*part).blocks.size(); ++i) {
          const StarKvFactors& slope = (gradient.*part).blocks[i];
          check(slope.alpha,
                [&](StarKvLayer& of) -> double& { return (of.*part).blocks[i].alpha; });
          CHECK((slope.alpha != 0.0) == moves);
          for (Eigen::Index k = 0; k < slope.sigma.size(); ++k)
            check(slope.sigma[k],
                  [&](StarKvLayer& of) -> double& { return (of.*part).blocks[i].sigma[k]; });
          check(slope.left(0, 0),
                [&](StarKvLayer& of) -> double& { return (of.*part).blocks[i].left(0, 0); });
          check(slope.right(1, 0),
                [&](StarKvLayer& of) -> double& { return (of.*part).blocks[i].right(1, 0); });
        }
      }
      training.finish_step();
    }
  }
}

TEST_CASE("the compression loss is eq. 11: a term a head for keys, a term a layer for values") {
  Random random(52);
  const int heads = 3, num_layers = 4;
  const Model model(random, num_layers, heads * 2, 5);
  StarKvOptions options = short_training(3, 2);
  options.gamma = 0.5;
  options.protected_layers = train::paper_protected_layers(num_layers);  // 0, 1, 3
  StarKvTraining training(options, {heads, heads, 2}, model.views());
  StarKvLayer change = no_change(training.layer(2));
  const std::vector<double> alphas{0.25, -0.5, 1.5};
  for (std::size_t head = 0; head < 3; ++head) change.keys.blocks[head].alpha = alphas[head];
  change.values.blocks[0].alpha = 0.75;
  training.move(2, change);
  const double expected = std::exp(-0.25) + std::exp(0.5) + std::exp(-1.5) + std::exp(-0.75);
  CHECK(training.compression_loss() == doctest::Approx(expected).epsilon(1e-14));
  CHECK(training.objective(2.0) == doctest::Approx(2.0 + 0.5 * expected).epsilon(1e-14));
  // Without a loss of its own, a threshold feels -gamma e^-alpha.
  const MatrixXd nothing = MatrixXd::Zero(6, 5);
  const StarKvLayer gradient = training.gradient(2, nothing, nothing);
  for (std::size_t head = 0; head < 3; ++head)
    CHECK(gradient.keys.blocks[head].alpha ==
          doctest::Approx(-0.5 * std::exp(-alphas[head])).epsilon(1e-14));
  CHECK(gradient.keys.blocks[0].sigma.isZero(0.0));

  CHECK(train::paper_protected_layers(32) == std::vector<int>{0, 1, 31});
  CHECK(train::paper_protected_layers(2) == std::vector<int>{0, 1});
  CHECK(train::paper_protected_layers(1) == std::vector<int>{0});
  CHECK(train::paper_protected_layers(0).empty());
}

TEST_CASE("phases end after their steps, or when both parts have reached their shares") {
  Random random(53);
  const int heads = 2, dim = 3;
  const Model model(random, 2, heads * dim, 8);
  const CacheShape shape{heads, heads, dim};
  StarKvTraining plain(short_training(3, 2), shape, model.views());
  std::vector<StarKvPhase> phases;
  while (plain.progress().phase != StarKvPhase::finished) {
    phases.push_back(plain.progress().phase);
    plain.finish_step();
  }
  using enum StarKvPhase;
  CHECK(phases == std::vector<StarKvPhase>{compress, compress, compress, recover, recover});
  CHECK(plain.progress().step == 5);
  CHECK(plain.objective(1.5) == 1.5);
  CHECK_THROWS_WITH_AS(plain.finish_step(),
                       "STAR-KV: training is finished after 5 steps, of at most 5", StateError);
  CHECK_THROWS_AS(plain.move(0, plain.layer(0)), StateError);
  StarKvTraining no_recovery(short_training(1, 0), shape, model.views());
  no_recovery.finish_step();
  CHECK(no_recovery.progress().phase == finished);

  StarKvOptions options = short_training(100, 4);
  options.key_share = 0.5;
  options.value_share = 0.25;
  StarKvTraining training(options, shape, model.views());
  CHECK(training.kept_keys() == 1.0);
  CHECK(training.kept_values() == 1.0);
  // Thresholds between two values: half of the keys' rank is gone, all values are there.
  const auto set_rank = [&](int layer, int key_rank, int value_rank) {
    StarKvLayer change = no_change(training.layer(layer));
    const auto to = [](const StarKvFactors& block, int rank) {
      return calibrate::threshold_for_rank(block.sigma, rank) - block.alpha;
    };
    for (std::size_t head = 0; head < 2; ++head)
      change.keys.blocks[head].alpha = to(training.layer(layer).keys.blocks[head], key_rank);
    change.values.blocks[0].alpha = to(training.layer(layer).values.blocks[0], value_rank);
    training.move(layer, change);
  };
  set_rank(0, 1, 6);
  set_rank(1, 2, 6);
  CHECK(training.kept_keys() == 0.5);
  training.finish_step();
  CHECK(training.progress().phase == compress);
  CHECK(training.progress().keys_stopped);
  CHECK_FALSE(training.progress().values_stopped);
  CHECK_FALSE(training.key_thresholds_move());
  CHECK(training.value_thresholds_move());
  // Thresholds that stopped feel nothing and stay; what else is trained moves on.
  const MatrixXd slope = gaussian(random, heads * dim, 8);
  const StarKvLayer gradient = training.gradient(1, slope, slope);
  CHECK(gradient.keys.blocks[1].alpha == 0.0);
  CHECK(gradient.values.blocks[0].alpha != 0.0);
  const StarKvLayer before = training.layer(0);
  StarKvLayer step = no_change(before);
  step.keys.blocks[0].alpha = step.values.blocks[0].alpha = -0.125;
  step.keys.blocks[0].sigma[2] = -0.0625;
  training.move(0, step);
  CHECK(training.layer(0).keys.blocks[0].alpha == before.keys.blocks[0].alpha);
  CHECK(training.layer(0).values.blocks[0].alpha == before.values.blocks[0].alpha - 0.125);
  CHECK(training.layer(0).keys.blocks[0].sigma[2] == before.keys.blocks[0].sigma[2] - 0.0625);
  set_rank(0, 3, 1);
  set_rank(1, 3, 2);
  CHECK(training.kept_values() == 0.25);
  training.finish_step();
  CHECK(training.progress().phase == recover);
  CHECK(training.progress().step == 2);
  CHECK(training.progress().phase_steps == 0);
  CHECK_FALSE(training.value_thresholds_move());
}

/// Trains thresholds alone, by Adam, where errors in one head's keys cost 100 times those in the
/// other's; the two heads have the same weights. @return their thresholds and ranks
struct Learnt {
  std::vector<double> alphas;
  std::vector<int> ranks;
  double value_alpha;
};
Learnt learn_thresholds(double gamma) {
  Random random(54);
  const int dim = 8, hidden = 16;
  const MatrixXd head = support::decaying_rows(random, dim, hidden, 0.5);
  MatrixXd both(2 * dim, hidden);
  both << head, head;
  const FloatRows weight(both);
  const std::vector<StarKvWeights> views{{weight.view(), weight.view()}};
  StarKvOptions options = short_training(400, 1);
  options.sharpness = 10.0;
  options.gamma = gamma;
  StarKvTraining training(options, {2, 2, dim}, views);
  MatrixXd cost = MatrixXd::Constant(2 * dim, hidden, 0.001);
  cost.topRows(dim).setConstant(0.1);
  std::vector<double> mean(3, 0.0), square(3, 0.0);
  for (int step = 1; training.progress().phase == StarKvPhase::compress; ++step) {
    const StarKvLayer gradient =
        training.gradient(0, cost.cwiseProduct(training.key_weight(0) - weight.matrix),
                          cost.cwiseProduct(training.value_weight(0) - weight.matrix));
    StarKvLayer change = no_change(training.layer(0));
    const auto adam = [&](std::size_t i, double slope) {
      mean[i] = 0.9 * mean[i] + 0.1 * slope;
      square[i] = 0.999 * square[i] + 0.001 * slope * slope;
      return -1e-2 * (mean[i] / (1.0 - std::pow(0.9, step))) /
             (std::sqrt(square[i] / (1.0 - std::pow(0.999, step))) + 1e-8);
    };
    for (std::size_t i = 0; i < 2; ++i)
      change.keys.blocks[i].alpha = adam(i, gradient.keys.blocks[i].alpha);
    change.values.blocks[0].alpha = adam(2, gradient.values.blocks[0].alpha);
    training.move(0, change);
    training.finish_step();
  }
  const StarKvLayer& layer = training.layer(0);
  return {{layer.keys.blocks[0].alpha, layer.keys.blocks[1].alpha},
          {layer.keys.blocks[0].rank(), layer.keys.blocks[1].rank()},
          layer.values.blocks[0].alpha};
}

TEST_CASE("thresholds learn which head matters, a larger gamma cuts more, two runs are equal") {
  const Learnt first = learn_thresholds(0.1), again = learn_thresholds(0.1),
               harder = learn_thresholds(0.4);
  CHECK(first.alphas == again.alphas);
  CHECK(first.value_alpha == again.value_alpha);
  CHECK(first.ranks[0] > first.ranks[1]);
  CHECK(first.ranks[0] < 8);
  CHECK(first.ranks[1] >= 0);
  CHECK(harder.ranks[0] <= first.ranks[0]);
  CHECK(harder.ranks[1] <= first.ranks[1]);
  CHECK(harder.ranks[0] + harder.ranks[1] < first.ranks[0] + first.ranks[1]);
  MESSAGE("ranks of 8: ", first.ranks[0], " and ", first.ranks[1], "; gamma 0.4: ", harder.ranks[0],
          " and ", harder.ranks[1]);
}

TEST_CASE("options that are out of range are refused with both values") {
  Random random(55);
  const Model model(random, 3, 6, 7);
  const CacheShape shape{2, 2, 3};
  const auto error_of = [&](const std::function<void(StarKvOptions&)>& change) {
    StarKvOptions options = short_training(2, 2);
    change(options);
    try {
      static_cast<void>(StarKvTraining(options, shape, model.views()));
    } catch (const ValueError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  CHECK(error_of([](StarKvOptions&) {}) == "accepted");
  CHECK(error_of([](StarKvOptions& o) { o.compress_steps = 0; }) ==
        "STAR-KV: compress_steps 0, 1 to 2^40 expected");
  CHECK(error_of([](StarKvOptions& o) { o.recover_steps = -1; }) ==
        "STAR-KV: recover_steps -1, 0 to 2^40 expected");
  CHECK(error_of([](StarKvOptions& o) { o.sharpness = 0.0; }) ==
        "STAR-KV: sharpness 0, above 0 and finite expected");
  CHECK(error_of([](StarKvOptions& o) { o.gamma = -0.5; }) ==
        "STAR-KV: gamma -0.5, 0 or more and finite expected");
  CHECK(error_of([](StarKvOptions& o) { o.first_alpha = HUGE_VAL; }) ==
        "STAR-KV: first_alpha inf, a finite number expected");
  CHECK(error_of([](StarKvOptions& o) { o.key_share = 1.5; }) ==
        "STAR-KV: key_share 1.5, 0 to 1 expected");
  CHECK(error_of([](StarKvOptions& o) { o.value_share = -1.0; }) ==
        "STAR-KV: value_share -1, 0 to 1 expected");
  CHECK(error_of([](StarKvOptions& o) { o.protected_layers = {3}; }) ==
        "STAR-KV: protected layer 3, num_layers 3");
  CHECK(error_of([](StarKvOptions& o) {
          o.protected_layers = {1, 1};
        }) == "STAR-KV: 2 protected_layers, 1 of them distinct");
  CHECK(error_of([](StarKvOptions& o) {
          o.protected_layers = {0, 1, 2};
        }) == "STAR-KV: 3 protected_layers, num_layers 3, one to train expected");
}

TEST_CASE("weights and steps that do not fit are refused with both values, and nothing moves") {
  Random random(56);
  const Model model(random, 3, 6, 7);
  const CacheShape shape{2, 2, 3};
  std::vector<StarKvWeights> views = model.views();
  CHECK_THROWS_WITH_AS(StarKvTraining(short_training(1, 1), {2, 2, 4}, views),
                       "layer 0 keys: rows 6, num_kv_heads * head_dim 8", ShapeError);
  CHECK_THROWS_WITH_AS(StarKvTraining(short_training(1, 1), {2, 0, 4}, views),
                       "STAR-KV: num_kv_heads 0, head_dim 4, at least 1 expected", ShapeError);
  views[2].values.cols = 5;
  CHECK_THROWS_WITH_AS(StarKvTraining(short_training(1, 1), shape, views),
                       "hidden: layer 2 keys 7, values 5", ShapeError);

  StarKvOptions options = short_training(2, 2);
  options.protected_layers = {1};
  views = model.views();
  views[1] = {};  // not read
  StarKvTraining training(options, shape, views);
  CHECK_THROWS_WITH_AS(training.layer(3), "layer: 3, num_layers 3", ShapeError);
  CHECK_THROWS_WITH_AS(training.key_weight(1),
                       "layer: 1 is protected and has 0 blocks, one that is trained expected",
                       ValueError);
  CHECK_THROWS_AS(training.gradient(1, MatrixXd::Zero(6, 7), MatrixXd::Zero(6, 7)), ValueError);
  CHECK_THROWS_WITH_AS(training.gradient(0, MatrixXd::Zero(6, 7), MatrixXd::Zero(6, 6)),
                       "hidden: projection 7, weight_gradient 6", ShapeError);
  StarKvLayer change = no_change(training.layer(0));
  change.values.blocks[0].sigma.conservativeResize(4);
  CHECK_THROWS_WITH_AS(training.move(0, change),
                       "singular values: layer 0 values block 0 6, change 4", ShapeError);
  change = no_change(training.layer(0));
  change.keys.blocks.pop_back();
  CHECK_THROWS_WITH_AS(training.move(0, change), "blocks: layer 0 keys 2, change 1", ShapeError);
  // Nothing moves if any part of the step cannot be taken.
  change = no_change(training.layer(0));
  change.keys.blocks[0].alpha = 1.0;
  change.values.blocks[0].alpha = std::numeric_limits<double>::quiet_NaN();
  CHECK_THROWS_AS(training.move(0, change), ValueError);
  CHECK(training.layer(0).keys.blocks[0].alpha == 0.0);
  change.values.blocks[0].alpha = 0.0;
  change.values.blocks[0].sigma.setConstant(1.7e308);
  training.move(2, change);
  CHECK_THROWS_AS(training.move(2, change), ValueError);  // beyond f64
  CHECK(training.layer(2).keys.blocks[0].alpha == 1.0);
  move_thresholds(training, 0, 0.5);
  CHECK(training.layer(0).keys.blocks[1].alpha == 0.5);
  CHECK(training.layer(1).keys.blocks.empty());
}

}  // namespace star_kv_training_tests
