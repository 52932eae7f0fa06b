// SPDX-License-Identifier: Apache-2.0
// The layers of a model on a GPU: weights in f32, f16 or bf16, the kernels between the products,
// and their order. Residual stream, projections and logits are in f32; what a product reads is of
// the weights' type.
#pragma once

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>

#include "lowrankkv/cuda/runtime/device.cuh"
#include "model.hpp"

namespace llama::device_layers {

namespace gpu = lowrankkv::cuda;
using Floats = gpu::DeviceArray<float>;

inline constexpr int kWarp = 32, kBlock = 256;

inline void check(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS)
    lowrankkv::detail::fail<lowrankkv::DeviceError>(call, ": ", cublasGetStatusString(status));
}

/// A number of a weight's type, and back.
template <class Real>
__device__ Real real_of(float x) {
  return static_cast<Real>(x);
}
template <class Real>
__device__ float float_of(Real x) {
  return static_cast<float>(x);
}
template <class Real>
constexpr cudaDataType_t type_of() {
  if constexpr (std::is_same_v<Real, float>)
    return CUDA_R_32F;
  else if constexpr (std::is_same_v<Real, __half>)
    return CUDA_R_16F;
  else
    return CUDA_R_16BF;
}

__device__ inline float warp_sum(float x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffU, x, step);
  return x;
}

