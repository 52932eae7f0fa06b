// SPDX-License-Identifier: Apache-2.0
#include "model.hpp"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>
#include <span>
#include <sstream>
#include <stdexcept>

#include "json_file.hpp"
#include "lowrankkv/core/byte_stream.hpp"
#include "lowrankkv/core/rope.hpp"
#include "lowrankkv/io/safetensors.hpp"

namespace llama {
namespace {

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Counts of a configuration: large enough for every model, small enough that products fit.
constexpr std::int64_t kMostFeatures = std::int64_t{1} << 24;
constexpr std::int64_t kMostHeads = std::int64_t{1} << 14;
constexpr std::int64_t kMostIds = std::numeric_limits<std::int32_t>::max();
// Tokens that transformers lets a Mistral model see where its file does not say.
constexpr std::int64_t kMistralWindow = 4096;

int count_of(const JsonValue& file, const char* field, std::int64_t most) {
  return static_cast<int>(file.at(field).integer(1, most));
}

bool flag_of(const JsonValue& file, const char* field) {
  return file.has(field) && file.at(field).flag();
}

// The ids of eos_token_id, a number or a list; none if it is missing or null.
std::vector<std::int32_t> end_ids(const JsonValue& file, int vocabulary_size) {
  std::vector<std::int32_t> ids;
  if (!file.has("eos_token_id")) return ids;
  const JsonValue entry = file.at("eos_token_id");
  const bool list = entry.json().is_array();
  for (std::size_t i = 0; i < (list ? entry.size() : 1); ++i)
    ids.push_back(
        static_cast<std::int32_t>((list ? entry.at(i) : entry).integer(0, vocabulary_size - 1)));
  return ids;
}

// The families of models that the engine knows, by model_type and by the class in architectures.
enum class Family { llama, mistral, qwen2, qwen3, smollm3 };
struct FamilyNames {
  Family family;
  const char* model_type;
  const char* architecture;
};
constexpr FamilyNames kFamilies[] = {{Family::llama, "llama", "LlamaForCausalLM"},
                                     {Family::mistral, "mistral", "MistralForCausalLM"},
                                     {Family::qwen2, "qwen2", "Qwen2ForCausalLM"},
                                     {Family::qwen3, "qwen3", "Qwen3ForCausalLM"},
                                     {Family::smollm3, "smollm3", "SmolLM3ForCausalLM"}};

Family family_of(const JsonValue& file) {
  const auto find = [](const JsonValue& value, auto member) {
    std::string known;
    for (const FamilyNames& names : kFamilies) {
      if (value.text() == names.*member) return names;
      known.append(known.empty() ? "" : " or ").append(names.*member);
    }
    value.fail(known);
  };
  const bool named = file.has("architectures") && file.at("architectures").size() > 0;
  if (!named || file.has("model_type")) {
    const FamilyNames names = find(file.at("model_type"), &FamilyNames::model_type);
    for (std::size_t i = 0; named && i < file.at("architectures").size(); ++i) {
      const JsonValue entry = file.at("architectures").at(i);
      if (entry.text() != names.architecture) entry.fail(names.architecture);
    }
    return names.family;
  }
  const FamilyNames names = find(file.at("architectures").at(0), &FamilyNames::architecture);
  for (std::size_t i = 1; i < file.at("architectures").size(); ++i) {
    const JsonValue entry = file.at("architectures").at(i);
    if (entry.text() != names.architecture) entry.fail(names.architecture);
  }
  return names.family;
}

// Attention that sees a window of the text only is not what this engine computes.
void check_no_window(const JsonValue& file, Family family) {
  if (family == Family::mistral && file.has("sliding_window"))
    file.at("sliding_window").fail("null: attention to all tokens");
  if (family == Family::mistral && !file.object().contains("sliding_window") &&
      file.has("max_position_embeddings") &&
      file.at("max_position_embeddings").integer(1, kMostIds) > kMistralWindow)
    file.at("max_position_embeddings")
        .fail("at most " + std::to_string(kMistralWindow) +
              ", the window of a Mistral model whose file has no sliding_window: null");
  const bool switched =
      family == Family::qwen2 || family == Family::qwen3 || family == Family::smollm3;
  if (switched && flag_of(file, "use_sliding_window"))
    file.at("use_sliding_window").fail("false: attention to all tokens");
  if (!file.has("layer_types")) return;
  const JsonValue types = file.at("layer_types");
  for (std::size_t i = 0; i < types.size(); ++i) {
    if (types.at(i).text() != "full_attention")
      types.at(i).fail("full_attention: attention to all tokens");
  }
}

// SmolLM3 leaves the rotary embedding out of some layers: those with a 0 in no_rope_layers, or
// every no_rope_layer_interval-th.
std::vector<bool> rotary_layers_of(const JsonValue& file, int num_layers) {
  std::vector<bool> rotary(static_cast<std::size_t>(num_layers), true);
  if (file.has("no_rope_layers")) {
    const JsonValue list = file.at("no_rope_layers");
    if (list.size() < rotary.size())
      list.fail("an entry for each of " + std::to_string(num_layers) + " layers");
    for (std::size_t i = 0; i < rotary.size(); ++i) rotary[i] = list.at(i).integer(0, 1) == 1;
    return rotary;
  }
  const std::size_t interval =
      file.has("no_rope_layer_interval")
          ? static_cast<std::size_t>(file.at("no_rope_layer_interval").integer(1, kMostFeatures))
          : 4;
  for (std::size_t i = interval - 1; i < rotary.size(); i += interval) rotary[i] = false;
  return rotary;
}

void check_form(const JsonValue& file) {
  if (file.has("hidden_act") && file.at("hidden_act").text() != "silu")
    file.at("hidden_act").fail("silu");
  if (file.has("quantization_config"))
    file.at("quantization_config").fail("none; weights must be F32, F64, F16 or BF16");
}

std::string rope_type(const JsonValue& rope) {
  for (const char* key : {"rope_type", "type"}) {
    if (rope.has(key)) return rope.at(key).text();
  }
  return "default";
}

// Both members may stand in a file (rope_scaling for older readers); then they must say the same.
void check_ropes_agree(const JsonValue& parameters, const JsonValue& scaling) {
  if (rope_type(scaling) != rope_type(parameters)) {
    throw std::runtime_error(scaling.file() + ": rope_scaling is of type " + rope_type(scaling) +
                             ", rope_parameters of type " + rope_type(parameters) +
                             ", the same is expected");
  }
  for (const auto& [key, value] : scaling.object().items()) {
    if (key == "rope_type" || key == "type" || value.is_null()) continue;
    if (!parameters.has(key)) scaling.at(key).fail("the same in rope_parameters, which has none");
    if (parameters.at(key).json() != value)
      scaling.at(key).fail(parameters.at(key).json().dump() + " as in rope_parameters");
  }
}

// theta: where the file names none
std::vector<double> frequencies_of(const JsonValue& file, int head_dim, double theta) {
  const nlohmann::json none = nlohmann::json::object();
  const bool both = file.has("rope_parameters") && file.has("rope_scaling");
  if (both) check_ropes_agree(file.at("rope_parameters"), file.at("rope_scaling"));
  const JsonValue rope = file.has("rope_parameters") ? file.at("rope_parameters")
                         : file.has("rope_scaling")  ? file.at("rope_scaling")
                                                     : JsonValue(file.file(), none);
  for (const auto& [key, value] : rope.object().items()) {
    if (value.is_object()) rope.at(key).fail("no object: one rotary embedding for all layers");
  }
  if (file.has("rope_theta")) theta = file.at("rope_theta").positive();
  if (rope.has("rope_theta")) {
    if (file.has("rope_theta") && rope.at("rope_theta").positive() != theta)
      rope.at("rope_theta").fail(file.at("rope_theta").json().dump() + " as in rope_theta");
    theta = rope.at("rope_theta").positive();
  }
  for (const JsonValue& place : {file, rope}) {
    if (place.has("partial_rotary_factor") && place.at("partial_rotary_factor").positive() != 1.0)
      place.at("partial_rotary_factor").fail("1");
  }
  std::vector<double> frequencies = lowrankkv::rope_frequencies(head_dim, theta);
  const std::string type = rope_type(rope);
  if (type == "llama3") {
    const auto number = [&](const char* key) { return rope.at(key).positive_f32(); };
    const float low = number("low_freq_factor");
    const float high = number("high_freq_factor");
    if (high <= low)
      rope.at("high_freq_factor").fail("more than the low_freq_factor of " + std::to_string(low));
    lowrankkv::scale_frequencies(
        frequencies, {number("factor"), low, high, number("original_max_position_embeddings")});
  } else if (type == "linear") {
    for (double& frequency : frequencies) frequency /= rope.at("factor").positive();
  } else if (type != "default") {
    throw std::runtime_error(file.file() + ": rope type " + type +
                             " is not supported, expected default, linear or llama3");
  }
  for (const double frequency : frequencies) {
    if (!std::isfinite(frequency))
      throw std::runtime_error(file.file() + ": rope type " + type + " with rope_theta " +
                               std::to_string(theta) + " gives a frequency of " +
                               std::to_string(frequency) + ", finite is expected");
  }
  return frequencies;
}

// The weight files of a folder: which to read, and in which of them the index puts a tensor.
struct WeightFiles {
  std::vector<std::string> names;             // without the folder
  std::map<std::string, std::string> places;  // tensor to file; empty: one file
};

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream message;
  ((message << "model: ") << ... << parts);
  throw std::runtime_error(message.str());
}
std::string path_in(const std::string& folder, const std::string& name) {
  return folder + "/" + name;
}

constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kSingle = "model.safetensors";

WeightFiles indexed_files(const std::string& folder) {
  const nlohmann::json json = read_json(folder + "/" + kIndex, kIndex);
  const JsonValue map = JsonValue(kIndex, json).at("weight_map");
  WeightFiles files;
  for (const auto& [tensor, value] : map.object().items()) {
    const JsonValue entry = map.at(tensor);
    const std::string name = entry.text();
    if (name.empty() || name != file_name(name)) entry.fail("the name of a file in " + folder);
    if (!std::filesystem::is_regular_file(path_in(folder, name)))
      entry.fail("a file that is in " + folder);
    files.places[tensor] = name;
    if (std::find(files.names.begin(), files.names.end(), name) == files.names.end())
      files.names.push_back(name);
  }
  if (files.names.empty()) map.fail("one tensor at least");
  return files;
}

// Which files of a folder hold its weights. Downloads that are not complete and adapters are
// refused; other weight files are named in a warning.
WeightFiles weight_files(const std::string& folder) {
  std::vector<std::string> present;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    present.push_back(entry.path().filename().string());
  std::sort(present.begin(), present.end());
  bool indexed = false, single = false;
  std::vector<std::string> weights;
  for (const std::string& name : present) {
    const std::string extension = std::filesystem::path(name).extension().string();
    if (extension == ".incomplete" || extension == ".part")
      refuse(path_in(folder, name), " is an unfinished download, expected complete files alone");
    if (name == "adapter_config.json")
      refuse(path_in(folder, name), " says that this is an adapter, expected a whole model");
    indexed = indexed || name == kIndex;
    single = single || name == kSingle;
    if (extension == ".safetensors" || extension == ".gguf" || extension == ".pth" ||
        extension == ".pt" || (extension == ".bin" && name.rfind("pytorch_model", 0) == 0))
      weights.push_back(name);
  }
  WeightFiles files;
  if (single)  // also where an index is left from elsewhere: as transformers does
    files.names = {kSingle};
  else if (indexed)
    files = indexed_files(folder);
  if (single && indexed) weights.emplace_back(kIndex);
  std::string others;
  for (const std::string& name : weights) {
    if (std::find(files.names.begin(), files.names.end(), name) == files.names.end())
      others.append(others.empty() ? "" : ", ").append(name);
  }
  if (files.names.empty()) {
    refuse("neither ", kSingle, " nor ", kIndex, " in ", folder,
           "; weight files there: ", others.empty() ? "none" : others);
  }
  if (!others.empty())
    std::fprintf(stderr, "warning: %s: weights are those of %s; not read: %s\n", folder.c_str(),
                 single ? kSingle : kIndex, others.c_str());
  return files;
}

// The tensors of a model's files; each is asked for once, and none may be left.
class Weights {
 public:
  explicit Weights(const std::string& folder) : files_(weight_files(folder)) {
    for (const std::string& name : files_.names) {
      contents_.emplace(name, lowrankkv::io::Safetensors::read(path_in(folder, name)));
      for (const auto& [tensor, info] : contents_.at(name).tensors()) left_[tensor] = name;
    }
    for (const auto& [tensor, name] : files_.places) {
      if (!contents_.at(name).contains(tensor))
        refuse("tensor ", tensor, " is not in ", name, ", where ", kIndex, " puts it");
      left_[tensor] = name;
    }
  }
  bool contains(const std::string& name) const { return left_.contains(name); }
  std::vector<float> take(const std::string& name, const std::vector<std::int64_t>& shape) {
    const auto entry = left_.find(name);
    if (entry == left_.end())
      throw std::runtime_error("model: tensor " + name + " is in none of " +
                               std::to_string(contents_.size()) + " files");
    const std::string file = entry->second;
    left_.erase(entry);
    return contents_.at(file).values<float>(name, shape);
  }
  Linear linear(const std::string& name, int in, int out, bool bias, const char* announced) {
    if (contains(name + ".bias") != bias) {
      throw std::runtime_error(
          "model: tensor " + name + ".bias is " +
          (bias ? "in no file, but config.json: " : "there, but config.json: ") + announced +
          " is " + (bias ? "true" : "not true"));
    }
    Linear result{in, out, take(name + ".weight", {out, in}), {}};
    if (bias) result.bias = take(name + ".bias", {out});
    return result;
  }
  // Tensors that nothing asked for would change the model's answers. Older files carry the rotary
  // frequencies, which follow from the configuration.
  void check_all_taken(int num_layers) const {
    for (const auto& [tensor, file] : left_) {
      if (tensor.ends_with(".rotary_emb.inv_freq")) continue;
      refuse("tensor ", tensor, " in ", file, " has no place in a Llama model of ", num_layers,
             " layers");
    }
  }

