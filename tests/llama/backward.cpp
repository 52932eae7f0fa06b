// SPDX-License-Identifier: Apache-2.0
// Gradients of the loss with respect to keys and values: against finite differences in f64 of a
// plain forward pass.
#include <doctest/doctest.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "model.hpp"
#include "tiny_model.hpp"

using namespace llama;
using namespace tiny;

namespace {

constexpr int kTokens = 12;
const std::vector<std::int32_t> kIds{1, 17, 3, 3, 29, 8, 39, 0, 11, 21, 5, 14};
const std::vector<std::int32_t> kLabels{17, -1, 3, 29, 8, 39, 0, -1, 21, 5, 14, 2};

double loss_of(const Matrix& logits) {
  double loss = 0.0;
  for (int t = 0; t < kTokens; ++t) {
    const std::int32_t label = kLabels[static_cast<std::size_t>(t)];
    if (label < 0) continue;
    const Eigen::ArrayXd row = logits.row(t).array();
    loss -= row[label] - row.maxCoeff() - std::log((row - row.maxCoeff()).exp().sum());
  }
  return loss;
}

}  // namespace

TEST_CASE("gradients are finite differences, for every layer, head, channel and token") {
  for (const std::string family : {"llama", "qwen3", "smollm3"}) {
    for (const int threads : {1, 3}) {
      CAPTURE(family);
      CAPTURE(threads);
      const bool separate = threads == 1 || family == "smollm3";
      // As the family has them: biases and a head_dim of its own, norms, layers without a rotation.
      TinyModel tiny(separate, family == "qwen3" ? 8 : 6);
      const int width = 2 * tiny.head_dim;
      std::string config = kConfig;
      if (family != "llama") {
        tiny.remove_biases("qkvo");
        config = config_of(family, tiny.head_dim);
      }
      if (family == "qwen3") tiny.add_head_norms();
      if (family == "smollm3") {
        tiny.rotary = {threads == 1, threads != 1};
        config += threads == 1 ? R"(, "no_rope_layers": [1, 0])" : R"(, "no_rope_layers": [0, 1])";
      }
      config +=
          separate ? R"(, "tie_word_embeddings": false})" : R"(, "tie_word_embeddings": true})";
      const std::string folder = "tiny_backward_test";
      tiny.write(folder, config);
      const Model model(folder, std::make_shared<lowrankkv::cpu::ThreadPool>(threads));
      std::vector<std::map<std::string, std::vector<float>>> gradients(2);
      std::vector<int> order;
      const double loss = model.loss_gradients(
          kIds,
          [](std::int64_t row, const float* probabilities) {
            float sum = 0.0F;
            for (int id = 0; id < 40; ++id) sum += probabilities[id];
            CHECK(std::abs(sum - 1.0F) < 1e-5F);
            return kLabels[static_cast<std::size_t>(row)];
          },
          [&](int layer, std::int64_t n, const RowGradients& own) {
            REQUIRE(n == kTokens);
            order.push_back(layer);
            auto& of_layer = gradients[static_cast<std::size_t>(layer)];
            of_layer["key"].assign(own.key, own.key + kTokens * width);
            of_layer["pre"].assign(own.pre_rope_key, own.pre_rope_key + kTokens * width);
            of_layer["value"].assign(own.value, own.value + kTokens * width);
          });
      CHECK(order == std::vector<int>{1, 0});
      const std::vector<double> frequencies = model.config().rope_frequencies;
      const double expected = loss_of(tiny.forward(kIds, frequencies));
      CHECK(std::abs(loss - expected) < 1e-4 * expected);
      for (int layer = 0; layer < 2; ++layer) {
        for (const std::string what : {"pre", "key", "value"}) {
          const auto& own = gradients[static_cast<std::size_t>(layer)].at(what);
          double largest = 0.0, error = 0.0;
          for (int at = 0; at < kTokens * width; ++at) {
            const auto shifted = [&](double step) {
              return loss_of(tiny.forward(kIds, frequencies,
                                          [&](int of, const std::string& kind, Matrix& rows) {
                                            if (of == layer && kind == what)
                                              rows(at / width, at % width) += step;
                                          }));
            };
            const double difference = (shifted(1e-5) - shifted(-1e-5)) / 2e-5;
            largest = std::max(largest, std::abs(difference));
            error = std::max(
                error,
                std::abs(difference - static_cast<double>(own[static_cast<std::size_t>(at)])));
          }
          CAPTURE(layer);
          CAPTURE(what);
          CHECK(largest > 1e-3);
          CHECK(error < 2e-4 * largest);
        }
      }
      std::filesystem::remove_all(folder);
    }
  }
}

TEST_CASE("what cannot be differentiated says why") {
  const TinyModel tiny(true);
  const std::string folder = "tiny_backward_error_test";
  tiny.write(folder, kConfig + "}");
  const Model model(folder, std::make_shared<lowrankkv::cpu::ThreadPool>(1));
  const auto observe = [](int, std::int64_t, const RowGradients&) {};
  CHECK_THROWS_WITH(model.loss_gradients(
                        {}, [](std::int64_t, const float*) { return 0; }, observe),
                    "loss_gradients: 0 tokens, at least 1 is expected");
  CHECK_THROWS_WITH(model.loss_gradients(
                        {1, 2}, [](std::int64_t, const float*) { return 40; }, observe),
                    "loss_gradients: label 40, vocabulary has 40");
  std::filesystem::remove_all(folder);
}
