// SPDX-License-Identifier: Apache-2.0
// A model that is computed on a GPU: no Eigen here, no CUDA.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention_rows.hpp"

namespace llama {

class Model;

/// Weights in f32, in the memory of the GPU that was the current one. Activations stay there too:
/// what comes back is the last layer's output, and logits. All work is on the default stream.
class DeviceModel {
 public:
  virtual ~DeviceModel() = default;
  /// Runs tokens, which the vocabulary has, at positions [first, first + tokens.size()), which the
  /// model has, through the layers. `attention` gets rows in device memory and enqueues its work.
  /// Waits for the device at the end; device memory grows to that of the longest call so far.
  /// @return the normalised hidden states [n, hidden_size]
  virtual std::vector<float> forward(const std::vector<std::int32_t>& tokens, std::int64_t first,
                                     const Attention& attention) = 0;
  /// Logits [n, vocabulary_size] of hidden states [n, hidden_size]. Waits for the device.
  virtual std::vector<float> logits(const float* hidden, std::int64_t n) = 0;
};

/// Copies the weights of a model to the current GPU.
/// @throws lowrankkv::DeviceError where CUDA or cuBLAS reports an error; std::runtime_error in a
///         program built without CUDA
std::unique_ptr<DeviceModel> make_device_model(const Model& model);

}  // namespace llama
