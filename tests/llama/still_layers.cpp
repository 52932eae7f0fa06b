// SPDX-License-Identifier: Apache-2.0
// Layers without a rotary embedding (SmolLM3): statistics of both forms of keys are the same there,
// and caches that rotate keys when they read them leave these layers' keys alone.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "evaluate.hpp"
#include "loss_metric.hpp"
#include "lowrankkv/calibrate/bundle.hpp"
#include "tiny_model.hpp"

using namespace llama;
using namespace tiny;
using lowrankkv::Rope;

namespace still_layers {
namespace {

constexpr int kDim = 16, kPrompt = 112, kStep = 8, kTokens = 160;
const std::string kFolder = "still_layers_test";

/// A folder whose tokens are single characters, and its engine.
Engine engine_of(const TinyModel& tiny, const std::string& family, const std::string& members) {
  std::string config = config_of(family, kDim) + members + "}";
  config.replace(config.find("\"max_position_embeddings\": 64"), 29,
                 "\"max_position_embeddings\": 512");
  tiny.write(kFolder, config);
  nlohmann::json vocabulary;
  const std::string characters = "abcdefghijklmnopqrstuvwxyz0123456789ABCD";
  for (std::size_t i = 0; i < characters.size(); ++i) vocabulary[std::string(1, characters[i])] = i;
  nlohmann::json tokenizer;
  tokenizer["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", false}};
  tokenizer["model"] = {
      {"type", "BPE"}, {"vocab", vocabulary}, {"merges", nlohmann::json::array()}};
  std::ofstream(kFolder + "/tokenizer.json") << tokenizer.dump();
  return {kFolder, 2};
}

std::string random_text(int length) {
  std::mt19937 random(3);
  std::string text;
  for (int i = 0; i < length; ++i) text += static_cast<char>('a' + random() % 26);
  return text;
}

/// Root mean square difference of the logits behind `kPrompt` tokens from `expected`, over theirs:
/// a prompt, then decode steps of a few tokens.
double error_of(const Engine& engine, KvStore& store, const std::vector<std::int32_t>& ids,
                const Matrix& expected) {
  store.create(0);
  prefill(engine, store, 0, {ids.begin(), ids.begin() + kPrompt});
  store.maintain(0);
  double error = 0.0, size = 0.0;
  for (int at = kPrompt; at < kTokens; at += kStep) {
    const auto logits = engine.model.logits(
        decode(engine, store, 0, {ids.begin() + at, ids.begin() + at + kStep}), 0, kStep);
    for (int i = 0; i < kStep * 40; ++i) {
      const double right = expected(at + i / 40, i % 40);
      error += std::pow(logits[static_cast<std::size_t>(i)] - right, 2);
      size += right * right;
    }
  }
  CHECK(store.num_tokens(0) == kTokens);
  return std::sqrt(error / size);
}

}  // namespace

TEST_CASE("every method attends rightly in layers without a rotary embedding") {
  for (const bool first : {true, false}) {  // the layer that rotates
    TinyModel tiny(true, kDim);
    tiny.remove_biases("qkvo");
    tiny.rotary = {first, !first};
    const Engine engine =
        engine_of(tiny, "smollm3",
                  std::string(R"(, "tie_word_embeddings": false, "no_rope_layers": )") +
                      (first ? "[1, 0]" : "[0, 1]"));
    const std::string text = random_text(4096);
    const Calibration calibration = calibrate(engine, text, 4096, 256, {Rope::post, Rope::pre});
    const std::vector<std::string> paths = {kFolder + "/post", kFolder + "/pre"};
    lowrankkv::calibrate::save_moments(paths[0], calibration.post_rope);
    lowrankkv::calibrate::save_moments(paths[1], calibration.pre_rope);
    const Calibration read = load_bases(engine, paths);
    std::vector<std::int32_t> ids = encode_documents(engine, text);
    ids.resize(kTokens);
    const Matrix expected = tiny.forward(ids, engine.model.config().rope_frequencies);
    for (const MethodInfo& info : methods()) {
      if (info.pre_rope) continue;  // that is Budgeted with pre-RoPE keys
      CAPTURE(info.name);
      double errors[2];
      for (const bool pre : {false, true}) {
        const auto store = make_store(
            {.method = info.name, .ratio = 1.0, .storage = lowrankkv::DType::f32, .pre_rope = pre},
            engine.model.config(), 256, read, engine.threads);
        errors[pre] = error_of(engine, *store, ids, expected);
        CHECK(store->memory().total() == store->memory(0).total());
        store->erase(0);
        store->create(0);
        CHECK(store->num_tokens(0) == 0);
      }
      CHECK(errors[1] < 1.5 * errors[0] + 1e-4);
    }
    std::filesystem::remove_all(kFolder);
  }
}

TEST_CASE("statistics of a layer without a rotary embedding are those of both forms of keys") {
  const TinyModel tiny(true, kDim);
  const std::string members =
      R"(, "attention_bias": true, "tie_word_embeddings": false, "no_rope_layers": )";
  const Engine engine = engine_of(tiny, "smollm3", members + "[1, 0]");
  const std::string text = random_text(1024);
  for (const auto metric :
       {lowrankkv::calibrate::CodingMetric::output, lowrankkv::calibrate::CodingMetric::loss}) {
    Calibration of = calibrate(engine, text, 1024, 256, {Rope::post, Rope::pre}, metric);
    if (metric == lowrankkv::calibrate::CodingMetric::loss)
      use_loss_metric(engine, text, 1024, 256, of);
    for (int layer = 0; layer < 2; ++layer) {
      const auto& post = of.post_rope[static_cast<std::size_t>(layer)];
      const auto& pre = of.pre_rope[static_cast<std::size_t>(layer)];
      for (int head = 0; head < 2; ++head) {
        const auto same = [&](const Eigen::MatrixXd& a, const Eigen::MatrixXd& b) {
          REQUIRE(a.norm() > 0.0);
          if (layer == 1)
            CHECK((a - b).norm() < 1e-6 * a.norm());
          else
            CHECK((a - b).norm() > 1e-2 * a.norm());
        };
        same(post.head(head).key.second, pre.head(head).key.second);
        same(post.head(head).query.second, pre.head(head).query.second);
        same(post.coding().head(head).key_metric, pre.coding().head(head).key_metric);
        same(post.coding().head(head).key.second, pre.coding().head(head).key.second);
      }
    }
  }
  const auto weights = calibrate_from_weights(engine);
  const auto swapped = calibrate_from_weights(engine_of(tiny, "smollm3", members + "[0, 1]"));
  for (std::size_t layer = 0; layer < 2; ++layer) {
    const Eigen::MatrixXd a = weights[layer].head(0).query.second,
                          b = swapped[layer].head(0).query.second;
    CHECK(a.trace() == doctest::Approx(b.trace()));
    CHECK((a - b).norm() > 1e-2 * a.norm());
    CHECK(weights[layer].head(0).key.second == swapped[layer].head(0).key.second);
  }
  TinyModel normed = tiny;
  normed.add_head_norms();
  CHECK_THROWS_WITH(
      calibrate_from_weights(
          engine_of(normed, "qwen3", R"(, "attention_bias": true, "tie_word_embeddings": false)")),
      "calibration from weights: the model's queries and keys have norms of each head, whose "
      "statistics need a text");
  std::filesystem::remove_all(kFolder);
}

}  // namespace still_layers
