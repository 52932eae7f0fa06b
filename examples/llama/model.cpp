// SPDX-License-Identifier: Apache-2.0
#include "model.hpp"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "lowrankkv/core/rope.hpp"
#include "lowrankkv/io/safetensors.hpp"

namespace llama {
namespace {

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

void rms_norm(const float* in, std::int64_t rows, int width, const std::vector<float>& weight,
              float epsilon, float* out) {
  for (std::int64_t row = 0; row < rows; ++row) {
    const Eigen::Map<const Eigen::ArrayXf> x(in + row * width, width);
    const float scale = 1.0F / std::sqrt(x.square().mean() + epsilon);
    Eigen::Map<Eigen::ArrayXf>(out + row * width, width) =
        x * scale * Eigen::Map<const Eigen::ArrayXf>(weight.data(), width);
  }
}

void positive(const char* name, int value) {
  if (value < 1)
    throw std::runtime_error(std::string("config.json: ") + name + " is " + std::to_string(value) +
                             ", must be at least 1");
}

}  // namespace

Config::Config(const std::string& path) {
  std::ifstream stream(path);
  if (!stream) throw std::runtime_error("config.json: cannot open " + path);
  const nlohmann::json file = nlohmann::json::parse(stream);
  if (file.value("model_type", "llama") != "llama")
    throw std::runtime_error("config.json: model_type " + file.at("model_type").get<std::string>() +
                             ", expected llama");
  if (file.value("hidden_act", "silu") != "silu")
    throw std::runtime_error("config.json: hidden_act " + file.at("hidden_act").get<std::string>() +
                             ", expected silu");
  hidden_size = file.at("hidden_size");
  intermediate_size = file.at("intermediate_size");
  num_layers = file.at("num_hidden_layers");
  num_qo_heads = file.at("num_attention_heads");
  num_kv_heads = file.contains("num_key_value_heads") && !file.at("num_key_value_heads").is_null()
                     ? file.at("num_key_value_heads").get<int>()
                     : num_qo_heads;
  positive("hidden_size", hidden_size);
  positive("intermediate_size", intermediate_size);
  positive("num_hidden_layers", num_layers);
  positive("num_attention_heads", num_qo_heads);
  positive("num_key_value_heads", num_kv_heads);
  head_dim = file.contains("head_dim") && !file.at("head_dim").is_null()
                 ? file.at("head_dim").get<int>()
                 : hidden_size / num_qo_heads;
  positive("head_dim", head_dim);
  vocabulary_size = file.at("vocab_size");
  max_positions = file.value("max_position_embeddings", 2048);
  rms_norm_eps = file.value("rms_norm_eps", 1e-5F);
  if (file.contains("bos_token_id") && file.at("bos_token_id").is_number())
    bos = file.at("bos_token_id");
  if (file.contains("eos_token_id") && file.at("eos_token_id").is_number())
    eos = {file.at("eos_token_id").get<std::int32_t>()};
  if (file.contains("eos_token_id") && file.at("eos_token_id").is_array())
    eos = file.at("eos_token_id").get<std::vector<std::int32_t>>();

  nlohmann::json rope = nlohmann::json::object();
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (file.contains(key) && file.at(key).is_object()) rope.update(file.at(key));
  }
  rope_frequencies = lowrankkv::rope_frequencies(
      head_dim, rope.value("rope_theta", file.value("rope_theta", 10000.0)));
  const std::string type = rope.value("rope_type", rope.value("type", "default"));
  if (type == "llama3") {
    lowrankkv::scale_frequencies(rope_frequencies, {rope.at("factor"), rope.at("low_freq_factor"),
                                                    rope.at("high_freq_factor"),
                                                    rope.at("original_max_position_embeddings")});
  } else if (type == "linear") {
    for (double& frequency : rope_frequencies) frequency /= rope.at("factor").get<double>();
  } else if (type != "default") {
    throw std::runtime_error("config.json: rope type " + type +
                             " is not supported, expected default, linear or llama3");
  }
}

