// SPDX-License-Identifier: Apache-2.0
// The model on the GPU against the one on the CPU: prompts and decode steps, every family, with the
// same plain attention. Runs on a GPU, and emulated.
#include "device_model.hpp"

#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "model.hpp"
#include "tiny_model.hpp"

using namespace llama;
using namespace tiny;

namespace device_model {
namespace {

using Floats = std::vector<float>;

/// Rows on the host, wherever they are.
Floats on_host(const float* rows, std::int64_t size) {
  Floats values(static_cast<std::size_t>(size));
  REQUIRE(cudaMemcpy(values.data(), rows, values.size() * sizeof(float), cudaMemcpyDefault) ==
          cudaSuccess);
  return values;
}

/// Attention over all tokens so far, and everything that it was given.
class PlainAttention {
 public:
  PlainAttention(const Config& config, std::int64_t n) : config_(config), n_(n) {
    layers_.resize(static_cast<std::size_t>(config.num_layers));
  }
  void next_step(std::int64_t n) { n_ = n; }
  void operator()(int layer, const Projected& rows, float* out) {
    const int dim = config_.head_dim, group = config_.num_qo_heads / config_.num_kv_heads;
    const std::int64_t kv = config_.num_kv_heads * dim, qo = config_.num_qo_heads * dim;
    Layer& own = layers_[static_cast<std::size_t>(layer)];
    const Floats query = on_host(rows.query, n_ * qo), key = on_host(rows.key, n_ * kv),
                 value = on_host(rows.value, n_ * kv);
    const Floats before = on_host(rows.pre_rope_key, n_ * kv);
    for (const Floats* part : {&query, &key, &value, &before})
      given.insert(given.end(), part->begin(), part->end());
    own.key.insert(own.key.end(), key.begin(), key.end());
    own.value.insert(own.value.end(), value.begin(), value.end());
    Floats result(static_cast<std::size_t>(n_ * qo), 0.0F);
    const std::int64_t all = static_cast<std::int64_t>(own.key.size()) / kv;
    for (std::int64_t token = 0; token < n_; ++token) {
      for (int head = 0; head < config_.num_qo_heads; ++head) {
        const float* q = query.data() + token * qo + head * dim;
        float* to = result.data() + token * qo + head * dim;
        std::vector<double> weights;
        double sum = 0.0;
        for (std::int64_t i = 0; i <= all - n_ + token; ++i) {
          double logit = 0.0;
          for (int c = 0; c < dim; ++c)
            logit += static_cast<double>(q[c]) *
                     static_cast<double>(
                         own.key[static_cast<std::size_t>(i * kv + head / group * dim + c)]);
          weights.push_back(std::exp(logit / std::sqrt(static_cast<double>(dim))));
          sum += weights.back();
        }
        for (int c = 0; c < dim; ++c) {
          double mean = 0.0;
          for (std::size_t i = 0; i < weights.size(); ++i)
            mean +=
                weights[i] / sum *
                static_cast<double>(own.value[i * static_cast<std::size_t>(kv) +
                                              static_cast<std::size_t>(head / group * dim + c)]);
          to[c] = static_cast<float>(mean);
        }
      }
    }
    REQUIRE(cudaMemcpy(out, result.data(), result.size() * sizeof(float), cudaMemcpyDefault) ==
            cudaSuccess);
  }

  Floats given;

 private:
  struct Layer {
    Floats key, value;
  };
  Config config_;
  std::int64_t n_;
  std::vector<Layer> layers_;
};

double largest_difference(const Floats& a, const Floats& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i)
    largest = std::max(largest, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])) /
                                    (1.0 + std::abs(static_cast<double>(b[i]))));
  return largest;
}

void compare(const TinyModel& tiny, const std::string& config) {
  const std::string folder = "device_model_test";
  tiny.write(folder, config);
  const Model model(folder, std::make_shared<lowrankkv::cpu::ThreadPool>(2));
  std::filesystem::remove_all(folder);
  const std::unique_ptr<DeviceModel> device = make_device_model(model);
  PlainAttention on_cpu(model.config(), 0), on_gpu(model.config(), 0);
  std::int64_t first = 0;
  for (const int n : {9, 1, 3, 1, 17}) {
    std::vector<std::int32_t> tokens;
    for (int i = 0; i < n; ++i) tokens.push_back(static_cast<std::int32_t>((first + i) * 7 % 40));
    on_cpu.next_step(n);
    on_gpu.next_step(n);
    const Floats expected = model.forward(tokens, first, std::ref(on_cpu));
    const Floats hidden = device->forward(tokens, first, std::ref(on_gpu));
    CHECK(largest_difference(hidden, expected) < 2e-5);
    CHECK(largest_difference(on_gpu.given, on_cpu.given) < 2e-5);
    CHECK(largest_difference(device->logits(expected.data(), n), model.logits(expected, 0, n)) <
          1e-5);
    first += n;
  }
}

}  // namespace

TEST_CASE("a model gives on the GPU what it gives on the CPU") {
  for (const bool separate_head : {false, true}) {
    for (const int dim : {6, 16, 80}) {
      CAPTURE(separate_head);
      CAPTURE(dim);
      const std::string tied = separate_head ? R"(, "tie_word_embeddings": false})"
                                             : R"(, "tie_word_embeddings": true})";
      TinyModel tiny(separate_head, dim);
      compare(tiny, config_of("llama", dim) + ", \"attention_bias\": true" + tied);
      tiny.remove_biases("o");
      compare(tiny, config_of("qwen2", dim) + tied);
      tiny.remove_biases("qkv");
      compare(tiny, config_of("mistral", dim) + ", \"sliding_window\": null" + tied);
      TinyModel still = tiny;
      compare(still, config_of("smollm3", dim) + ", \"no_rope_layers\": [1, 0]" + tied);
      tiny.add_head_norms();
      compare(tiny, config_of("qwen3", dim) + tied);
    }
  }
}

}  // namespace device_model
