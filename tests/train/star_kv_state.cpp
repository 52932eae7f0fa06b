// SPDX-License-Identifier: Apache-2.0
// The state of STAR-KV's training: what is restored has the bits of what was saved, and goes on as
// it would have.
#include "lowrankkv/train/star_kv_state.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "support/matrices.hpp"

namespace star_kv_state_tests {

using namespace lowrankkv;
using Eigen::MatrixXd;
using support::FloatRows;
using support::gaussian;
using support::Random;
using train::Decomposition;
using train::StarKvFactors;
using train::StarKvLayer;
using train::StarKvOptions;
using train::StarKvPhase;
using train::StarKvProjection;
using train::StarKvTraining;

constexpr CacheShape kShape{6, 3, 5};
constexpr int kLayers = 4, kHidden = 11;

StarKvTraining some_training(Decomposition keys, Decomposition values) {
  Random random(71);
  std::vector<FloatRows> weights;
  for (int i = 0; i < 2 * kLayers; ++i) weights.emplace_back(gaussian(random, 15, kHidden));
  std::vector<train::StarKvWeights> views;
  for (std::size_t i = 0; i < kLayers; ++i)
    views.push_back({weights[2 * i].view(), weights[2 * i + 1].view()});
  StarKvOptions options;
  options.keys = keys;
  options.values = values;
  options.sharpness = 1.0 / 3.0;  // numbers whose decimals do not end
  options.first_alpha = 0.1;
  options.gamma = 0.7;
  options.compress_steps = 3;
  options.recover_steps = 2;
  options.key_share = 0.9;
  options.freeze_thresholds = false;
  options.protected_layers = {3, 0};
  return StarKvTraining(options, kShape, views);
}

/// One step of gradient descent towards weights of 0.
void step(StarKvTraining& training) {
  for (const int i : {1, 2}) {
    StarKvLayer change = training.gradient(i, training.key_weight(i), training.value_weight(i));
    for (StarKvProjection* part : {&change.keys, &change.values}) {
      for (StarKvFactors& block : part->blocks) {
        block.left *= -0.01, block.sigma *= -0.01, block.right *= -0.01;
        block.alpha *= -0.3;
      }
    }
    training.move(i, change);
  }
  training.finish_step();
}

void check_same(const StarKvTraining& a, const StarKvTraining& b) {
  CHECK(a.options() == b.options());
  CHECK(a.shape() == b.shape());
  CHECK(a.progress() == b.progress());
  REQUIRE(a.num_layers() == b.num_layers());
  for (int i = 0; i < a.num_layers(); ++i) {
    for (StarKvProjection StarKvLayer::*part : {&StarKvLayer::keys, &StarKvLayer::values}) {
      const StarKvProjection &own = a.layer(i).*part, &other = b.layer(i).*part;
      REQUIRE(own.blocks.size() == other.blocks.size());
      for (std::size_t k = 0; k < own.blocks.size(); ++k) {
        CHECK(own.blocks[k].left == other.blocks[k].left);
        CHECK(own.blocks[k].sigma == other.blocks[k].sigma);
        CHECK(own.blocks[k].right == other.blocks[k].right);
        CHECK(own.blocks[k].alpha == other.blocks[k].alpha);
      }
    }
  }
}

/// A file whose tensors and metadata `file` has, but for changed entries of its metadata.
io::Safetensors with_entry(const StarKvTraining& training, const std::string& key,
                           const std::string& value) {
  io::SafetensorsWriter writer = train::write_star_kv(training);
  writer.set_metadata(key, value);
  return io::Safetensors(writer.bytes());
}

TEST_CASE("a restored training has the same bits, and takes the same steps, from every phase on") {
  for (const Decomposition keys : {Decomposition::head_wise, Decomposition::joint}) {
    for (const Decomposition values : {Decomposition::head_wise, Decomposition::joint}) {
      StarKvTraining training = some_training(keys, values);
      bool stopped_in_first_phase = false;
      for (int at = 0; at <= 5; ++at) {
        const std::vector<std::byte> bytes =
            train::write_star_kv(training, {{"source", "a text"}}).bytes();
        StarKvTraining restored = train::read_star_kv(io::Safetensors(bytes), kShape, kLayers);
        check_same(restored, training);
        CHECK(train::write_star_kv(restored, {{"source", "a text"}}).bytes() == bytes);
        stopped_in_first_phase |=
            training.progress().keys_stopped && training.progress().phase == StarKvPhase::compress;
        if (at == 5) break;
        step(training);
        step(restored);
        check_same(restored, training);
      }
      CHECK(training.progress().phase == StarKvPhase::finished);
      CHECK(stopped_in_first_phase);
    }
  }
  const StarKvTraining training = some_training(Decomposition::head_wise, Decomposition::joint);
  const std::string path = "star_kv_state.safetensors";
  train::save_star_kv(path, training);
  const StarKvTraining loaded = train::load_star_kv(path, kShape, kLayers);
  std::remove(path.c_str());
  check_same(loaded, training);
  CHECK_THROWS_AS(train::load_star_kv("no_such_file.safetensors", kShape, kLayers), FormatError);
}

TEST_CASE("a state of another model, kind or progress is refused with both values") {
  const StarKvTraining training = some_training(Decomposition::head_wise, Decomposition::joint);
  const io::Safetensors file(train::write_star_kv(training).bytes());
  CHECK_THROWS_WITH_AS(train::read_star_kv(file, kShape, 5), "num_layers: state 4, model 5",
                       ShapeError);
  CHECK_THROWS_WITH_AS(train::read_star_kv(file, {6, 2, 5}, kLayers),
                       "num_kv_heads: state 3, model 2", ShapeError);
  CHECK_THROWS_WITH_AS(train::read_star_kv(file, {6, 3, 8}, kLayers), "head_dim: state 5, model 8",
                       ShapeError);
  const auto refused = [&](const std::string& key, const std::string& value) {
    try {
      static_cast<void>(train::read_star_kv(with_entry(training, key, value), kShape, kLayers));
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  CHECK(refused("source", "anything") == "accepted");
  CHECK(refused("format", "lowrankkv.moments") ==
        "STAR-KV state: format lowrankkv.moments, expected lowrankkv.star_kv");
  CHECK(refused("version", "2") == "STAR-KV state: version 2, expected 1");
  CHECK(refused("keys", "both") == "STAR-KV state: keys both, expected head_wise or joint");
  CHECK(refused("keys", "joint") ==
        "safetensors: tensor layers.1.keys.left has shape [3, 5, 5], expected [1, 15, 5]");
  CHECK(refused("step", "1e3") == "STAR-KV state: step 1e3, expected an integer");
  CHECK(refused("step", "") == "STAR-KV state: step , expected an integer");
  CHECK(refused("step", "99999999999999999999") ==
        "STAR-KV state: step 99999999999999999999, expected an integer");
  CHECK(refused("step", "-9223372036854775808") ==
        "STAR-KV: step -9223372036854775808, 0 to 5 expected");
  CHECK(refused("step", "1") == "STAR-KV: steps before this phase 1, 0 to 0 expected");
  CHECK(refused("phase_steps", "3") == "STAR-KV: phase_steps 3, 0 to 2 expected");
  CHECK(refused("phase", "recover") == "STAR-KV: steps before this phase 0, 1 to 3 expected");
  CHECK(refused("phase", "over") ==
        "STAR-KV state: phase over, expected compress or recover or finished");
  CHECK(refused("freeze_thresholds", "yes") ==
        "STAR-KV state: freeze_thresholds yes, expected 0 or 1");
  CHECK(refused("values_stopped", "1") ==
        "STAR-KV: thresholds of the values stopped at share 0, above 0 expected");
  CHECK(refused("protected_layers", "3  0") ==
        "STAR-KV state: protected_layers , expected an integer");
  CHECK(refused("protected_layers", "4000000000") ==
        "STAR-KV state: protected_layers 4000000000, expected 0 to 1073741824");
  CHECK(refused("protected_layers", "3") ==
        "safetensors: tensor layers.0.keys.left is missing among 17");
  CHECK(refused("compress_steps", "0") == "STAR-KV: compress_steps 0, 1 to 2^40 expected");
  io::SafetensorsWriter other;
  other.add("options", {5}, std::vector<double>(5));
  CHECK_THROWS_WITH_AS(train::read_star_kv(io::Safetensors(other.bytes()), kShape, kLayers),
                       "STAR-KV state: format missing, expected lowrankkv.star_kv", FormatError);
}

TEST_CASE("factors that do not fit the options, the shape or each other are refused") {
  const StarKvTraining training = some_training(Decomposition::head_wise, Decomposition::joint);
  const auto error_of = [&](auto&& change) {
    std::vector<StarKvLayer> layers;
    for (int i = 0; i < kLayers; ++i) layers.push_back(training.layer(i));
    change(layers);
    try {
      static_cast<void>(StarKvTraining(training.options(), kShape, layers, training.progress()));
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  using Layers = std::vector<StarKvLayer>;
  CHECK(error_of([](Layers&) {}) == "accepted");
  CHECK(error_of([](Layers& l) { l[0] = l[1]; }) == "blocks: head_wise 0, layer 0 keys 3");
  CHECK(error_of([](Layers& l) { l[1].values = l[1].keys; }) ==
        "blocks: joint 1, layer 1 values 3");
  CHECK(error_of([](Layers& l) { l[2].keys.blocks[1].right.conservativeResize(10, 5); }) ==
        "hidden: layer 2 keys 11, a block 10");
  CHECK(error_of([](Layers& l) { l[2].keys.blocks[1].left.conservativeResize(4, 5); }) ==
        "layer 2 keys: rows 14, num_kv_heads * head_dim 15");
  CHECK(error_of([](Layers& l) {
          l[2].keys.blocks[1].left.conservativeResize(4, 5);
          l[2].keys.blocks[2].left.conservativeResize(6, 5);
        }) == "channels: layer 2 keys 5, a block 4");
  CHECK(error_of([](Layers& l) {
          StarKvFactors& block = l[1].values.blocks[0];
          block = {MatrixXd::Zero(15, 12), Eigen::VectorXd::Zero(12), MatrixXd::Zero(11, 12), 0.0};
        }) == "layer 1 values: 12 singular values, 1 to 11 expected");
  CHECK(error_of([](Layers& l) {
          l[1].keys.blocks[0].alpha = HUGE_VAL;
        }).find("alpha inf, finite expected") != std::string::npos);
  CHECK(error_of([](Layers& l) {
          l[1].keys.blocks[0].sigma[0] = std::nan("");
        }).find("sigma nan") != std::string::npos);
}

}  // namespace star_kv_state_tests
