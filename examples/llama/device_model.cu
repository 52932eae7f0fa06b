// SPDX-License-Identifier: Apache-2.0
#include "device_model.hpp"

#include <cstddef>
#include <numeric>

#include "device_layers.cuh"

namespace llama {
namespace {

using namespace device_layers;

class GpuModel final : public DeviceModel {
 public:
  explicit GpuModel(const Model& model) : layers_(model, nullptr) {}

  std::vector<float> forward(const std::vector<std::int32_t>& tokens, std::int64_t first,
                             const Attention& attention) override {
    const auto n = static_cast<std::int64_t>(tokens.size());
    at_.make_room(layers_.config(), n);
    layers_.rotate_up_to(first + n);
    std::vector<std::int32_t> positions(tokens.size());
    std::iota(positions.begin(), positions.end(), static_cast<std::int32_t>(first));
    send(tokens, ids_);
    send(positions, positions_);
    layers_.forward(at_, n, ids_.data(), positions_.data(), attention);
    return received(at_.normed,
                    tokens.size() * static_cast<std::size_t>(layers_.config().hidden_size));
  }

  std::vector<float> logits(const float* hidden, std::int64_t n) override {
    const auto rows = static_cast<std::size_t>(n);
    const Config& config = layers_.config();
    const std::size_t in = rows * static_cast<std::size_t>(config.hidden_size);
    const std::size_t out = rows * static_cast<std::size_t>(config.vocabulary_size);
    grow(head_in_, in);
    grow(logits_, out);
    gpu::check(cudaMemcpy(head_in_.data(), hidden, in * sizeof(float), cudaMemcpyHostToDevice),
               "cudaMemcpy");
    layers_.logits(head_in_.data(), n, logits_.data());
    return received(logits_, out);
  }

 private:
  static void send(const std::vector<std::int32_t>& values,
                   gpu::DeviceArray<std::int32_t>& target) {
    grow(target, values.size());
    gpu::check(cudaMemcpy(target.data(), values.data(), values.size() * sizeof(std::int32_t),
                          cudaMemcpyHostToDevice),
               "cudaMemcpy");
  }
  static std::vector<float> received(const Floats& source, std::size_t size) {
    std::vector<float> values(size);
    gpu::check(
        cudaMemcpy(values.data(), source.data(), size * sizeof(float), cudaMemcpyDeviceToHost),
        "cudaMemcpy");
    return values;
  }

  DeviceLayers<float> layers_;
  Activations<float> at_;
  gpu::DeviceArray<std::int32_t> ids_, positions_;
  Floats head_in_, logits_;
};

}  // namespace

std::unique_ptr<DeviceModel> make_device_model(const Model& model) {
  return std::make_unique<GpuModel>(model);
}

}  // namespace llama
