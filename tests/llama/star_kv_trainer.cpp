// SPDX-License-Identifier: Apache-2.0
// STAR-KV's training in the engine: gradients against finite differences of a plain forward pass in
// f64, the same numbers in every run, and what is made of the trained factors.
#include "star_kv_trainer.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kv_store.hpp"
#include "lowrankkv/train/star_kv_maps.hpp"
#include "lowrankkv/train/star_kv_state.hpp"
#include "tiny_model.hpp"

using namespace llama;
using namespace tiny;
namespace train = lowrankkv::train;

namespace {

const std::vector<std::int32_t> kIds{1, 17, 3, 3, 29, 8, 39, 0, 11, 21, 5, 14};
const std::string kFolder = "tiny_star_kv_test";

/// A tiny model's folder, and the model twice.
struct Pair {
  explicit Pair(int threads = 1, const std::string& more = "") : tiny(true) {
    tiny.write(kFolder, kConfig + more + "}");
    const auto pool = std::make_shared<lowrankkv::cpu::ThreadPool>(threads);
    teacher = std::make_unique<Model>(kFolder, pool);
    student = std::make_unique<Model>(kFolder, pool);
  }
  ~Pair() { std::filesystem::remove_all(kFolder); }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

  TinyModel tiny;
  std::unique_ptr<Model> teacher, student;
};

/// Thresholds among the singular values, and a tanh that finite differences see.
TrainOptions options_of(std::int64_t steps) {
  TrainOptions options;
  options.window = static_cast<std::int64_t>(kIds.size());
  options.batch = 1;
  options.rate = 1e-3;
  options.threshold_rate = 0.05;
  options.star.compress_steps = steps;
  options.star.recover_steps = 2;
  options.star.sharpness = 4.0;
  options.star.first_alpha = 0.63;
  return options;
}

/// log softmax of every row.
Matrix log_probabilities(Matrix logits) {
  for (Eigen::Index row = 0; row < logits.rows(); ++row) {
    const double largest = logits.row(row).maxCoeff();
    logits.row(row).array() -= largest + std::log((logits.row(row).array() - largest).exp().sum());
  }
  return logits;
}

/// The model with other weights of keys and values.
TinyModel with_weights(const TinyModel& tiny, const train::StarKvTraining& training) {
  TinyModel changed = tiny;
  for (int i = 0; i < 2; ++i) {
    if (training.is_protected(i)) continue;
    const std::string prefix = "model.layers." + std::to_string(i) + ".self_attn.";
    const auto set = [&](const std::string& name, const Matrix& weight) {
      std::vector<float>& values = changed.weights.at(prefix + name + ".weight").second;
      for (Eigen::Index row = 0; row < weight.rows(); ++row)
        for (Eigen::Index column = 0; column < weight.cols(); ++column)
          values[static_cast<std::size_t>(row * weight.cols() + column)] =
              static_cast<float>(weight(row, column));
    };
    set("k_proj", training.key_weight(i));
    set("v_proj", training.value_weight(i));
  }
  return changed;
}

/// KL(teacher || student) and gamma L_acmp (STAR-KV eqs. 4, 5, 11), as they are written there.
double objective_of(const TinyModel& tiny, const train::StarKvTraining& training,
                    const std::vector<double>& frequencies) {
  const Matrix p = log_probabilities(tiny.forward(kIds, frequencies)),
               q = log_probabilities(with_weights(tiny, training).forward(kIds, frequencies));
  double objective = (p.array().exp() * (p - q).array()).sum() / static_cast<double>(kIds.size());
  for (int i = 0; i < training.num_layers(); ++i) {
    const train::StarKvLayer& layer = training.layer(i);
    for (const auto* part : {&layer.keys, &layer.values})
      for (const train::StarKvFactors& block : part->blocks)
        objective += training.options().gamma * std::exp(-block.alpha);
  }
  return objective;
}

train::StarKvLayer zero_like(train::StarKvLayer layer) {
  for (auto* part : {&layer.keys, &layer.values}) {
    for (train::StarKvFactors& block : part->blocks) {
      block.left.setZero();
      block.sigma.setZero();
      block.right.setZero();
      block.alpha = 0.0;
    }
  }
  return layer;
}

std::vector<std::byte> bytes_of(const StarKvTrainer& trainer) { return trainer.written().bytes(); }

}  // namespace

