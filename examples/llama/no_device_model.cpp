// SPDX-License-Identifier: Apache-2.0
// Instead of device_model.cu, in a build without CUDA.
#include <stdexcept>

#include "device_model.hpp"

namespace llama {

std::unique_ptr<DeviceModel> make_device_model(const Model&) {
  throw std::runtime_error("--device cuda: this program was built without LOWRANKKV_CUDA");
}

}  // namespace llama