 private:
  WeightFiles files_;
  std::map<std::string, lowrankkv::io::Safetensors> contents_;
  std::map<std::string, std::string> left_;  // tensors nobody took yet, and their files
};

}  // namespace

void rms_norm(const float* in, std::int64_t rows, int width, const std::vector<float>& weight,
              float epsilon, float* out) {
  for (std::int64_t row = 0; row < rows; ++row) {
    const Eigen::Map<const Eigen::ArrayXf> x(in + row * width, width);
    const float scale = 1.0F / std::sqrt(x.square().mean() + epsilon);
    Eigen::Map<Eigen::ArrayXf>(out + row * width, width) =
        x * scale * Eigen::Map<const Eigen::ArrayXf>(weight.data(), width);
  }
}

Config::Config(const std::string& path)
    : Config(JsonValue("config.json", read_json(path, "config.json"))) {}

Config::Config(const JsonValue& file) {
  const Family family = family_of(file);
  check_no_window(file, family);
  check_form(file);
  hidden_size = count_of(file, "hidden_size", kMostFeatures);
  intermediate_size = count_of(file, "intermediate_size", kMostFeatures);
  num_layers = count_of(file, "num_hidden_layers", kMostFeatures);
  num_qo_heads = count_of(file, "num_attention_heads", kMostHeads);
  // Where the file names no number, transformers has one for each of these families.
  const bool stated = family == Family::qwen3 || family == Family::smollm3;
  num_kv_heads = stated || file.has("num_key_value_heads")
                     ? count_of(file, "num_key_value_heads", kMostHeads)
                     : num_qo_heads;
  if (num_qo_heads % num_kv_heads != 0)
    file.at("num_key_value_heads")
        .fail("a divisor of num_attention_heads, " + std::to_string(num_qo_heads));
  if (file.has("head_dim")) {
    head_dim = count_of(file, "head_dim", kMostHeads);
  } else if (family == Family::qwen3) {
    head_dim = 128;  // as in transformers, whatever the other sizes are
  } else {
    if (hidden_size % num_qo_heads != 0)
      file.at("hidden_size")
          .fail("a multiple of num_attention_heads, " + std::to_string(num_qo_heads) +
                ", where there is no head_dim");
    head_dim = hidden_size / num_qo_heads;
    if (head_dim > kMostHeads)
      file.at("hidden_size")
          .fail("at most " + std::to_string(kMostHeads) + " for each of " +
                std::to_string(num_qo_heads) + " heads");
  }
  if (head_dim % 2 != 0)
    throw std::runtime_error("config.json: head_dim is " + std::to_string(head_dim) +
                             ", expected an even number");
  vocabulary_size = count_of(file, "vocab_size", kMostFeatures);
  if (file.has("max_position_embeddings"))
    max_positions = count_of(file, "max_position_embeddings", kMostIds);
  rms_norm_eps = file.at("rms_norm_eps").positive_f32();
  tied_head = file.has("tie_word_embeddings") ? file.at("tie_word_embeddings").flag()
                                              : family == Family::smollm3;
  // Qwen2's projections of queries, keys and values have biases, whatever its file says of others.
  attention_bias = family == Family::qwen2 || flag_of(file, "attention_bias");
  output_bias = family != Family::qwen2 && attention_bias;
  mlp_bias = flag_of(file, "mlp_bias");
  head_norms = family == Family::qwen3;
  if (file.has("bos_token_id"))
    bos = static_cast<std::int32_t>(file.at("bos_token_id").integer(0, vocabulary_size - 1));
  eos = end_ids(file, vocabulary_size);
  rope_frequencies =
      frequencies_of(file, head_dim, family == Family::smollm3 ? 2000000.0 : 10000.0);
  if (family == Family::smollm3) rotary_layers = rotary_layers_of(file, num_layers);
}