/// The sum over a block of kBlock threads, in every one of them.
__device__ inline float block_sum(float x) {
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
template <class Real>
__global__ void embed(const Real* embedding, const std::int32_t* ids, int width, float* x) {
  const Real* from = embedding + std::int64_t{ids[blockIdx.x]} * width;
  float* to = x + std::int64_t{blockIdx.x} * width;
  for (int i = static_cast<int>(threadIdx.x); i < width; i += kBlock) to[i] = float_of(from[i]);
}

/// A block a row: x += delta + bias (either may be null), out = x / sqrt(mean(x^2) + epsilon) gain.
template <class Real>
__global__ void add_and_norm(float* x, const float* delta, const float* bias, const float* gain,
                             float epsilon, int width, Real* out) {
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
    out[row + i] = real_of<Real>(x[row + i] * scale * gain[i]);
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

/// A warp a head of a token at position positions[token]. projected [n, query_heads + 2 kv_heads,
/// dim] becomes queries, keys in both forms and values, [n, heads, dim] each.
template <class = void>
__global__ void split_heads(const float* projected, std::int64_t n, const std::int32_t* positions,
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
      heads.rotation == nullptr ? nullptr : heads.rotation + std::int64_t{positions[token]} * half;
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
template <class Real>
__global__ void gated(const float* rows, const float* bias, std::int64_t n, int width, Real* out) {
  const std::int64_t index = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (index >= n * width) return;
  const std::int64_t token = index / width;
  const int i = static_cast<int>(index % width);
  float gate = rows[token * 2 * width + i], up = rows[token * 2 * width + width + i];
  if (bias != nullptr) gate += bias[i], up += bias[width + i];
  out[index] = real_of<Real>(gate / (1.0F + expf(-gate)) * up);
}

/// out [count] = in, in the type of weights.
template <class Real>
__global__ void narrow(const float* in, std::int64_t count, Real* out) {
  const std::int64_t index = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (index < count) out[index] = real_of<Real>(in[index]);
}

/// Number `index` of those between -1 and 1 that a seed gives: SplitMix64.
__device__ inline float drawn(std::uint64_t seed, std::int64_t index) {
  std::uint64_t z =
      seed * 0xd1342543de82ef95ULL + 0x9e3779b97f4a7c15ULL * static_cast<std::uint64_t>(index + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  z ^= z >> 31;
  return static_cast<float>(z >> 40) * 0x1p-23F - 1.0F;
}
/// out [count]: numbers between -bound and bound, the same for the same seed.
template <class Real>
__global__ void draw(std::int64_t count, std::uint64_t seed, float bound, Real* out) {
  const std::int64_t index = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (index < count) out[index] = real_of<Real>(bound * drawn(seed, index));
}

inline unsigned blocks_of(std::int64_t threads) {
  return static_cast<unsigned>((threads + kBlock - 1) / kBlock);
}

inline Floats uploaded(const std::vector<float>& values) {
  Floats target(values.size());
  if (!values.empty())
    gpu::check(cudaMemcpy(target.data(), values.data(), values.size() * sizeof(float),
                          cudaMemcpyHostToDevice),
               "cudaMemcpy");
  return target;
}

inline const float* or_null(const Floats& values) {
  return values.size() == 0 ? nullptr : values.data();
}

/// Weights [out, in] from the host, in the type Real.
template <class Real>
void upload(Real* target, const std::vector<float>& values) {
  const Floats staged = uploaded(values);
  const auto count = static_cast<std::int64_t>(values.size());
  narrow<<<blocks_of(count), kBlock>>>(staged.data(), count, target);
  gpu::check(cudaDeviceSynchronize(), "weights");
}

/// Linear layers with the same input, one below the other. All have biases, or none.
template <class Real>
struct Stacked {
  int in = 0, out = 0;
  gpu::DeviceArray<Real> weight;  // [out, in]
  Floats bias;                    // [out] or empty

  explicit Stacked(std::initializer_list<const Linear*> parts) {
    std::vector<float> biases;
    for (const Linear* part : parts) {
      in = part->in_features;
      out += part->out_features;
      biases.insert(biases.end(), part->bias.begin(), part->bias.end());
    }
    weight = gpu::DeviceArray<Real>(static_cast<std::size_t>(in) * static_cast<std::size_t>(out));
    bias = uploaded(biases);
    std::size_t row = 0;
    for (const Linear* part : parts) {
      upload(weight.data() + row * static_cast<std::size_t>(in), part->weight);
      row += static_cast<std::size_t>(part->out_features);
    }
  }
  /// Random weights that keep the size of what they multiply.
  Stacked(int in_features, int out_features, std::uint64_t seed)
      : in(in_features),
        out(out_features),
        weight(static_cast<std::size_t>(in) * static_cast<std::size_t>(out)) {
    const auto count = static_cast<std::int64_t>(weight.size());
    draw<<<blocks_of(count), kBlock>>>(count, seed, std::sqrt(3.0F / static_cast<float>(in)),
                                       weight.data());
    gpu::check(cudaGetLastError(), "draw");
  }
  std::size_t bytes() const { return weight.bytes() + bias.bytes(); }
};

template <class Real>
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
  DeviceLayer(const Config& config, std::uint64_t seed)
      : attention_gain(ones(config.hidden_size)),
        mlp_gain(ones(config.hidden_size)),
        query_gain(ones(config.head_norms ? config.head_dim : 0)),
        key_gain(ones(config.head_norms ? config.head_dim : 0)),
        projections(config.hidden_size,
                    (config.num_qo_heads + 2 * config.num_kv_heads) * config.head_dim, seed),
        output(config.num_qo_heads * config.head_dim, config.hidden_size, seed + 1),
        gate_up(config.hidden_size, 2 * config.intermediate_size, seed + 2),
        down(config.intermediate_size, config.hidden_size, seed + 3) {}
  static Floats ones(int count) {
    return uploaded(std::vector<float>(static_cast<std::size_t>(count), 1.0F));
  }
  std::size_t bytes() const {
    return attention_gain.bytes() + mlp_gain.bytes() + query_gain.bytes() + key_gain.bytes() +
           projections.bytes() + output.bytes() + gate_up.bytes() + down.bytes();
  }
  Floats attention_gain, mlp_gain, query_gain, key_gain;
  Stacked<Real> projections, output, gate_up, down;
};

/// Room for `size` elements. What was in the array is lost if it grows, which waits.
template <class T>
void grow(gpu::DeviceArray<T>& array, std::size_t size) {
  if (array.size() >= size) return;
  array = gpu::DeviceArray<T>();  // before the larger one is there
  array = gpu::DeviceArray<T>(size);
}

/// What the layers compute of n tokens: room for the largest n so far. A graph that was captured
/// with some activations is only good as long as they are not moved.
template <class Real>
class Activations {
 public:
  Activations() = default;
  Activations(const Activations&) = delete;
  Activations& operator=(const Activations&) = delete;

  /// Room for n tokens. Device memory grows, which waits.
  void make_room(const Config& config, std::int64_t n) {
    const auto size = [&](std::int64_t width) { return static_cast<std::size_t>(n * width); };
    const std::int64_t inner = config.intermediate_size, hidden = config.hidden_size,
                       query_width = config.num_qo_heads * config.head_dim,
                       key_width = config.num_kv_heads * config.head_dim;
    for (Floats* array : {&x, &delta}) grow(*array, size(hidden));
    for (Floats* array : {&query, &attended}) grow(*array, size(query_width));
    for (Floats* array : {&key, &pre_rope_key, &value}) grow(*array, size(key_width));
    grow(projected, size(query_width + 2 * key_width));
    grow(gate_up, size(2 * inner));
    grow(normed, size(hidden));
    grow(gated_rows, size(inner));
    if constexpr (!std::is_same_v<Real, float>) grow(narrowed, size(query_width));
  }
  Floats x, delta, projected, query, key, pre_rope_key, value, attended, gate_up;
  gpu::DeviceArray<Real> normed;  // behind the last norm: the output [n, hidden_size]
  gpu::DeviceArray<Real> gated_rows, narrowed;
};

/// A model's weights on the current GPU. All work is on one stream.
template <class Real>
class DeviceLayers {
 public:
  DeviceLayers(const Model& model, cudaStream_t stream)
      : config_(model.config()), stream_(stream), final_gain_(uploaded(model.final_gain())) {
    embedding_ = gpu::DeviceArray<Real>(model.embedding().size());
    upload(embedding_.data(), model.embedding());
    if (!config_.tied_head) {
      head_ = gpu::DeviceArray<Real>(model.head().size());
      upload(head_.data(), model.head());
    }
    for (int i = 0; i < config_.num_layers; ++i) layers_.emplace_back(model.layer(i));
    make_handle();
  }
  /// Random weights, drawn on the device: what a model of this shape costs.
  DeviceLayers(const Config& config, std::uint64_t seed, cudaStream_t stream)
      : config_(config), stream_(stream), final_gain_(DeviceLayer<Real>::ones(config.hidden_size)) {
    const auto drawn = [&](std::uint64_t own) {
      return std::move(Stacked<Real>(config.hidden_size, config.vocabulary_size, own).weight);
    };
    embedding_ = drawn(seed);
    if (!config.tied_head) head_ = drawn(seed + 1);
    for (int i = 0; i < config.num_layers; ++i)
      layers_.emplace_back(config, seed + 2 + 4 * static_cast<std::uint64_t>(i));
    gpu::check(cudaDeviceSynchronize(), "weights");
    make_handle();
  }
  DeviceLayers(const DeviceLayers&) = delete;
  DeviceLayers& operator=(const DeviceLayers&) = delete;
  ~DeviceLayers() { cublasDestroy(handle_); }

  const Config& config() const { return config_; }
  cudaStream_t stream() const { return stream_; }
  std::size_t weight_bytes() const {
    std::size_t bytes = embedding_.bytes() + head_.bytes() + final_gain_.bytes();
    for (const DeviceLayer<Real>& layer : layers_) bytes += layer.bytes();
    return bytes;
  }

  /// Cosines and sines of at least `positions` positions; waits where there are fewer.
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

  /// Runs n tokens through the layers: ids the vocabulary has and their positions, in device
  /// memory, for which there is room. `attention` gets rows in device memory and enqueues its work
  /// on the stream. at.normed is then the output. Capturable, if `attention` is.
  void forward(Activations<Real>& at, std::int64_t n, const std::int32_t* ids,
               const std::int32_t* positions, const Attention& attention) {
    const int hidden = config_.hidden_size, inner = config_.intermediate_size;
    const auto rows = static_cast<unsigned>(n);
    embed<<<rows, kBlock, 0, stream_>>>(embedding_.data(), ids, hidden, at.x.data());
    const float *delta = nullptr, *bias = nullptr;  // what the next norm adds first
    for (int i = 0; i < config_.num_layers; ++i) {
      const DeviceLayer<Real>& layer = layers_[static_cast<std::size_t>(i)];
      add_and_norm<<<rows, kBlock, 0, stream_>>>(at.x.data(), delta, bias,
                                                 layer.attention_gain.data(), config_.rms_norm_eps,
                                                 hidden, at.normed.data());
      multiply(layer.projections, at.normed.data(), n, at.projected.data());
      const Heads heads{config_.num_qo_heads,
                        config_.num_kv_heads,
                        config_.head_dim,
                        or_null(layer.projections.bias),
                        or_null(layer.query_gain),
                        or_null(layer.key_gain),
                        config_.rotates(i) ? rotation_.data() : nullptr,
                        config_.rms_norm_eps,
                        at.query.data(),
                        at.key.data(),
                        at.pre_rope_key.data(),
                        at.value.data()};
      const int all = config_.num_qo_heads + 2 * config_.num_kv_heads;
      split_heads<><<<blocks_of(n * all * kWarp), kBlock, 0, stream_>>>(at.projected.data(), n,
                                                                        positions, heads);
      gpu::check(cudaGetLastError(), "projections");
      attention(i, {at.query.data(), at.key.data(), at.value.data(), at.pre_rope_key.data()},
                at.attended.data());
      multiply(layer.output, attended(at, n), n, at.delta.data());
      add_and_norm<<<rows, kBlock, 0, stream_>>>(at.x.data(), at.delta.data(),
                                                 or_null(layer.output.bias), layer.mlp_gain.data(),
                                                 config_.rms_norm_eps, hidden, at.normed.data());
      multiply(layer.gate_up, at.normed.data(), n, at.gate_up.data());
      gated<<<blocks_of(n * inner), kBlock, 0, stream_>>>(
          at.gate_up.data(), or_null(layer.gate_up.bias), n, inner, at.gated_rows.data());
      multiply(layer.down, at.gated_rows.data(), n, at.delta.data());
      delta = at.delta.data();
      bias = or_null(layer.down.bias);
    }
    add_and_norm<<<rows, kBlock, 0, stream_>>>(at.x.data(), delta, bias, final_gain_.data(),
                                               config_.rms_norm_eps, hidden, at.normed.data());
    gpu::check(cudaGetLastError(), "forward");
  }
  /// Logits [n, vocabulary_size] of rows [n, hidden_size].
  void logits(const Real* rows, std::int64_t n, float* out) {
    multiply(config_.tied_head ? embedding_ : head_, config_.hidden_size, config_.vocabulary_size,
             rows, n, out);
  }

 private:
  /// Products in f32 are in f32: TF32 has to be asked for.
  void make_handle() {
    // A capture must not allocate, so that cuBLAS has its memory from here.
    constexpr std::size_t bytes = std::size_t{32} << 20;
    workspace_ = gpu::DeviceArray<std::uint8_t>(bytes);
    check(cublasCreate(&handle_), "cublasCreate");
    check(cublasSetStream(handle_, stream_), "cublasSetStream");
    check(cublasSetWorkspace(handle_, workspace_.data(), bytes), "cublasSetWorkspace");
  }

  /// What attention wrote, in the type of weights.
  const Real* attended(Activations<Real>& at, std::int64_t n) {
    if constexpr (std::is_same_v<Real, float>) {
      return at.attended.data();
    } else {
      const std::int64_t count = n * config_.num_qo_heads * config_.head_dim;
      narrow<<<blocks_of(count), kBlock, 0, stream_>>>(at.attended.data(), count,
                                                       at.narrowed.data());
      return at.narrowed.data();
    }
  }

  /// out [n, out_features] = in [n, in_features] weight^T, without the bias.
  void multiply(const Stacked<Real>& linear, const Real* in, std::int64_t n, float* out) {
    multiply(linear.weight, linear.in, linear.out, in, n, out);
  }
  void multiply(const gpu::DeviceArray<Real>& weight, int in_features, int out_features,
                const Real* in, std::int64_t n, float* out) {
    // Row-major out = in weight^T is column-major out^T = weight in^T.
    const float one = 1.0F, zero = 0.0F;
    constexpr cudaDataType_t type = type_of<Real>();
    check(
        cublasGemmEx(handle_, CUBLAS_OP_T, CUBLAS_OP_N, out_features, static_cast<int>(n),
                     in_features, &one, weight.data(), type, in_features, in, type, in_features,
                     &zero, out, CUDA_R_32F, out_features, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
        "cublasGemmEx");
  }

  const Config config_;
  cudaStream_t stream_ = nullptr;
  cublasHandle_t handle_ = nullptr;
  gpu::DeviceArray<std::uint8_t> workspace_;  // of cuBLAS
  Floats final_gain_;
  gpu::DeviceArray<Real> embedding_, head_;  // head_: empty where it is the embedding
  std::vector<DeviceLayer<Real>> layers_;
  gpu::DeviceArray<float2> rotation_;  // [positions so far, head_dim / 2]
};

}  // namespace llama::device_layers
