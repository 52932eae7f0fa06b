// SPDX-License-Identifier: Apache-2.0
/// @file cuda/launch.cuh  How kernels are launched, and types known at run time become template arguments.
#pragma once

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <type_traits>
#include <vector>

#include "lowrankkv/cuda/device.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Lets blocks of a kernel have so many bytes of shared memory on the current device; asks for it only where it was not asked for as much before, whoever did. @param again  ask anyway
inline void allow_shared(const void* kernel, std::size_t bytes, const char* name, bool again = false) {
  struct Allowed {
    const void* kernel;
    int device;
    std::size_t bytes;
  };
  static std::mutex mutex;
  static std::vector<Allowed> kernels;
  int device = 0;
  check(cudaGetDevice(&device), name);
  const std::lock_guard lock(mutex);
  auto own = std::find_if(kernels.begin(), kernels.end(), [&](const Allowed& other) { return other.kernel == kernel && other.device == device; });
  if (own != kernels.end() && own->bytes >= bytes && !again) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)), name);
  // A multiprocessor divides its memory anew only when it is empty: as the largest of a step's kernels want it, so that blocks of the next one find room beside this one's.
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared), name);
  if (own == kernels.end()) kernels.push_back({kernel, device, bytes});
  else own->bytes = bytes;
}

/// Launches a kernel that may begin while the one before it in the stream ends, and waits for it where it must (from sm_90 on).
template <class... Parameters, class... Arguments>
void launch_early(void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t bytes, bool early, const char* name, cudaStream_t stream, const Arguments&... arguments) {
  allow_shared(reinterpret_cast<const void*>(kernel), bytes, name);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  cudaError_t result = cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  if (result == cudaErrorInvalidValue) {  // what was allowed is gone: the device was reset
    static_cast<void>(cudaGetLastError());
    allow_shared(reinterpret_cast<const void*>(kernel), bytes, name, true);
    result = cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  }
  check(result, name);
}

/// Calls f with true or false as a constant.
template <class Function>
void with_bool(bool condition, Function&& function) {
  if (condition) function(std::true_type{});
  else function(std::false_type{});
}

/// Calls f with f16 or bf16 as a constant.
template <class Function>
void with_type(DType type, Function&& function) {
  if (type == DType::f16) {
    function(std::integral_constant<DType, DType::f16>{});
  } else {
    function(std::integral_constant<DType, DType::bf16>{});
  }
}

/// Calls f with 2, 4, 8 or 16, whichever `units` fit in; 2 for plain tiles, whose form depends on it.
template <bool plain, class Function>
void with_units(int units, Function&& function) {
  if (plain && units <= 2) {
    if constexpr (plain) function(std::integral_constant<int, 2>{});
  } else if (units <= 4) {
    function(std::integral_constant<int, 4>{});
  } else if (units <= 8) {
    function(std::integral_constant<int, 8>{});
  } else {
    function(std::integral_constant<int, 16>{});
  }
}

}  // namespace detail
}  // namespace cuda
LOWRANKKV_NAMESPACE_END