Model::Model(const std::string& folder, std::shared_ptr<lowrankkv::cpu::ThreadPool> threads)
    : config_(folder + "/config.json"), threads_(std::move(threads)) {
  // Where this file is, it alone says where a text ends, as for transformers.
  constexpr const char* kGeneration = "generation_config.json";
  if (std::filesystem::exists(path_in(folder, kGeneration))) {
    const nlohmann::json json = read_json(path_in(folder, kGeneration), kGeneration);
    config_.eos = end_ids(JsonValue(kGeneration, json), config_.vocabulary_size);
  }
  Weights weights(folder);
  const int hidden = config_.hidden_size;
  const int query_width = config_.num_qo_heads * config_.head_dim;
  const int key_width = config_.num_kv_heads * config_.head_dim;
  embedding_ = weights.take("model.embed_tokens.weight", {config_.vocabulary_size, hidden});
  final_norm_ = weights.take("model.norm.weight", {hidden});
  tied_ = config_.tied_head;
  if (!tied_ && !weights.contains("lm_head.weight")) {
    throw std::runtime_error(
        "model: tensor lm_head.weight is in no file, but config.json: tie_word_embeddings is not "
        "true");
  }
  if (tied_ && weights.contains("lm_head.weight") &&
      weights.take("lm_head.weight", {config_.vocabulary_size, hidden}) != embedding_) {
    throw std::runtime_error(
        "model: tensor lm_head.weight differs from model.embed_tokens.weight, but config.json: "
        "tie_word_embeddings is true");
  }
  if (!tied_)
    head_ = {hidden,
             config_.vocabulary_size,
             weights.take("lm_head.weight", {config_.vocabulary_size, hidden}),
             {}};
  const auto attention = [&](const std::string& name, int in, int out) {
    return weights.linear(name, in, out, config_.attention_bias, "attention_bias");
  };
  const auto output = [&](const std::string& name, int in, int out) {
    return weights.linear(name, in, out, config_.output_bias, "attention_bias");
  };
  const auto mlp = [&](const std::string& name, int in, int out) {
    return weights.linear(name, in, out, config_.mlp_bias, "mlp_bias");
  };
  for (int i = 0; i < config_.num_layers; ++i) {
    const std::string prefix = "model.layers." + std::to_string(i) + ".";
    Layer layer;
    layer.attention_norm = weights.take(prefix + "input_layernorm.weight", {hidden});
    layer.mlp_norm = weights.take(prefix + "post_attention_layernorm.weight", {hidden});
    layer.query = attention(prefix + "self_attn.q_proj", hidden, query_width);
    layer.key = attention(prefix + "self_attn.k_proj", hidden, key_width);
    layer.value = attention(prefix + "self_attn.v_proj", hidden, key_width);
    if (config_.head_norms) {
      layer.query_norm = weights.take(prefix + "self_attn.q_norm.weight", {config_.head_dim});
      layer.key_norm = weights.take(prefix + "self_attn.k_norm.weight", {config_.head_dim});
    }
    layer.output = output(prefix + "self_attn.o_proj", query_width, hidden);
    layer.gate = mlp(prefix + "mlp.gate_proj", hidden, config_.intermediate_size);
    layer.up = mlp(prefix + "mlp.up_proj", hidden, config_.intermediate_size);
    layer.down = mlp(prefix + "mlp.down_proj", config_.intermediate_size, hidden);
    layers_.push_back(std::move(layer));
  }
  weights.check_all_taken(config_.num_layers);
}