Model::Model(const std::string& folder, std::shared_ptr<lowrankkv::cpu::ThreadPool> threads)
    : config_(folder + "/config.json"), threads_(std::move(threads)) {
  namespace io = lowrankkv::io;
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".safetensors") paths.push_back(entry.path().string());
  }
  if (paths.empty()) throw std::runtime_error("model: no *.safetensors in " + folder);
  std::sort(paths.begin(), paths.end());
  std::vector<io::Safetensors> files;
  for (const std::string& path : paths) files.push_back(io::Safetensors::read(path));
  const auto find = [&](const std::string& name) -> const io::Safetensors* {
    for (const io::Safetensors& file : files) {
      if (file.contains(name)) return &file;
    }
    return nullptr;
  };
  const auto tensor = [&](const std::string& name, const std::vector<std::int64_t>& shape) {
    const io::Safetensors* file = find(name);
    if (file == nullptr)
      throw std::runtime_error("model: tensor " + name + " is in none of " +
                               std::to_string(files.size()) + " files");
    return file->values<float>(name, shape);
  };
  const auto linear = [&](const std::string& name, int in, int out) {
    Linear result{in, out, tensor(name + ".weight", {out, in}), {}};
    if (find(name + ".bias") != nullptr) result.bias = tensor(name + ".bias", {out});
    return result;
  };
  const int hidden = config_.hidden_size;
  const int query_width = config_.num_qo_heads * config_.head_dim;
  const int key_width = config_.num_kv_heads * config_.head_dim;
  embedding_ = tensor("model.embed_tokens.weight", {config_.vocabulary_size, hidden});
  final_norm_ = tensor("model.norm.weight", {hidden});
  tied_ = find("lm_head.weight") == nullptr;
  if (!tied_) head_ = linear("lm_head", hidden, config_.vocabulary_size);
  for (int i = 0; i < config_.num_layers; ++i) {
    const std::string prefix = "model.layers." + std::to_string(i) + ".";
    Layer layer;
    layer.attention_norm = tensor(prefix + "input_layernorm.weight", {hidden});
    layer.mlp_norm = tensor(prefix + "post_attention_layernorm.weight", {hidden});
    layer.query = linear(prefix + "self_attn.q_proj", hidden, query_width);
    layer.key = linear(prefix + "self_attn.k_proj", hidden, key_width);
    layer.value = linear(prefix + "self_attn.v_proj", hidden, key_width);
    layer.output = linear(prefix + "self_attn.o_proj", query_width, hidden);
    layer.gate = linear(prefix + "mlp.gate_proj", hidden, config_.intermediate_size);
    layer.up = linear(prefix + "mlp.up_proj", hidden, config_.intermediate_size);
    layer.down = linear(prefix + "mlp.down_proj", config_.intermediate_size, hidden);
    layers_.push_back(std::move(layer));
  }
}

void Model::apply(const Linear& linear, const float* in, std::int64_t rows, float* out) const {
  const std::vector<float>& weight = &linear == &head_ && tied_ ? embedding_ : linear.weight;
  const int in_features = &linear == &head_ && tied_ ? config_.hidden_size : linear.in_features;
  const int out_features =
      &linear == &head_ && tied_ ? config_.vocabulary_size : linear.out_features;
  const Eigen::Map<const RowMajor> w(weight.data(), out_features, in_features);
  const Eigen::Map<const RowMajor> x(in, rows, in_features);
  Eigen::Map<RowMajor> y(out, rows, out_features);
  const auto add_bias = [&] {
    if (!linear.bias.empty())
      y.rowwise() += Eigen::Map<const Eigen::RowVectorXf>(linear.bias.data(), out_features);
  };
  if (products_ != nullptr) {
    products_->multiply(weight.data(), out_features, in_features, in, rows, out);
    add_bias();
    return;
  }
  // Many rows: blocks of rows. Few: blocks of outputs, so that every thread reads a part of the
  // weights once.
  constexpr std::int64_t kRows = 128;
  constexpr std::int64_t kOutputs = 256;
  const bool by_rows = rows >= 2 * kRows;
  const std::int64_t tasks =
      by_rows ? (rows + kRows - 1) / kRows : (out_features + kOutputs - 1) / kOutputs;
  threads_->run(tasks, [&](std::int64_t task, int) {
    if (by_rows) {
      const std::int64_t first = task * kRows;
      const std::int64_t count = std::min(kRows, rows - first);
      y.middleRows(first, count).noalias() = x.middleRows(first, count) * w.transpose();
    } else {
      const std::int64_t first = task * kOutputs;
      const std::int64_t count = std::min<std::int64_t>(kOutputs, out_features - first);
      if (rows == 1) {
        y.row(0).segment(first, count).transpose().noalias() =
            w.middleRows(first, count) * x.row(0).transpose();
      } else {
        y.middleCols(first, count).noalias() = x * w.middleRows(first, count).transpose();
      }
    }
  });
  add_bias();
}

void Model::rotate(float* rows, std::int64_t tokens, int heads, const std::vector<float>& cosines,
                   const std::vector<float>& sines) const {
  const int half = config_.head_dim / 2;
  threads_->run((tokens + 63) / 64, [&](std::int64_t task, int) {
    for (std::int64_t token = task * 64; token < std::min(tokens, (task + 1) * 64); ++token) {
      const float* cosine = cosines.data() + token * half;
      const float* sine = sines.data() + token * half;
      for (int head = 0; head < heads; ++head) {
        float* row = rows + (token * heads + head) * config_.head_dim;
        for (int i = 0; i < half; ++i) {
          const float first = row[i];
          const float second = row[i + half];
          row[i] = first * cosine[i] - second * sine[i];
          row[i + half] = second * cosine[i] + first * sine[i];
        }
      }
    }
  });
}

