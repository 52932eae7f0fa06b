// SPDX-License-Identifier: Apache-2.0
#include "device_model.hpp"

#include <cublas_v2.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <vector>

#include "lowrankkv/cuda/runtime/device.cuh"
#include "model.hpp"

namespace llama {
namespace {

namespace gpu = lowrankkv::cuda;
using Floats = gpu::DeviceArray<float>;

constexpr int kWarp = 32, kBlock = 256;

void check(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS)
    lowrankkv::detail::fail<lowrankkv::DeviceError>(call, ": ", cublasGetStatusString(status));
}

__device__ float warp_sum(float x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffU, x, step);
  return x;
}

/// The sum over a block of kBlock threads, in every one of them.
__device__ float block_sum(float x) {
  __shared__ float sums[kBlock / kWarp];
  x = warp_sum(x);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = x;
  __syncthreads();
  float sum = 0.0F;
  for (const float part : sums) sum += part;
  __syncthreads();
  return sum;
}

/// A block a token: x = embedding[id].
__global__ void embed(const float* embedding, const std::int32_t* ids, int width, float* x) {
  const float* from = embedding + std::int64_t{ids[blockIdx.x]} * width;
  float* to = x + std::int64_t{blockIdx.x} * width;
  for (int i = static_cast<int>(threadIdx.x); i < width; i += kBlock) to[i] = from[i];
}

/// A block a row: x += delta + bias (either may be null), out = x / sqrt(mean(x^2) + epsilon) gain.
__global__ void add_and_norm(float* x, const float* delta, const float* bias, const float* gain,
                             float epsilon, int width, float* out) {
  const std::int64_t row = std::int64_t{blockIdx.x} * width;
  float squares = 0.0F;
  for (int i = static_cast<int>(threadIdx.x); i < width; i += kBlock) {
    float value = x[row + i];
    if (delta != nullptr) {
      value += delta[row + i];
      if (bias != nullptr) value += bias[i];
      x[row + i] = value;
    }
    squares += value * value;
  }
  const float scale = 1.0F / sqrtf(block_sum(squares) / static_cast<float>(width) + epsilon);
  for (int i = static_cast<int>(threadIdx.x); i < width; i += kBlock)
    out[row + i] = x[row + i] * scale * gain[i];
}

/// What split_heads() writes to, and what it adds and multiplies.
struct Heads {
  int query_heads, kv_heads, dim;
  const float* bias;        // [query_heads + 2 kv_heads, dim], or null
  const float* query_gain;  // [dim], or null: heads have no norms
  const float* key_gain;    // the same
  const float2* rotation;   // [positions, dim / 2], cosines and sines; null: no rotation
  float epsilon;
  float *query, *key, *pre_rope_key, *value;
};