TEST_CASE("gradients of thresholds and factors are finite differences, keys and values alike") {
  for (const bool joint_keys : {false, true}) {
    CAPTURE(joint_keys);
    Pair pair(joint_keys ? 3 : 1);
    TrainOptions options = options_of(5);
    if (joint_keys) {
      options.star.keys = train::Decomposition::joint;
      options.star.values = train::Decomposition::head_wise;
      options.star.protected_layers = {1};
    }
    StarKvTrainer trainer(*pair.teacher, *pair.student, kIds, options);
    TrainStep step;
    const std::vector<train::StarKvLayer> found = trainer.gradients(step);
    const std::vector<double>& frequencies = pair.teacher->config().rope_frequencies;
    const double expected = objective_of(pair.tiny, trainer.training(), frequencies);
    CHECK(step.divergence > 0.01);
    CHECK(std::abs(step.objective - expected) < 1e-4 * expected);
    const auto check = [&](int layer, const std::function<double&(train::StarKvLayer&)>& number) {
      const auto shifted = [&](double by) {
        train::StarKvTraining training = trainer.training();
        train::StarKvLayer change = zero_like(training.layer(layer));
        number(change) = by;
        training.move(layer, change);
        return objective_of(pair.tiny, training, frequencies);
      };
      const double slope = (shifted(1e-3) - shifted(-1e-3)) / 2e-3;
      train::StarKvLayer own = found[static_cast<std::size_t>(layer)];
      CHECK(std::abs(number(own) - slope) < 1e-3 + 2e-3 * std::abs(slope));
      return std::abs(slope);
    };
    for (int layer = 0; layer < 2; ++layer) {
      if (trainer.training().is_protected(layer)) {
        CHECK(found[static_cast<std::size_t>(layer)].keys.blocks.empty());
        continue;
      }
      for (auto part : {&train::StarKvLayer::keys, &train::StarKvLayer::values}) {
        const std::size_t blocks = (trainer.training().layer(layer).*part).blocks.size();
        CHECK(blocks == ((part == &train::StarKvLayer::keys) != joint_keys ? 2 : 1));
        double largest = 0.0;
        for (std::size_t block = 0; block < blocks; ++block) {
          const auto of = [part, block](train::StarKvLayer& own) -> train::StarKvFactors& {
            return (own.*part).blocks[block];
          };
          // Finite differences do not see the kink of a singular value at its threshold.
          const train::StarKvLayer& now = trainer.training().layer(layer);
          const train::StarKvFactors& factors = (now.*part).blocks[block];
          REQUIRE((factors.sigma.array() - factors.alpha).abs().minCoeff() > 2e-3);
          check(layer, [&](auto& own) -> double& { return of(own).alpha; });
          for (Eigen::Index i = 0; i < 5; i += 2) {
            check(layer, [&](auto& own) -> double& { return of(own).sigma[i]; });
            largest = std::max(
                largest, check(layer, [&](auto& own) -> double& { return of(own).left(i, 0); }));
            check(layer, [&](auto& own) -> double& { return of(own).right(3 * i, i); });
          }
        }
        CHECK(largest > 0.01);
      }
    }
  }
}

