// SPDX-License-Identifier: Apache-2.0
// A Llama-architecture model from a Hugging Face folder: weights in f32, everything but attention's
// memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention_rows.hpp"
#include "device_model.hpp"
#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/cpu/thread_pool.hpp"

namespace llama {

class JsonValue;

/// What config.json says of a model.
struct Config {
  int hidden_size = 0;
  int intermediate_size = 0;
  int num_layers = 0;
  int num_qo_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int vocabulary_size = 0;
  int max_positions = 2048;
  float rms_norm_eps = 1e-5F;
  bool tied_head = false;       // the head is the embedding
  bool attention_bias = false;  // of query, key and value projections
  bool output_bias = false;     // of the output projection
  bool mlp_bias = false;        // of gate, up and down projections
  bool head_norms = false;      // each head's queries and keys have an RMSNorm before the rotation
  std::int32_t bos = -1;        // none
  std::vector<std::int32_t> eos;  // end a text; a Model's are generation_config.json's, if there
  std::vector<double> rope_frequencies;
  std::vector<bool> rotary_layers;  // whether a layer has a rotary embedding; empty: all have

  /// Reads config.json. Throws std::runtime_error naming what is missing or not supported.
  explicit Config(const std::string& path);
  /// The same of a file that was read before.
  explicit Config(const JsonValue& file);
  Config() = default;
  lowrankkv::CacheShape cache_shape() const { return {num_qo_heads, num_kv_heads, head_dim}; }
  /// Whether queries and keys of a layer are rotated to their positions.
  bool rotates(int layer) const {
    return rotary_layers.empty() || rotary_layers[static_cast<std::size_t>(layer)];
  }
  /// What a cache that stores keys in this form must know; of the layers that rotate them.
  lowrankkv::RopeConfig rope(lowrankkv::Rope keys) const {
    return {.keys = keys, .frequencies = rope_frequencies};
  }
  /// The same of one layer: where it does not rotate, all frequencies are 0.
  lowrankkv::RopeConfig rope(lowrankkv::Rope keys, int layer) const {
    lowrankkv::RopeConfig config = rope(keys);
    if (!rotates(layer)) config.frequencies.assign(rope_frequencies.size(), 0.0);
    return config;
  }
};

/// out [rows, out_features] = in [rows, in_features] weight^T (+ bias).
struct Linear {
  int in_features = 0;
  int out_features = 0;
  std::vector<float> weight;  // [out_features, in_features]
  std::vector<float> bias;    // [out_features] or empty
};

/// out = in / sqrt(mean(in^2) + epsilon) weight, for every one of `rows` rows of `width` channels.
void rms_norm(const float* in, std::int64_t rows, int width, const std::vector<float>& weight,
              float epsilon, float* out);

/// The residual stream [n, hidden_size] of the tokens at some place in a layer.
using StreamObserver = std::function<void(int layer, std::int64_t n, const float* rows)>;

/// A layer's keys and values of a text, and the loss's gradient with respect to them, all dense
/// [n, num_kv_heads, head_dim]; keys rotated to their positions, and as they were before. The
/// gradient with respect to a weight of keys (values) is that of the pre-RoPE keys (values),
/// transposed, times `input`, unless heads have norms.
struct RowGradients {
  Projected rows;
  const float* input = nullptr;  // of the layer's projections, behind the norm [n, hidden_size]
  const float* key = nullptr;
  const float* pre_rope_key = nullptr;
  const float* value = nullptr;
};
/// Gets a layer's gradients; layers come from the last to the first.
using GradientObserver = std::function<void(int layer, std::int64_t n, const RowGradients&)>;
/// The label of the token behind row `row`, given the model's probabilities for it
/// [vocabulary_size]; -1: the row has no part in the loss.
using Labels = std::function<std::int32_t(std::int64_t row, const float* probabilities)>;
/// The loss of row `row`, in nats. On entry `scores` are the model's probabilities for the token
/// behind it [vocabulary_size], on return the gradient of that loss with respect to their logits.
using RowLoss = std::function<double(std::int64_t row, float* scores)>;

/// A model in memory.
class Model {
 public:
  /// Loads config.json, generation_config.json (if there) and the weights: model.safetensors, else
  /// those that its index names. Throws std::runtime_error naming what is missing, what does not
  /// fit the configuration and what has no place in it. Warns on stderr of other weight files.
  Model(const std::string& folder, std::shared_ptr<lowrankkv::cpu::ThreadPool> threads);

  /// A layer's weights.
  struct Layer {
    std::vector<float> attention_norm, mlp_norm;
    std::vector<float> query_norm, key_norm;  // of each head [head_dim], or empty
    Linear query, key, value, output, gate, up, down;
  };