/// A warp a head of a token. projected [n, query_heads + 2 kv_heads, dim] becomes queries, keys in
/// both forms and values, [n, heads, dim] each.
__global__ void split_heads(const float* projected, std::int64_t n, std::int64_t first,
                            Heads heads) {
  const int all = heads.query_heads + 2 * heads.kv_heads, half = heads.dim / 2;
  const std::int64_t warp = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (warp >= n * all) return;
  const std::int64_t token = warp / all;
  const int head = static_cast<int>(warp % all);
  const bool is_query = head < heads.query_heads;
  const bool is_value = head >= heads.query_heads + heads.kv_heads;
  const float* row = projected + warp * heads.dim;
  const float* bias = heads.bias == nullptr ? nullptr : heads.bias + std::int64_t{head} * heads.dim;
  const auto at = [&](int i) { return row[i] + (bias == nullptr ? 0.0F : bias[i]); };
  const int of_kv = is_value ? head - heads.query_heads - heads.kv_heads : head - heads.query_heads;
  const std::int64_t place = is_query ? (token * heads.query_heads + head) * heads.dim
                                      : (token * heads.kv_heads + of_kv) * heads.dim;
  if (is_value) {
    for (int i = lane; i < heads.dim; i += kWarp) heads.value[place + i] = at(i);
    return;
  }
  const float* gain = is_query ? heads.query_gain : heads.key_gain;
  float scale = 1.0F;
  if (gain != nullptr) {
    float squares = 0.0F;
    for (int i = lane; i < heads.dim; i += kWarp) squares += at(i) * at(i);
    scale = 1.0F / sqrtf(warp_sum(squares) / static_cast<float>(heads.dim) + heads.epsilon);
  }
  const float2* rotation =
      heads.rotation == nullptr ? nullptr : heads.rotation + (first + token) * half;
  for (int i = lane; i < half; i += kWarp) {
    const float a = at(i) * (gain == nullptr ? 1.0F : scale * gain[i]);
    const float b = at(i + half) * (gain == nullptr ? 1.0F : scale * gain[i + half]);
    const float2 turn = rotation == nullptr ? make_float2(1.0F, 0.0F) : rotation[i];
    float* out = (is_query ? heads.query : heads.key) + place;
    out[i] = a * turn.x - b * turn.y;
    out[i + half] = b * turn.x + a * turn.y;
    if (is_query) continue;
    heads.pre_rope_key[place + i] = a;
    heads.pre_rope_key[place + i + half] = b;
  }
}

/// out [n, width] = silu(gate + bias) (up + bias) of rows [n, 2 width], gates first.
__global__ void gated(const float* rows, const float* bias, std::int64_t n, int width, float* out) {
  const std::int64_t index = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (index >= n * width) return;
  const std::int64_t token = index / width;
  const int i = static_cast<int>(index % width);
  float gate = rows[token * 2 * width + i], up = rows[token * 2 * width + width + i];
  if (bias != nullptr) gate += bias[i], up += bias[width + i];
  out[index] = gate / (1.0F + expf(-gate)) * up;
}

unsigned blocks_of(std::int64_t threads) {
  return static_cast<unsigned>((threads + kBlock - 1) / kBlock);
}

void upload(Floats& target, std::size_t at, const std::vector<float>& values) {
  gpu::check(cudaMemcpy(target.data() + at, values.data(), values.size() * sizeof(float),
                        cudaMemcpyHostToDevice),
             "cudaMemcpy");
}

Floats uploaded(const std::vector<float>& values) {
  Floats target(values.size());
  if (!values.empty()) upload(target, 0, values);
  return target;
}

const float* or_null(const Floats& values) { return values.size() == 0 ? nullptr : values.data(); }

/// Linear layers with the same input, one below the other. All have biases, or none.
struct Stacked {
  int in = 0, out = 0;
  Floats weight, bias;  // [out, in]; [out] or empty

  explicit Stacked(std::initializer_list<const Linear*> parts) {
    for (const Linear* part : parts) {
      in = part->in_features;
      out += part->out_features;
    }
    weight = Floats(static_cast<std::size_t>(in) * static_cast<std::size_t>(out));
    if (!(*parts.begin())->bias.empty()) bias = Floats(static_cast<std::size_t>(out));
    std::size_t row = 0;
    for (const Linear* part : parts) {
      upload(weight, row * static_cast<std::size_t>(in), part->weight);
      if (bias.size() != 0) upload(bias, row, part->bias);
      row += static_cast<std::size_t>(part->out_features);
    }
  }
};

struct DeviceLayer {
  explicit DeviceLayer(const Model::Layer& layer)
      : attention_gain(uploaded(layer.attention_norm)),
        mlp_gain(uploaded(layer.mlp_norm)),
        query_gain(uploaded(layer.query_norm)),
        key_gain(uploaded(layer.key_norm)),
        projections({&layer.query, &layer.key, &layer.value}),
        output({&layer.output}),
        gate_up({&layer.gate, &layer.up}),
        down({&layer.down}) {}
  Floats attention_gain, mlp_gain, query_gain, key_gain;
  Stacked projections, output, gate_up, down;
};