std::uint64_t Model::fingerprint() const {
  std::uint64_t hash = 0;
  const auto add = [&](const auto& values) {
    hash = lowrankkv::checksum(std::as_bytes(std::span(values)), hash + values.size());
  };
  add(std::vector<int>{config_.hidden_size, config_.intermediate_size, config_.num_layers,
                       config_.num_qo_heads, config_.num_kv_heads, config_.head_dim, config_.bos});
  add(std::vector<float>{config_.rms_norm_eps});
  add(config_.rope_frequencies);
  for (const std::vector<float>* values : {&embedding_, &final_norm_, &head_.weight}) add(*values);
  for (const Layer& layer : layers_) {
    add(layer.attention_norm);
    add(layer.mlp_norm);
    for (const Linear* linear : {&layer.query, &layer.key, &layer.value, &layer.output, &layer.gate,
                                 &layer.up, &layer.down}) {
      add(linear->weight);
      add(linear->bias);
    }
  }
  return hash;
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

std::pair<std::vector<float>, std::vector<float>> Model::angles(std::int64_t first,
                                                                std::int64_t n) const {
  const int half = config_.head_dim / 2;
  std::vector<float> cosines(static_cast<std::size_t>(n * half)), sines(cosines.size());
  for (std::int64_t token = 0; token < n; ++token) {
    for (int i = 0; i < half; ++i) {
      const double angle = config_.rope_frequencies[static_cast<std::size_t>(i)] *
                           static_cast<double>(first + token);
      cosines[static_cast<std::size_t>(token * half + i)] = static_cast<float>(std::cos(angle));
      sines[static_cast<std::size_t>(token * half + i)] = static_cast<float>(std::sin(angle));
    }
  }
  return {std::move(cosines), std::move(sines)};
}

void Model::check_vocabulary(const std::vector<std::int32_t>& tokens) const {
  for (const std::int32_t id : tokens) {
    if (id < 0 || id >= config_.vocabulary_size)
      throw std::runtime_error("forward: token id " + std::to_string(id) + ", vocabulary has " +
                               std::to_string(config_.vocabulary_size));
  }
}

std::vector<float> Model::embed(const std::vector<std::int32_t>& tokens) const {
  const int hidden = config_.hidden_size;
  check_vocabulary(tokens);
  std::vector<float> rows(tokens.size() * static_cast<std::size_t>(hidden));
  for (std::size_t token = 0; token < tokens.size(); ++token) {
    std::copy_n(embedding_.begin() + std::int64_t{tokens[token]} * hidden, hidden,
                rows.begin() + static_cast<std::ptrdiff_t>(token) * hidden);
  }
  return rows;
}

std::vector<float> Model::forward(const std::vector<std::int32_t>& tokens, std::int64_t first,
                                  const Attention& attention, const StreamObserver& observe,
                                  const StreamObserver& observe_input) const {
  const std::int64_t n = static_cast<std::int64_t>(tokens.size());
  const int hidden = config_.hidden_size;
  const int query_width = config_.num_qo_heads * config_.head_dim;
  const int key_width = config_.num_kv_heads * config_.head_dim;
  if (n == 0) throw std::runtime_error("forward: 0 tokens, at least 1 is expected");
  if (first + n > config_.max_positions) {
    throw std::runtime_error("forward: positions up to " + std::to_string(first + n) +
                             ", the model has " + std::to_string(config_.max_positions));
  }
  if (device_ != nullptr && !observe && !observe_input) {
    check_vocabulary(tokens);
    return device_->forward(tokens, first, attention);
  }
  const auto [cosines, sines] = angles(first, n);
  std::vector<float> x = embed(tokens), normed(x.size()), delta(x.size());
  std::vector<float> query(static_cast<std::size_t>(n * query_width)), attended(query.size());
  std::vector<float> key(static_cast<std::size_t>(n * key_width)), value(key.size());
  std::vector<float> pre_rope_key;
  std::vector<float> gate(static_cast<std::size_t>(n * config_.intermediate_size)), up(gate.size());
  for (int i = 0; i < config_.num_layers; ++i) {
    const Layer& layer = layers_[static_cast<std::size_t>(i)];
    if (observe_input) observe_input(i, n, x.data());
    rms_norm(x.data(), n, hidden, layer.attention_norm, config_.rms_norm_eps, normed.data());
    apply(layer.query, normed.data(), n, query.data());
    apply(layer.key, normed.data(), n, key.data());
    apply(layer.value, normed.data(), n, value.data());
    if (config_.head_norms) {
      rms_norm(query.data(), n * config_.num_qo_heads, config_.head_dim, layer.query_norm,
               config_.rms_norm_eps, query.data());
      rms_norm(key.data(), n * config_.num_kv_heads, config_.head_dim, layer.key_norm,
               config_.rms_norm_eps, key.data());
    }
    pre_rope_key = key;
    if (config_.rotates(i)) {
      rotate(query.data(), n, config_.num_qo_heads, cosines, sines);
      rotate(key.data(), n, config_.num_kv_heads, cosines, sines);
    }
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
      // An array of Eigen's own is aligned: where g lies does not change a bit.
      const Eigen::ArrayXf activated = g / (1.0F + (-g).exp()) * u;
      g = activated;
    });
    apply(layer.down, gate.data(), n, delta.data());
    Eigen::Map<Eigen::ArrayXf>(x.data(), n * hidden) +=
        Eigen::Map<const Eigen::ArrayXf>(delta.data(), n * hidden);
  }
  if (observe_input) observe_input(config_.num_layers, n, x.data());
  rms_norm(x.data(), n, hidden, final_norm_, config_.rms_norm_eps, normed.data());
  return normed;
}

std::vector<float> Model::logits(const std::vector<float>& hidden, std::int64_t first_row,
                                 std::int64_t n) const {
  if (device_ != nullptr)
    return device_->logits(hidden.data() + first_row * config_.hidden_size, n);
  std::vector<float> out(static_cast<std::size_t>(n) *
                         static_cast<std::size_t>(config_.vocabulary_size));
  apply(head_, hidden.data() + first_row * config_.hidden_size, n, out.data());
  return out;
}

}  // namespace llama
