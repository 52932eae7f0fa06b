// SPDX-License-Identifier: Apache-2.0
/// @file cuda/runtime/device_scope.hpp  Calls on a device that need not be the thread's current
/// one, and checks that streams and memory are that device's. For host compilers too.
#pragma once

#include <cuda_runtime_api.h>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/cuda/runtime/device_memory.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief The calling thread's current device. @throws DeviceError
inline int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

/// @brief Whether the stream is capturing a graph: work that is enqueued runs later, perhaps often.
/// @throws DeviceError
inline bool capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

/// @brief Checks that a stream is one of a device, which is current. Default streams are: they
/// belong to the current device. A stream that captures is not checked, because asking for its
/// device would end the capture: there the first launch fails. So it does before CUDA 12.8, whose
/// runtime does not tell a stream's device.
/// @throws ValueError with both devices; DeviceError
inline void check_stream(const char* call, int device, cudaStream_t stream) {
#if CUDART_VERSION >= 12080
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread) return;
  if (capturing(stream)) return;
  int of_stream = device;
  check(cudaStreamGetDevice(stream, &of_stream), "cudaStreamGetDevice");
  if (of_stream != device)
    ::lowrankkv::detail::fail<ValueError>(call, ": the stream is of device ", of_stream,
                                          ", the cache of device ", device);
#else
  static_cast<void>(call);
  static_cast<void>(device);
  static_cast<void>(stream);
#endif
}

/// @brief Makes a device current, and at its end the one that was current before. Waits for
/// nothing, allocates nothing.
class DeviceScope {
 public:
  /// @throws DeviceError
  explicit DeviceScope(int device) : before_(current_device()), changed_(before_ != device) {
    if (changed_) check(cudaSetDevice(device), "cudaSetDevice");
  }
  /// @brief For a call of a cache on `device` that enqueues work on `stream`.
  /// @throws as check_stream()
  DeviceScope(const char* call, int device, cudaStream_t stream) : DeviceScope(device) {
    check_stream(call, device, stream);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  ~DeviceScope() {
    if (changed_) static_cast<void>(cudaSetDevice(before_));
  }

 private:
  int before_;
  bool changed_;
};

/// @brief Checks that memory which a caller lends is not another device's. Null is fine, and so is
/// memory that every device reaches (managed, or the host's).
/// @throws ValueError with both devices; DeviceError
inline void check_lent_memory(const char* what, const void* memory, int device) {
  if (memory == nullptr) return;
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, memory), "cudaPointerGetAttributes");
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != device)
    ::lowrankkv::detail::fail<ValueError>(what, ": memory of device ", attributes.device,
                                          ", the cache is made on device ", device);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
