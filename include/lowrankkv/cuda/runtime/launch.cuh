// SPDX-License-Identifier: Apache-2.0
/// @file cuda/runtime/launch.cuh  Kernel launches, and dispatch of run-time values to template
/// arguments.
#pragma once

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <type_traits>
#include <vector>

#include "lowrankkv/core/kernel_set.hpp"
#include "lowrankkv/cuda/runtime/device.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Shared memory of a kernel on a device, as the driver last knew it.
struct KernelMemory {
  const void* kernel = nullptr;
  int device = 0;
  int fixed = 0;            ///< bytes of static shared memory of a block
  std::size_t allowed = 0;  ///< bytes of dynamic shared memory that blocks may have
};

/// Allows a kernel so much dynamic shared memory on the current device. Asks the driver for the
/// static part once, and calls it again only if more dynamic memory is needed than any call allowed
/// before. Thread-safe.
/// @param bytes  of dynamic shared memory of a block
/// @param step  whether the kernel belongs to a decode step
/// @param again  set the attributes even if enough is allowed already
/// @return bytes of static shared memory of a block
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
  // A multiprocessor changes its split between L1 cache and shared memory only when it is idle. So
  // all kernels of a step ask for the largest shared memory: blocks of the next kernel then fit
  // beside those of this one. Other kernels run alone, and profit from what they leave as L1 cache
  // (the moments of a prompt by half, its codes by a quarter).
  if (step)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared),
          name);
  own->allowed = bytes;
  return own->fixed;
}

/// Bytes of dynamic shared memory left to a block of a decode step's kernel, if a block can have
/// `most` bytes in all.
template <class... Parameters>
int free_shared(void (*kernel)(Parameters...), int most) {
  return most -
         kernel_memory(reinterpret_cast<const void*>(kernel), 0, "cudaFuncGetAttributes", true);
}

/// Launches a kernel.
/// @param step  whether the kernel belongs to a decode step
/// @param early  programmatic dependent launch: the kernel may begin while its predecessor in the
/// stream ends, and waits for it where it must (from sm_90 on)
/// @throws DeviceError if the launch fails
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
  if (result == cudaErrorInvalidValue) {  // the device was reset and lost the attributes
    static_cast<void>(cudaGetLastError());
    kernel_memory(reinterpret_cast<const void*>(kernel), bytes, name, step, true);
    result = cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  }
  check(result, name);
}

/// Launches a kernel that shares the device with no other: not one of a decode step, not early.
template <class... Parameters, class... Arguments>
void launch_kernel(void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t bytes,
                   const char* name, cudaStream_t stream, const Arguments&... arguments) {
  launch_with(kernel, grid, threads, bytes, false, false, name, stream, arguments...);
}
/// Launches a kernel of a decode step. @param early  as for launch_with()
template <class... Parameters, class... Arguments>
void launch_step_kernel(void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t bytes,
                        bool early, const char* name, cudaStream_t stream,
                        const Arguments&... arguments) {
  launch_with(kernel, grid, threads, bytes, true, early, name, stream, arguments...);
}

/// Calls f with std::true_type or std::false_type.
template <class Function>
void with_bool(bool condition, Function&& function) {
  if (condition)
    function(std::true_type{});
  else
    function(std::false_type{});
}

/// Calls f with whether full rows in pages are in 8 bits, as a constant.
template <class Set, class Function>
void with_scaled(bool scaled, Function&& function) {
  if constexpr (Set::full_rows_8) {
    with_bool(scaled, function);
  } else {
    function(std::false_type{});
  }
}

/// Calls f with f16 or bf16 as an integral constant.
/// @tparam Set  types that it has; a cache of another type is refused when it is made
template <class Set = KernelSet, class Function>
void with_type(DType type, Function&& function) {
  static_assert(Set::f16 || Set::bf16, "lowrankkv: a KernelSet has f16, bf16, or both");
  if constexpr (!Set::bf16) {
    function(std::integral_constant<DType, DType::f16>{});
  } else if constexpr (!Set::f16) {
    function(std::integral_constant<DType, DType::bf16>{});
  } else if (type == DType::f16) {
    function(std::integral_constant<DType, DType::f16>{});
  } else {
    function(std::integral_constant<DType, DType::bf16>{});
  }
}

/// Calls f with 4, 8 or 16, the least that is not below `units`, as an integral constant. For plain
/// tiles also with 2, since their layout depends on it.
/// @tparam least, most  units that can occur: kernels for others are not compiled
template <bool plain, int least = 1, int most = 16, class Function>
void with_units(int units, Function&& function) {
  constexpr auto possible = [](int from, int to) { return least <= to && most >= from; };
  if constexpr (plain && possible(1, 2)) {
    if (units <= 2) return function(std::integral_constant<int, 2>{});
  }
  if constexpr (possible(plain ? 3 : 1, 4)) {
    if (units <= 4) return function(std::integral_constant<int, 4>{});
  }
  if constexpr (possible(5, 8)) {
    if (units <= 8) return function(std::integral_constant<int, 8>{});
  }
  if constexpr (possible(9, 16)) return function(std::integral_constant<int, 16>{});
}

/// Units of 16 channels that full rows of the caches of a set have, least and most.
template <class Set>
inline constexpr int kLeastFullUnits = Set::head_dim == 0 ? 1 : Set::head_dim / 16;
template <class Set>
inline constexpr int kMostFullUnits = Set::head_dim == 0 ? 16 : Set::head_dim / 16;
/// The most units of 32 channels that tiles of codes have.
template <class Set>
inline constexpr int kMostCodeUnits = Set::max_code_units == 0 ? 16 : Set::max_code_units;
/// The most units of 16 channels that plain tiles of coefficients have.
template <class Set>
inline constexpr int kMostRankUnits = Set::max_rank != 0 ? (Set::max_rank + 15) / 16
                                                         : kMostFullUnits<Set>;

}  // namespace detail
}  // namespace cuda
LOWRANKKV_NAMESPACE_END
