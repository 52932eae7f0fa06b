// SPDX-License-Identifier: Apache-2.0
#include "device_products.hpp"

#include <cublas_v2.h>

#include <string>
#include <unordered_map>

#include "lowrankkv/cuda/runtime/device.cuh"

namespace llama {
namespace {

namespace gpu = lowrankkv::cuda;

void check(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS)
    lowrankkv::detail::fail<lowrankkv::DeviceError>(call, ": ", cublasGetStatusString(status));
}

class Cublas final : public LinearProducts {
 public:
  Cublas() {
    check(cublasCreate(&handle_), "cublasCreate");
  }  // products in f32: TF32 has to be asked for
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;
  ~Cublas() override { cublasDestroy(handle_); }

  void multiply(const float* weight, int out_features, int in_features, const float* in,
                std::int64_t rows, float* out) override {
    const std::size_t in_size =
                          static_cast<std::size_t>(rows) * static_cast<std::size_t>(in_features),
                      out_size =
                          static_cast<std::size_t>(rows) * static_cast<std::size_t>(out_features);
    grow(in_, in_size);
    grow(out_, out_size);
    gpu::check(cudaMemcpy(in_.data(), in, in_size * sizeof(float), cudaMemcpyHostToDevice),
               "cudaMemcpy");
    // Row-major out = in weight^T is column-major out^T = weight in^T.
    const float one = 1.0F, zero = 0.0F;
    check(cublasSgemm(handle_, CUBLAS_OP_T, CUBLAS_OP_N, out_features, static_cast<int>(rows),
                      in_features, &one, weights(weight, out_features, in_features), in_features,
                      in_.data(), in_features, &zero, out_.data(), out_features),
          "cublasSgemm");
    gpu::check(cudaMemcpy(out, out_.data(), out_size * sizeof(float), cudaMemcpyDeviceToHost),
               "cudaMemcpy");
  }

 private:
  static void grow(gpu::DeviceArray<float>& array, std::size_t size) {
    if (array.size() < size) array = gpu::DeviceArray<float>(size);
  }
  const float* weights(const float* weight, int out_features, int in_features) {
    gpu::DeviceArray<float>& own = weights_[weight];
    if (own.size() == 0) {
      own = gpu::DeviceArray<float>(static_cast<std::size_t>(out_features) *
                                    static_cast<std::size_t>(in_features));
      gpu::check(cudaMemcpy(own.data(), weight, own.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
    }
    return own.data();
  }

  cublasHandle_t handle_ = nullptr;
  std::unordered_map<const float*, gpu::DeviceArray<float>> weights_;
  gpu::DeviceArray<float> in_, out_;
};

}  // namespace

std::unique_ptr<LinearProducts> make_device_products() { return std::make_unique<Cublas>(); }

}  // namespace llama
