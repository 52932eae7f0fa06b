// SPDX-License-Identifier: Apache-2.0
// Folders of other shapes: several files, a separate head, biases, Llama-3 scaling, f16; and
// folders that are wrong.
#include <doctest/doctest.h>

#include <Eigen/Dense>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>

#include "kv_store.hpp"
#include "lowrankkv/io/safetensors.hpp"
#include "model.hpp"

using namespace llama;

namespace {

using Matrix = Eigen::MatrixXd;

/// A random model of hidden size 24, 2 layers, 4 query heads, 2 KV heads of 6 channels, 40 tokens.
struct TinyModel {
  explicit TinyModel(bool separate_head) {
    std::mt19937 random(5);
    const auto tensor = [&](const std::string& name, std::vector<std::int64_t> shape,
                            double scale) {
      std::normal_distribution<double> normal(0.0, scale);
      std::int64_t count = 1;
      for (const auto extent : shape) count *= extent;
      std::vector<float> values;
      for (std::int64_t i = 0; i < count; ++i) values.push_back(static_cast<float>(normal(random)));
      weights[name] = {shape, values};
    };
    tensor("model.embed_tokens.weight", {40, 24}, 1.0);
    tensor("model.norm.weight", {24}, 1.0);
    if (separate_head) tensor("lm_head.weight", {40, 24}, 0.3);
    for (int i = 0; i < 2; ++i) {
      const std::string prefix = "model.layers." + std::to_string(i) + ".";
      tensor(prefix + "input_layernorm.weight", {24}, 1.0);
      tensor(prefix + "post_attention_layernorm.weight", {24}, 1.0);
      tensor(prefix + "self_attn.q_proj.weight", {24, 24}, 0.3);
      tensor(prefix + "self_attn.q_proj.bias", {24}, 0.3);
      tensor(prefix + "self_attn.k_proj.weight", {12, 24}, 0.3);
      tensor(prefix + "self_attn.v_proj.weight", {12, 24}, 0.3);
      tensor(prefix + "self_attn.o_proj.weight", {24, 24}, 0.3);
      tensor(prefix + "mlp.gate_proj.weight", {30, 24}, 0.3);
      tensor(prefix + "mlp.up_proj.weight", {30, 24}, 0.3);
      tensor(prefix + "mlp.down_proj.weight", {24, 30}, 0.3);
    }
  }
  void write(const std::string& folder, const std::string& config) const {
    std::filesystem::create_directories(folder);
    std::ofstream(folder + "/config.json") << config;
    lowrankkv::io::SafetensorsWriter files[2];
    int next = 0;
    for (const auto& [name, tensor] : weights)
      files[next++ % 2].add(name, tensor.first, tensor.second);
    files[0].write(folder + "/model-00001-of-00002.safetensors");
    files[1].write(folder + "/model-00002-of-00002.safetensors");
  }
  Matrix matrix(const std::string& name) const {
    const auto& [shape, values] = weights.at(name);
    Matrix m(shape[0], shape.size() > 1 ? shape[1] : 1);
    for (Eigen::Index i = 0; i < m.rows(); ++i) {
      for (Eigen::Index j = 0; j < m.cols(); ++j)
        m(i, j) = values[static_cast<std::size_t>(i * m.cols() + j)];
    }
    return m;
  }
  /// The forward pass as the architecture defines it, in f64: logits [n, 40].
  Matrix forward(const std::vector<std::int32_t>& ids,
                 const std::vector<double>& frequencies) const {
    const Eigen::Index n = static_cast<Eigen::Index>(ids.size());
    Matrix x(n, 24);
    for (Eigen::Index t = 0; t < n; ++t)
      x.row(t) = matrix("model.embed_tokens.weight").row(ids[static_cast<std::size_t>(t)]);
    const auto norm = [](const Matrix& in, const Matrix& weight) {
      Matrix out = in;
      for (Eigen::Index t = 0; t < in.rows(); ++t)
        out.row(t) = in.row(t) / std::sqrt(in.row(t).squaredNorm() / 24.0 + 1e-5) *
                     weight.col(0).asDiagonal();
      return out;
    };
    for (int i = 0; i < 2; ++i) {
      const std::string prefix = "model.layers." + std::to_string(i) + ".";
      const Matrix h = norm(x, matrix(prefix + "input_layernorm.weight"));
      Matrix q = h * matrix(prefix + "self_attn.q_proj.weight").transpose();
      q.rowwise() += matrix(prefix + "self_attn.q_proj.bias").col(0).transpose();
      Matrix k = h * matrix(prefix + "self_attn.k_proj.weight").transpose();
      const Matrix v = h * matrix(prefix + "self_attn.v_proj.weight").transpose();
      const auto rotate = [&](Matrix& rows, int heads) {
        for (Eigen::Index t = 0; t < n; ++t) {
          for (int head = 0; head < heads; ++head) {
            for (int c = 0; c < 3; ++c) {
              const double angle =
                  frequencies[static_cast<std::size_t>(c)] * static_cast<double>(t);
              const double a = rows(t, head * 6 + c), b = rows(t, head * 6 + c + 3);
              rows(t, head * 6 + c) = a * std::cos(angle) - b * std::sin(angle);
              rows(t, head * 6 + c + 3) = b * std::cos(angle) + a * std::sin(angle);
            }
          }
        }
      };
      rotate(q, 4);
      rotate(k, 2);
      Matrix attended = Matrix::Zero(n, 24);
      for (int head = 0; head < 4; ++head) {
        for (Eigen::Index t = 0; t < n; ++t) {
          Eigen::VectorXd logits = k.block(0, head / 2 * 6, t + 1, 6) *
                                   q.block(t, head * 6, 1, 6).transpose() / std::sqrt(6.0);
          logits = (logits.array() - logits.maxCoeff()).exp();
          attended.block(t, head * 6, 1, 6) =
              (logits / logits.sum()).transpose() * v.block(0, head / 2 * 6, t + 1, 6);
        }
      }
      x += attended * matrix(prefix + "self_attn.o_proj.weight").transpose();
      const Matrix m = norm(x, matrix(prefix + "post_attention_layernorm.weight"));
      const Matrix gate = m * matrix(prefix + "mlp.gate_proj.weight").transpose();
      const Matrix up = m * matrix(prefix + "mlp.up_proj.weight").transpose();
      x += (gate.array() / (1.0 + (-gate.array()).exp()) * up.array()).matrix() *
           matrix(prefix + "mlp.down_proj.weight").transpose();
    }
    const bool separate = weights.count("lm_head.weight") != 0;
    return norm(x, matrix("model.norm.weight")) *
           matrix(separate ? "lm_head.weight" : "model.embed_tokens.weight").transpose();
  }
  std::map<std::string, std::pair<std::vector<std::int64_t>, std::vector<float>>> weights;
};

const std::string kConfig =
    R"({"model_type": "llama", "hidden_size": 24, "intermediate_size": 30, "num_hidden_layers": 2, "num_attention_heads": 4,
 "num_key_value_heads": 2, "vocab_size": 40, "rope_theta": 100.0, "max_position_embeddings": 64)";

