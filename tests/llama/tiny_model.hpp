// SPDX-License-Identifier: Apache-2.0
// A random model small enough for a plain forward pass in f64: the oracle of the example engine.
#pragma once

#include <Eigen/Dense>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "lowrankkv/io/safetensors.hpp"

namespace tiny {

using Matrix = Eigen::MatrixXd;

inline const std::string kFirst = "model-00001-of-00002.safetensors";
inline const std::string kSecond = "model-00002-of-00002.safetensors";
inline const std::string kIndex = "model.safetensors.index.json";

/// A random model of hidden size 24, 2 layers, 4 query heads, 2 KV heads of 6 channels or another
/// even number, 40 tokens.
struct TinyModel {
  explicit TinyModel(bool separate_head, int head_channels = 6) : head_dim(head_channels) {
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
      tensor(prefix + "self_attn.q_proj.weight", {4 * head_dim, 24}, 0.3);
      tensor(prefix + "self_attn.q_proj.bias", {4 * head_dim}, 0.3);
      tensor(prefix + "self_attn.k_proj.weight", {2 * head_dim, 24}, 0.3);
      tensor(prefix + "self_attn.k_proj.bias", {2 * head_dim}, 0.3);
      tensor(prefix + "self_attn.v_proj.weight", {2 * head_dim, 24}, 0.3);
      tensor(prefix + "self_attn.v_proj.bias", {2 * head_dim}, 0.3);
      tensor(prefix + "self_attn.o_proj.weight", {24, 4 * head_dim}, 0.3);
      tensor(prefix + "self_attn.o_proj.bias", {24}, 0.3);
      tensor(prefix + "mlp.gate_proj.weight", {30, 24}, 0.3);
      tensor(prefix + "mlp.up_proj.weight", {30, 24}, 0.3);
      tensor(prefix + "mlp.down_proj.weight", {24, 30}, 0.3);
    }
  }
  /// Takes the biases of the projections whose names begin with one of `first` away.
  void remove_biases(const std::string& first) {
    for (auto entry = weights.begin(); entry != weights.end();) {
      const std::size_t at = entry->first.find("self_attn.");
      const bool bias = entry->first.ends_with("_proj.bias") && at != std::string::npos &&
                        first.find(entry->first[at + 10]) != std::string::npos;
      entry = bias ? weights.erase(entry) : std::next(entry);
    }
  }
  /// Gives every head's queries and keys a norm, as Qwen3 has them.
  void add_head_norms() {
    std::mt19937 random(6);
    std::normal_distribution<float> normal(0.0F, 1.0F);
    for (const char* name : {"q_norm", "k_norm"}) {
      for (int i = 0; i < 2; ++i) {
        auto& [shape, values] =
            weights["model.layers." + std::to_string(i) + ".self_attn." + name + ".weight"];
        shape = {head_dim};
        for (int c = 0; c < head_dim; ++c) values.push_back(normal(random));
      }
    }
  }
  void write(const std::string& folder, const std::string& config) const {
    std::filesystem::create_directories(folder);
    std::ofstream(folder + "/config.json") << config;
    lowrankkv::io::SafetensorsWriter files[2];
    int next = 0;
    nlohmann::json map = nlohmann::json::object();
    for (const auto& [name, tensor] : weights) {
      map[name] = next % 2 == 0 ? kFirst : kSecond;
      files[next++ % 2].add(name, tensor.first, tensor.second);
    }
    files[0].write(folder + "/" + kFirst);
    files[1].write(folder + "/" + kSecond);
    std::ofstream(folder + "/" + kIndex) << nlohmann::json{{"weight_map", map}}.dump();
  }
  /// All weights in one file.
  void write_single(const std::string& path) const {
    lowrankkv::io::SafetensorsWriter file;
    for (const auto& [name, tensor] : weights) file.add(name, tensor.first, tensor.second);
    file.write(path);
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
  /// A matrix of a layer on its way: "pre" keys before their rotation, "key" and "value" as
  /// attention sees them, [n, 2 head_dim].
  using Change = std::function<void(int layer, const std::string& what, Matrix& rows)>;
  /// The forward pass as the architecture defines it, in f64: logits [n, 40]. `change` may alter
  /// keys and values.
  Matrix forward(const std::vector<std::int32_t>& ids, const std::vector<double>& frequencies,
                 const Change& change = {}) const {
    const Eigen::Index n = static_cast<Eigen::Index>(ids.size());
    Matrix x(n, 24);
    for (Eigen::Index t = 0; t < n; ++t)
      x.row(t) = matrix("model.embed_tokens.weight").row(ids[static_cast<std::size_t>(t)]);
    const auto norm = [](const Matrix& in, const Matrix& weight) {
      Matrix out = in;
      for (Eigen::Index t = 0; t < in.rows(); ++t)
        out.row(t) = in.row(t) /
                     std::sqrt(in.row(t).squaredNorm() / static_cast<double>(in.cols()) + 1e-5) *
                     weight.col(0).asDiagonal();
      return out;
    };
    for (int i = 0; i < 2; ++i) {
      const std::string prefix = "model.layers." + std::to_string(i) + ".";
      const auto add_bias = [&](Matrix& rows, const std::string& name) {
        if (weights.count(name) != 0) rows.rowwise() += matrix(name).col(0).transpose();
      };
      const Matrix h = norm(x, matrix(prefix + "input_layernorm.weight"));
      Matrix q = h * matrix(prefix + "self_attn.q_proj.weight").transpose();
      add_bias(q, prefix + "self_attn.q_proj.bias");
      Matrix k = h * matrix(prefix + "self_attn.k_proj.weight").transpose();
      add_bias(k, prefix + "self_attn.k_proj.bias");
      Matrix v = h * matrix(prefix + "self_attn.v_proj.weight").transpose();
      add_bias(v, prefix + "self_attn.v_proj.bias");
      const auto norm_heads = [&](Matrix& rows, int heads, const std::string& name) {
        if (weights.count(name) == 0) return;
        for (int head = 0; head < heads; ++head)
          rows.middleCols(head * head_dim, head_dim) =
              norm(rows.middleCols(head * head_dim, head_dim), matrix(name));
      };
      norm_heads(q, 4, prefix + "self_attn.q_norm.weight");
      norm_heads(k, 2, prefix + "self_attn.k_norm.weight");
      const int half = head_dim / 2;
      const auto rotate = [&](Matrix& rows, int heads) {
        if (!rotary[static_cast<std::size_t>(i)]) return;
        for (Eigen::Index t = 0; t < n; ++t) {
          for (int head = 0; head < heads; ++head) {
            for (int c = head * head_dim; c < head * head_dim + half; ++c) {
              const double angle = frequencies[static_cast<std::size_t>(c - head * head_dim)] *
                                   static_cast<double>(t);
              const double a = rows(t, c), b = rows(t, c + half);
              rows(t, c) = a * std::cos(angle) - b * std::sin(angle);
              rows(t, c + half) = b * std::cos(angle) + a * std::sin(angle);
            }
          }
        }
      };
      if (change) change(i, "pre", k);
      rotate(q, 4);
      rotate(k, 2);
      if (change) {
        change(i, "key", k);
        change(i, "value", v);
      }
      Matrix attended = Matrix::Zero(n, 4 * head_dim);
      for (int head = 0; head < 4; ++head) {
        for (Eigen::Index t = 0; t < n; ++t) {
          Eigen::VectorXd logits = k.block(0, head / 2 * head_dim, t + 1, head_dim) *
                                   q.block(t, head * head_dim, 1, head_dim).transpose() /
                                   std::sqrt(static_cast<double>(head_dim));
          logits = (logits.array() - logits.maxCoeff()).exp();
          attended.block(t, head * head_dim, 1, head_dim) =
              (logits / logits.sum()).transpose() *
              v.block(0, head / 2 * head_dim, t + 1, head_dim);
        }
      }
      x += attended * matrix(prefix + "self_attn.o_proj.weight").transpose();
      add_bias(x, prefix + "self_attn.o_proj.bias");
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
  int head_dim;
  std::vector<bool> rotary{true, true};  // by layer: queries and keys are rotated
  std::map<std::string, std::pair<std::vector<std::int64_t>, std::vector<float>>> weights;
};

inline const std::string kConfig =
    R"({"model_type": "llama", "hidden_size": 24, "intermediate_size": 30, "num_hidden_layers": 2, "num_attention_heads": 4,
 "num_key_value_heads": 2, "vocab_size": 40, "rope_theta": 100.0, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "attention_bias": true)";

/// kConfig of another family and head_dim, with nothing about biases; without its last bracket.
inline std::string config_of(const std::string& family, int head_dim = 6) {
  std::string config = kConfig.substr(0, kConfig.rfind(','));
  config.replace(config.find("llama"), 5, family);
  return config + ", \"head_dim\": " + std::to_string(head_dim);
}

}  // namespace tiny