TEST_CASE("training gives the same numbers in every run, with any threads, and when it goes on") {
  const TrainOptions options = options_of(4);  // and 2 steps of the second phase
  std::vector<std::int32_t> text = kIds;
  for (int i = 0; i < 60; ++i) text.push_back((7 * i + i * i) % 40);
  TrainOptions varied = options;
  varied.batch = 3;
  varied.warmup = 3;
  varied.weight_decay = 0.1;
  varied.clip = 0.05;
  varied.star.protected_layers = {0};
  std::vector<std::byte> whole;
  std::vector<TrainStep> steps;
  for (const int threads : {1, 3}) {
    Pair pair(threads);
    StarKvTrainer trainer(*pair.teacher, *pair.student, text, varied);
    steps.clear();
    while (!trainer.finished()) steps.push_back(trainer.step());
    CHECK_THROWS_AS(trainer.step(), lowrankkv::StateError);
    if (threads == 1) whole = bytes_of(trainer);
    CHECK(bytes_of(trainer) == whole);
  }
  REQUIRE(steps.size() == 6);
  CHECK(steps[0].step == 1);
  CHECK(steps[0].gradient_norm > varied.clip);
  CHECK(steps[5].kept_keys <= steps[0].kept_keys);
  for (const std::size_t first : {1U, 4U, 5U}) {  // in the first phase, at its end, in the second
    CAPTURE(first);
    Pair pair;
    StarKvTrainer before(*pair.teacher, *pair.student, text, varied);
    for (std::size_t i = 0; i < first; ++i) before.step();
    const auto file = lowrankkv::io::Safetensors(bytes_of(before));
    StarKvTrainer after(*pair.teacher, *pair.student, text, varied);
    after.restore(file);
    while (!after.finished()) after.step();
    CHECK(bytes_of(after) == whole);

    // A file of another run, and one without an optimiser, are refused and change nothing.
    TrainOptions other = varied;
    other.seed = 2;
    StarKvTrainer wrong(*pair.teacher, *pair.student, text, other);
    const std::vector<std::byte> untouched = bytes_of(wrong);
    CHECK_THROWS_WITH_AS(wrong.restore(file), "train: train.seed: the file has 1, this run 2",
                         lowrankkv::ValueError);
    CHECK(bytes_of(wrong) == untouched);
    TrainOptions shares = varied;
    shares.star.key_share = 0.5;
    StarKvTrainer stops(*pair.teacher, *pair.student, text, shares);
    CHECK_THROWS_WITH_AS(stops.restore(file),
                         "train: the file's options of STAR-KV are others: gamma 0.1, shares 0 and "
                         "0, steps 4 and 2; this run's gamma 0.1, shares 0.5 and 0, steps 4 and 2",
                         lowrankkv::ValueError);
    CHECK_THROWS_WITH_AS(
        after.restore(lowrankkv::io::Safetensors(train::write_star_kv(before.training()).bytes())),
        doctest::Contains(": the file has nothing, this run "), lowrankkv::ValueError);
    CHECK(bytes_of(after) == whole);
  }
}

