// SPDX-License-Identifier: Apache-2.0
/// @file cuda/runtime/launch.cuh  How kernels are launched, and types known at run time become
/// template arguments.
#pragma once

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <type_traits>
#include <vector>

#include "lowrankkv/cuda/runtime/device.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// What is known of a kernel on a device.
struct KernelMemory {
  const void* kernel = nullptr;
  int device = 0;
  int fixed = 0;            ///< bytes of shared memory that every block has, asked for or not
  std::size_t allowed = 0;  ///< bytes that blocks may ask for beyond those
};

/// Shared memory of a kernel on the current device. The driver is asked once for what is fixed, and
/// told where blocks want more than was allowed, whoever wanted that.
/// @param bytes  that blocks want  @param step  the kernel is one of a decode step's  @param again
/// tell it anyway  @return bytes that every block has
inline int kernel_memory(const void* kernel, std::size_t bytes, const char* name, bool step,
                         bool again = false) {
  static std::mutex mutex;
  static std::vector<KernelMemory> kernels;
  int device = 0;
  check(cudaGetDevice(&device), name);
  const std::lock_guard lock(mutex);
  auto own = std::find_if(kernels.begin(), kernels.end(), [&](const KernelMemory& other) {
    return other.kernel == kernel && other.device == device;
  });
  if (own == kernels.end()) {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel), name);
    own = kernels.insert(own, {kernel, device, static_cast<int>(attributes.sharedSizeBytes)});
    again = true;
  }
  if (!again && own->allowed >= bytes) return own->fixed;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        name);
  // A multiprocessor divides its memory anew only when it is empty: as the largest of a step's
  // kernels want it, so that blocks of the next one find room beside this one's. Other kernels are
  // alone, and better off with what they leave as L1 cache (a prompt's moments and codes by half
  // and by a quarter).
  if (step)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared),
          name);
  own->allowed = bytes;
  return own->fixed;
}

/// Bytes of shared memory that a block of a decode step's kernel can ask for, where a block can
/// have `most` in all.
template <class... Parameters>
int free_shared(void (*kernel)(Parameters...), int most) {
  return most -
         kernel_memory(reinterpret_cast<const void*>(kernel), 0, "cudaFuncGetAttributes", true);
}

/// Launches a kernel. @param step  it is one of a decode step's  @param early  whether it may begin
/// while the one before it in the stream ends, and waits for it where it must (from sm_90 on)
template <class... Parameters, class... Arguments>
void launch_with(void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t bytes,
                 bool step, bool early, const char* name, cudaStream_t stream,
                 const Arguments&... arguments) {
  kernel_memory(reinterpret_cast<const void*>(kernel), bytes, name, step);
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
    kernel_memory(reinterpret_cast<const void*>(kernel), bytes, name, step, true);
    result = cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  }
  check(result, name);
}

/// Launches a kernel that has the device for itself.
template <class... Parameters, class... Arguments>
void launch_kernel(void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t bytes,
                   const char* name, cudaStream_t stream, const Arguments&... arguments) {
  launch_with(kernel, grid, threads, bytes, false, false, name, stream, arguments...);
}
/// Launches a kernel of a decode step. @param early  as above
template <class... Parameters, class... Arguments>
void launch_step_kernel(void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t bytes,
                        bool early, const char* name, cudaStream_t stream,
                        const Arguments&... arguments) {
  launch_with(kernel, grid, threads, bytes, true, early, name, stream, arguments...);
}

/// Calls f with true or false as a constant.
template <class Function>
void with_bool(bool condition, Function&& function) {
  if (condition)
    function(std::true_type{});
  else
    function(std::false_type{});
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

/// Calls f with 2, 4, 8 or 16, whichever `units` fit in; 2 for plain tiles, whose form depends on
/// it.
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