  /// forward() without observers and logits() are computed on the current GPU from now on.
  /// @throws what make_device_model() does
  void compute_on_gpu() { device_ = make_device_model(*this); }
  const Config& config() const { return config_; }
  /// A checksum over the weights and what the configuration says of them: the same for the same
  /// model. Cost: one pass over the weights.
  std::uint64_t fingerprint() const;
  /// Texts begin with `bos` from now on, -1 for nothing: what the tokenizer says, where it does.
  void begin_with(std::int32_t bos) { config_.bos = bos; }
  const std::shared_ptr<lowrankkv::cpu::ThreadPool>& threads() const { return threads_; }
  const Layer& layer(int index) const { return layers_[static_cast<std::size_t>(index)]; }
  /// [vocabulary_size, hidden_size]
  const std::vector<float>& embedding() const { return embedding_; }
  /// The head's weights [vocabulary_size, hidden_size], which may be the embedding.
  const std::vector<float>& head() const { return tied_ ? embedding_ : head_.weight; }
  /// The gain of the norm behind the last layer [hidden_size].
  const std::vector<float>& final_gain() const { return final_norm_; }
  /// The projections of a layer's attention, and the gain of the norm before it [hidden_size].
  const Linear& query_projection(int layer) const {
    return layers_[static_cast<std::size_t>(layer)].query;
  }
  const Linear& key_projection(int layer) const {
    return layers_[static_cast<std::size_t>(layer)].key;
  }
  const Linear& value_projection(int layer) const {
    return layers_[static_cast<std::size_t>(layer)].value;
  }
  const Linear& output_projection(int layer) const {
    return layers_[static_cast<std::size_t>(layer)].output;
  }
  const std::vector<float>& attention_gain(int layer) const {
    return layers_[static_cast<std::size_t>(layer)].attention_norm;
  }
  /// Runs tokens at positions [first, first + tokens.size()) through the layers: the normalised
  /// hidden states [n, hidden_size].
  /// `observe` gets the residual stream behind each layer's attention; `observe_input` the stream
  /// that comes into each layer, and as layer num_layers the one that leaves the last. With either
  /// the CPU computes, whatever compute_on_gpu() said.
  std::vector<float> forward(const std::vector<std::int32_t>& tokens, std::int64_t first,
                             const Attention& attention, const StreamObserver& observe = {},
                             const StreamObserver& observe_input = {}) const;
  /// The loss of a text from position 0 on: the sum over its rows of -log probability of their
  /// labels, in nats; and its gradient with respect to every key and value, by back-propagation
  /// through all layers (backward.cpp). Softmax attention is exact. A product with every weight
  /// costs three times as much as in forward(), four times with queries and keys that have norms;
  /// memory: 6 rows of hidden_size a layer and token.
  double loss_gradients(const std::vector<std::int32_t>& tokens, const Labels& labels,
                        const GradientObserver& observe) const;
  /// The same of any loss that is a sum over rows.
  double gradients_of(const std::vector<std::int32_t>& tokens, const RowLoss& of_row,
                      const GradientObserver& observe) const;
  /// forward() of a text from position 0 on, with exact attention and no cache.
  std::vector<float> forward_text(const std::vector<std::int32_t>& tokens) const;
  /// Other weights of a layer's keys and values, [num_kv_heads head_dim, hidden_size] each. Throws
  /// std::runtime_error, and changes nothing, if they are of another size or the model is on a GPU.
  void replace_key_value(int layer, std::vector<float> key, std::vector<float> value);
  /// Logits [n, vocabulary_size] of hidden rows [first_row, first_row + n).
  std::vector<float> logits(const std::vector<float>& hidden, std::int64_t first_row,
                            std::int64_t n) const;

 private:
  void apply(const Linear& linear, const float* in, std::int64_t rows, float* out) const;
  /// out [rows, in_features] (+)= in [rows, out_features] weight.
  void apply_transposed(const Linear& linear, const float* in, std::int64_t rows, float* out,
                        bool add = false) const;
  /// The loss of rows behind the last norm, and its gradient with respect to them, both
  /// [n, hidden_size].
  double head_gradient(const std::vector<float>& hidden, std::int64_t n, const RowLoss& of_row,
                       float* d_hidden) const;
  /// d_x of x + mlp(norm(x)): on entry the gradient of the sum, on return that of x.
  void add_mlp_gradient(const Layer& layer, const float* x, std::int64_t n, float* d_x) const;
  /// Raises std::runtime_error for an id that the vocabulary does not have.
  void check_vocabulary(const std::vector<std::int32_t>& tokens) const;
  /// The embedding's rows of tokens, [n, hidden_size].
  std::vector<float> embed(const std::vector<std::int32_t>& tokens) const;
  /// Cosines and sines of positions [first, first + n), each [n, head_dim / 2].
  std::pair<std::vector<float>, std::vector<float>> angles(std::int64_t first,
                                                           std::int64_t n) const;
  void rotate(float* rows, std::int64_t tokens, int heads, const std::vector<float>& cosines,
              const std::vector<float>& sines) const;
  /// On entry the gradient of the heads' rows behind their norm [n, heads, head_dim], on return
  /// that of what `projection` made of the layer's input `normed`. A product with its weight.
  void head_norm_gradient(const Linear& projection, const std::vector<float>& gain,
                          const float* normed, std::int64_t n, int heads,
                          std::vector<float>& gradient) const;

  Config config_;
  std::shared_ptr<lowrankkv::cpu::ThreadPool> threads_;
  std::vector<float> embedding_;  // [vocabulary_size, hidden_size]
  std::vector<float> final_norm_;
  Linear head_;  // tied: no weights of its own
  bool tied_ = false;
  std::vector<Layer> layers_;
  std::unique_ptr<DeviceModel> device_;  // none: on the CPU
};

}  // namespace llama
