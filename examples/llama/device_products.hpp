// SPDX-License-Identifier: Apache-2.0
// The products of a model's linear layers on a GPU, rows of host memory in and out: no Eigen here,
// no CUDA.
#pragma once

#include <cstdint>
#include <memory>

namespace llama {

class LinearProducts {
 public:
  virtual ~LinearProducts() = default;
  /// out [rows, out_features] = in [rows, in_features] weight^T. The weights [out_features,
  /// in_features] are copied to the device when their address is first seen.
  virtual void multiply(const float* weight, int out_features, int in_features, const float* in,
                        std::int64_t rows, float* out) = 0;
};

#ifdef LOWRANKKV_LLAMA_CUDA
/// cuBLAS on the current GPU, in f32.
std::unique_ptr<LinearProducts> make_device_products();
#endif

}  // namespace llama