TEST_CASE("thresholds rise until the shares are met; then the truncated model is the student's") {
  Pair pair;
  TrainOptions options = options_of(400);
  options.star.recover_steps = 30;
  options.star.first_alpha = 0.0;
  options.star.key_share = options.star.value_share = 0.5;
  options.star.sharpness = 50.0;
  options.star.gamma = 100.0;  // a random model's distributions differ by nats
  StarKvTrainer trainer(*pair.teacher, *pair.student, kIds, options);
  std::vector<TrainStep> steps;
  std::int64_t first_phase = 0;
  while (!trainer.finished()) {
    steps.push_back(trainer.step());
    if (trainer.training().progress().phase == train::StarKvPhase::compress) ++first_phase;
  }
  CHECK(first_phase < 399);  // the shares ended it
  CHECK(steps.front().divergence < 1e-3);
  CHECK(steps.back().kept_keys <= 0.5);
  CHECK(steps.back().kept_values <= 0.5);
  CHECK(steps.back().kept_keys > 0.2);
  // The second phase brings the distributions back together.
  CHECK(steps.back().divergence <
        0.8 * steps[static_cast<std::size_t>(first_phase) + 1].divergence);

  const std::string path = kFolder + "/star.safetensors";
  trainer.written().write(path);
  Model truncated(kFolder, pair.teacher->threads());
  const std::vector<lowrankkv::LayerBasis> bases = use_trained_weights(path, truncated);
  REQUIRE(bases.size() == 2);
  for (int layer = 0; layer < 2; ++layer) {
    const train::StarKvLayer& own = trainer.training().layer(layer);
    const auto& heads = bases[static_cast<std::size_t>(layer)].heads;
    for (std::size_t head = 0; head < 2; ++head) {
      CHECK(heads[head].key_rank == std::max(1, own.keys.blocks[head].rank()));
      CHECK(heads[head].value_rank == std::max(1, own.values.blocks[0].rank()));
      CHECK(heads[head].key_mean.size() == 6);  // the bias
    }
  }
  // A cache whose rows lie in the span of its maps loses nothing but its codes' rounding.
  const Calibration trained{.post_rope = {}, .pre_rope = {}, .star_kv = bases};
  const auto store_of = [&](const std::string& method) {
    return make_store({.method = method, .ratio = 1.0, .storage = lowrankkv::DType::f32},
                      truncated.config(), 64, trained, truncated.threads());
  };
  const auto outputs = [&](KvStore& store) {
    store.create(0);
    return truncated.forward(kIds, 0, [&](int layer, const Projected& rows, float* out) {
      store.prefill(layer, 0, static_cast<std::int64_t>(kIds.size()), rows, out);
    });
  };
  const auto full = store_of("FullKV"), low = store_of("StarKV");
  // Exact attention of a prompt: the engine rotates keys for the one, the cache for the other.
  const auto exact = outputs(*full), own = outputs(*low);
  REQUIRE(own.size() == exact.size());
  float largest = 0.0F, furthest = 0.0F;
  for (std::size_t i = 0; i < own.size(); ++i) {
    largest = std::max(largest, std::abs(exact[i]));
    furthest = std::max(furthest, std::abs(own[i] - exact[i]));
  }
  CHECK(furthest < 1e-5F * largest);
  CHECK_THROWS_WITH(
      make_store({.method = "StarKV"}, truncated.config(), 64, {}, truncated.threads()),
      "StarKV needs ranks that train-projector learned; --trained names its file (StarKVStatic has "
      "ranks from activations)");
  // The file is of the model before: the truncated one has other weights.
  CHECK_THROWS_WITH_AS(use_trained_weights(path, truncated),
                       doctest::Contains("train.model: the file has "), lowrankkv::ValueError);
}

TEST_CASE("a step that leads to numbers that are not finite changes nothing") {
  Pair pair;
  TrainOptions options = options_of(3);
  options.rate = 1e308;
  options.weight_decay = 1e3;
  StarKvTrainer trainer(*pair.teacher, *pair.student, kIds, options);
  const std::vector<std::byte> before = bytes_of(trainer);
  CHECK_THROWS_AS(trainer.step(), lowrankkv::ValueError);
  CHECK(bytes_of(trainer) == before);
  CHECK(trainer.training().progress().step == 0);
}

TEST_CASE("what cannot be trained says why") {
  Pair pair;
  const auto message_of = [&](const std::function<void(TrainOptions&)>& change,
                              std::vector<std::int32_t> text = kIds) {
    TrainOptions options = options_of(3);
    change(options);
    try {
      StarKvTrainer trainer(*pair.teacher, *pair.student, std::move(text), options);
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
    return std::string("nothing was raised");
  };
  CHECK(message_of([](TrainOptions& own) { own.batch = 0; }) ==
        "train: batch 0, at least 1 expected");
  CHECK(message_of([](TrainOptions& own) { own.window = 65; }) ==
        "train: window 65, 2 to the model's positions expected");
  CHECK(message_of([](TrainOptions& own) { own.rate = -1.0; }) ==
        "train: rate -1, 0 or more and finite expected");
  CHECK(message_of([](TrainOptions& own) { own.warmup = -2; }) ==
        "train: warmup -2, at least 0 expected");
  CHECK(message_of([](TrainOptions& own) { own.star.key_share = 1.5; }) ==
        "STAR-KV: key_share 1.5, 0 to 1 expected");
  CHECK(message_of([](TrainOptions&) {}, {1, 2, 3}) == "train: the text has 3 tokens, a window 12");
  Model& model = *pair.student;
  CHECK_THROWS_WITH(model.replace_key_value(0, std::vector<float>(3), model.layer(0).value.weight),
                    "replace_key_value: 3 weights of keys, the layer has 288");
  CHECK_THROWS_WITH(model.gradients_of({}, {}, {}),
                    "gradients_of: 0 tokens, at least 1 is expected");
}