class GpuModel final : public DeviceModel {
 public:
  explicit GpuModel(const Model& model)
      : config_(model.config()),
        embedding_(uploaded(model.embedding())),
        final_gain_(uploaded(model.final_gain())) {
    check(cublasCreate(&handle_), "cublasCreate");  // products in f32: TF32 has to be asked for
    if (!config_.tied_head) head_ = uploaded(model.head());
    for (int i = 0; i < config_.num_layers; ++i) layers_.emplace_back(model.layer(i));
  }
  GpuModel(const GpuModel&) = delete;
  GpuModel& operator=(const GpuModel&) = delete;
  ~GpuModel() override { cublasDestroy(handle_); }

  std::vector<float> forward(const std::vector<std::int32_t>& tokens, std::int64_t first,
                             const Attention& attention) override {
    const auto n = static_cast<std::int64_t>(tokens.size());
    const int hidden = config_.hidden_size, inner = config_.intermediate_size;
    make_room(n);
    rotate_up_to(first + n);
    gpu::check(cudaMemcpy(ids_.data(), tokens.data(), tokens.size() * sizeof(std::int32_t),
                          cudaMemcpyHostToDevice),
               "cudaMemcpy");
    const auto rows = static_cast<unsigned>(n);
    embed<<<rows, kBlock>>>(embedding_.data(), ids_.data(), hidden, x_.data());
    const float *delta = nullptr, *bias = nullptr;  // what the next norm adds first
    for (int i = 0; i < config_.num_layers; ++i) {
      const DeviceLayer& layer = layers_[static_cast<std::size_t>(i)];
      add_and_norm<<<rows, kBlock>>>(x_.data(), delta, bias, layer.attention_gain.data(),
                                     config_.rms_norm_eps, hidden, normed_.data());
      multiply(layer.projections, normed_.data(), n, projected_.data());
      const Heads heads{config_.num_qo_heads,
                        config_.num_kv_heads,
                        config_.head_dim,
                        or_null(layer.projections.bias),
                        or_null(layer.query_gain),
                        or_null(layer.key_gain),
                        config_.rotates(i) ? rotation_.data() : nullptr,
                        config_.rms_norm_eps,
                        query_.data(),
                        key_.data(),
                        pre_rope_key_.data(),
                        value_.data()};
      const int all = config_.num_qo_heads + 2 * config_.num_kv_heads;
      split_heads<<<blocks_of(n * all * kWarp), kBlock>>>(projected_.data(), n, first, heads);
      gpu::check(cudaGetLastError(), "projections");
      attention(i, {query_.data(), key_.data(), value_.data(), pre_rope_key_.data()},
                attended_.data());
      multiply(layer.output, attended_.data(), n, delta_.data());
      add_and_norm<<<rows, kBlock>>>(x_.data(), delta_.data(), or_null(layer.output.bias),
                                     layer.mlp_gain.data(), config_.rms_norm_eps, hidden,
                                     normed_.data());
      multiply(layer.gate_up, normed_.data(), n, gate_up_.data());
      gated<<<blocks_of(n * inner), kBlock>>>(gate_up_.data(), or_null(layer.gate_up.bias), n,
                                              inner, inner_.data());
      multiply(layer.down, inner_.data(), n, delta_.data());
      delta = delta_.data();
      bias = or_null(layer.down.bias);
    }
    add_and_norm<<<rows, kBlock>>>(x_.data(), delta, bias, final_gain_.data(), config_.rms_norm_eps,
                                   hidden, normed_.data());
    gpu::check(cudaGetLastError(), "forward");
    return received(normed_, static_cast<std::size_t>(n) * static_cast<std::size_t>(hidden));
  }

  std::vector<float> logits(const float* hidden, std::int64_t n) override {
    const auto rows = static_cast<std::size_t>(n);
    const std::size_t in = rows * static_cast<std::size_t>(config_.hidden_size);
    const std::size_t out = rows * static_cast<std::size_t>(config_.vocabulary_size);
    grow(head_in_, in);
    grow(logits_, out);
    gpu::check(cudaMemcpy(head_in_.data(), hidden, in * sizeof(float), cudaMemcpyHostToDevice),
               "cudaMemcpy");
    multiply(config_.tied_head ? embedding_ : head_, config_.hidden_size, config_.vocabulary_size,
             head_in_.data(), n, logits_.data());
    return received(logits_, out);
  }