std::string error_of(const std::string& folder) {
  try {
    Model model(folder, std::make_shared<lowrankkv::cpu::ThreadPool>(1));
  } catch (const std::exception& error) {
    return error.what();
  }
  return "loaded";
}

}  // namespace

TEST_CASE(
    "several files, separate or tied head, biases and rope scaling give the architecture's "
    "logits") {
  for (const bool separate : {true, false}) {
    for (const bool scaled : {true, false}) {
      const TinyModel tiny(separate);
      const std::string folder = "tiny_model_test";
      tiny.write(
          folder,
          kConfig +
              (scaled
                   ? R"(, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}})"
                   : "}"));
      std::vector<double> frequencies{1.0, std::pow(100.0, -1.0 / 3.0),
                                      std::pow(100.0, -2.0 / 3.0)};
      if (scaled) {
        for (double& f : frequencies) {  // wavelengths 6.3 (kept), 29 (blended), 135 (stretched)
          const double wavelength = 2.0 * 3.14159265358979 / f;
          const double blend = (32.0 / wavelength - 1.0) / 3.0;
          f = wavelength < 8.0    ? f
              : wavelength > 32.0 ? f / 8.0
                                  : (1.0 - blend) * f / 8.0 + blend * f;
        }
      }
      const Model model(folder, std::make_shared<lowrankkv::cpu::ThreadPool>(2));
      const std::vector<std::int32_t> ids{3, 39, 0, 7, 7, 21, 5, 30, 11, 2, 17, 9};
      const auto store = make_store({.method = "FullKV", .storage = lowrankkv::DType::f32},
                                    model.config(), 64, {}, model.threads());
      store->create(0);
      const auto hidden = model.forward(ids, 0, [&](int layer, const Projected& rows, float* out) {
        store->prefill(layer, 0, 12, rows, out);
      });
      const auto logits = model.logits(hidden, 0, 12);
      const Matrix expected = tiny.forward(ids, frequencies);
      for (int t = 0; t < 12; ++t) {
        for (int id = 0; id < 40; ++id)
          CHECK(std::abs(logits[static_cast<std::size_t>(t * 40 + id)] - expected(t, id)) <
                1e-4 * (1.0 + std::abs(expected(t, id))));
      }
      std::filesystem::remove_all(folder);
    }
  }
}

TEST_CASE("folders that cannot be used say why") {
  const TinyModel tiny(true);
  const std::string folder = "wrong_model_test";
  CHECK(error_of("no_such_folder").find("config.json: cannot open") == 0);
  tiny.write(folder, kConfig + R"(, "hidden_act": "gelu"})");
  CHECK(error_of(folder) == "config.json: hidden_act gelu, expected silu");
  tiny.write(folder, kConfig + R"(, "rope_scaling": {"rope_type": "yarn"}})");
  CHECK(error_of(folder) ==
        "config.json: rope type yarn is not supported, expected default, linear or llama3");
  tiny.write(folder, R"({"model_type": "gpt2"})");
  CHECK(error_of(folder) == "config.json: model_type gpt2, expected llama");
  tiny.write(folder, R"({"model_type": "llama", )");
  CHECK(error_of(folder).find("parse error") != std::string::npos);
  tiny.write(folder, kConfig + R"(, "head_dim": 8})");
  CHECK(error_of(folder) ==
        "safetensors: tensor model.layers.0.self_attn.q_proj.weight has shape [24, 24], expected "
        "[32, 24]");
  tiny.write(folder, kConfig + "}");
  std::filesystem::resize_file(folder + "/model-00002-of-00002.safetensors", 300);
  CHECK(error_of(folder).find("safetensors: header of ") == 0);
  std::filesystem::remove(folder + "/model-00002-of-00002.safetensors");
  CHECK(error_of(folder).find(" is in none of 1 files") != std::string::npos);
  std::filesystem::remove_all(folder);
}
