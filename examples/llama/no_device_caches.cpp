// SPDX-License-Identifier: Apache-2.0
// Instead of device_caches.cpp, in a build without CUDA.
#include <stdexcept>

#include "device_caches.hpp"

namespace llama {

std::unique_ptr<DeviceCaches> make_device_caches(const std::vector<lowrankkv::CacheConfig>&,
                                                 const std::vector<lowrankkv::LayerBasis>&,
                                                 const device::AnyPolicies&, bool, std::size_t,
                                                 DeviceStream) {
  throw std::runtime_error("--device cuda: this program was built without LOWRANKKV_CUDA");
}

}  // namespace llama