 private:
  static void grow(Floats& array, std::size_t size) {
    if (array.size() < size) array = Floats(size);
  }
  static std::vector<float> received(const Floats& source, std::size_t size) {
    std::vector<float> values(size);
    gpu::check(
        cudaMemcpy(values.data(), source.data(), size * sizeof(float), cudaMemcpyDeviceToHost),
        "cudaMemcpy");
    return values;
  }

  /// Room for the activations of n tokens.
  void make_room(std::int64_t n) {
    const auto size = [&](std::int64_t width) { return static_cast<std::size_t>(n * width); };
    if (ids_.size() < size(1)) ids_ = gpu::DeviceArray<std::int32_t>(size(1));
    const std::int64_t dim = config_.head_dim, inner = config_.intermediate_size;
    for (Floats* array : {&x_, &normed_, &delta_}) grow(*array, size(config_.hidden_size));
    for (Floats* array : {&query_, &attended_}) grow(*array, size(config_.num_qo_heads * dim));
    for (Floats* array : {&key_, &pre_rope_key_, &value_})
      grow(*array, size(config_.num_kv_heads * dim));
    grow(projected_, size((config_.num_qo_heads + 2 * config_.num_kv_heads) * dim));
    grow(gate_up_, size(2 * inner));
    grow(inner_, size(inner));
  }

  /// Cosines and sines of at least `positions` positions.
  void rotate_up_to(std::int64_t positions) {
    const std::size_t half = config_.rope_frequencies.size();
    if (rotation_.size() >= static_cast<std::size_t>(positions) * half) return;
    const std::int64_t count =
        std::min<std::int64_t>(std::max<std::int64_t>(2 * positions, 4096), config_.max_positions);
    std::vector<float2> turns;
    turns.reserve(static_cast<std::size_t>(count) * half);
    for (std::int64_t position = 0; position < count; ++position) {
      for (const double frequency : config_.rope_frequencies) {
        const double angle = frequency * static_cast<double>(position);
        turns.push_back(
            make_float2(static_cast<float>(std::cos(angle)), static_cast<float>(std::sin(angle))));
      }
    }
    rotation_ = gpu::DeviceArray<float2>(turns);
  }

  /// out [n, out_features] = in [n, in_features] weight^T, without the bias.
  void multiply(const Stacked& linear, const float* in, std::int64_t n, float* out) {
    multiply(linear.weight, linear.in, linear.out, in, n, out);
  }
  void multiply(const Floats& weight, int in_features, int out_features, const float* in,
                std::int64_t n, float* out) {
    // Row-major out = in weight^T is column-major out^T = weight in^T.
    const float one = 1.0F, zero = 0.0F;
    check(cublasSgemm(handle_, CUBLAS_OP_T, CUBLAS_OP_N, out_features, static_cast<int>(n),
                      in_features, &one, weight.data(), in_features, in, in_features, &zero, out,
                      out_features),
          "cublasSgemm");
  }

  const Config config_;
  cublasHandle_t handle_ = nullptr;
  Floats embedding_, final_gain_, head_;  // head_: empty where it is the embedding
  std::vector<DeviceLayer> layers_;
  gpu::DeviceArray<std::int32_t> ids_;
  gpu::DeviceArray<float2> rotation_;  // [positions so far, head_dim / 2]
  Floats x_, normed_, delta_, projected_, query_, key_, pre_rope_key_, value_, attended_;
  Floats gate_up_, inner_, head_in_, logits_;
};

}  // namespace

std::unique_ptr<DeviceModel> make_device_model(const Model& model) {
  return std::make_unique<GpuModel>(model);
}

}  // namespace llama