std::vector<float> Model::forward(const std::vector<std::int32_t>& tokens, std::int64_t first,
                                  const Attention& attention, const StreamObserver& observe) const {
  const std::int64_t n = static_cast<std::int64_t>(tokens.size());
  const int hidden = config_.hidden_size;
  const int query_width = config_.num_qo_heads * config_.head_dim;
  const int key_width = config_.num_kv_heads * config_.head_dim;
  const int half = config_.head_dim / 2;
  if (first + n > config_.max_positions) {
    throw std::runtime_error("forward: positions up to " + std::to_string(first + n) +
                             ", the model has " + std::to_string(config_.max_positions));
  }
  std::vector<float> cosines(static_cast<std::size_t>(n * half)), sines(cosines.size());
  for (std::int64_t token = 0; token < n; ++token) {
    for (int i = 0; i < half; ++i) {
      const double angle = config_.rope_frequencies[static_cast<std::size_t>(i)] *
                           static_cast<double>(first + token);
      cosines[static_cast<std::size_t>(token * half + i)] = static_cast<float>(std::cos(angle));
      sines[static_cast<std::size_t>(token * half + i)] = static_cast<float>(std::sin(angle));
    }
  }
  std::vector<float> x(static_cast<std::size_t>(n * hidden)), normed(x.size()), delta(x.size());
  for (std::int64_t token = 0; token < n; ++token) {
    const std::int32_t id = tokens[static_cast<std::size_t>(token)];
    if (id < 0 || id >= config_.vocabulary_size)
      throw std::runtime_error("forward: token id " + std::to_string(id) + ", vocabulary has " +
                               std::to_string(config_.vocabulary_size));
    std::copy_n(embedding_.begin() + std::int64_t{id} * hidden, hidden, x.begin() + token * hidden);
  }
  std::vector<float> query(static_cast<std::size_t>(n * query_width)), attended(query.size());
  std::vector<float> key(static_cast<std::size_t>(n * key_width)), value(key.size());
  std::vector<float> pre_rope_key;
  std::vector<float> gate(static_cast<std::size_t>(n * config_.intermediate_size)), up(gate.size());
  for (int i = 0; i < config_.num_layers; ++i) {
    const Layer& layer = layers_[static_cast<std::size_t>(i)];
    rms_norm(x.data(), n, hidden, layer.attention_norm, config_.rms_norm_eps, normed.data());
    apply(layer.query, normed.data(), n, query.data());
    apply(layer.key, normed.data(), n, key.data());
    apply(layer.value, normed.data(), n, value.data());
    pre_rope_key = key;
    rotate(query.data(), n, config_.num_qo_heads, cosines, sines);
    rotate(key.data(), n, config_.num_kv_heads, cosines, sines);
    attention(i, {query.data(), key.data(), value.data(), pre_rope_key.data()}, attended.data());
    apply(layer.output, attended.data(), n, delta.data());
    Eigen::Map<Eigen::ArrayXf>(x.data(), n * hidden) +=
        Eigen::Map<const Eigen::ArrayXf>(delta.data(), n * hidden);
    if (observe) observe(i, n, x.data());
    rms_norm(x.data(), n, hidden, layer.mlp_norm, config_.rms_norm_eps, normed.data());
    apply(layer.gate, normed.data(), n, gate.data());
    apply(layer.up, normed.data(), n, up.data());
    threads_->run(n, [&](std::int64_t token, int) {
      Eigen::Map<Eigen::ArrayXf> g(gate.data() + token * config_.intermediate_size,
                                   config_.intermediate_size);
      const Eigen::Map<const Eigen::ArrayXf> u(up.data() + token * config_.intermediate_size,
                                               config_.intermediate_size);
      g = g / (1.0F + (-g).exp()) * u;
    });
    apply(layer.down, gate.data(), n, delta.data());
    Eigen::Map<Eigen::ArrayXf>(x.data(), n * hidden) +=
        Eigen::Map<const Eigen::ArrayXf>(delta.data(), n * hidden);
  }
  rms_norm(x.data(), n, hidden, final_norm_, config_.rms_norm_eps, normed.data());
  return normed;
}

std::vector<float> Model::logits(const std::vector<float>& hidden, std::int64_t first_row,
                                 std::int64_t n) const {
  std::vector<float> out(static_cast<std::size_t>(n) *
                         static_cast<std::size_t>(config_.vocabulary_size));
  apply(head_, hidden.data() + first_row * config_.hidden_size, n, out.data());
  return out;
}

}  // namespace llama
