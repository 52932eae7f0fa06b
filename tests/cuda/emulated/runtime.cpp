// SPDX-License-Identifier: Apache-2.0
// What the library and its tests ask of the CUDA runtime, where kernels run on the host: memory is
// the host's, streams do everything at once, graphs are lists of work.
#include "emulator.hpp"

#include <map>
#include <mutex>

namespace {
cudaError_t last = cudaSuccess;

// Two devices, so that tests can make the wrong one current. Memory is the current device's, as far
// as anybody asks.
thread_local int current = 0;
std::mutex mutex;
/// Devices of memory, which may be freed after everything else.
std::map<const void*, int>& devices() {
  static auto& all = *new std::map<const void*, int>;
  return all;
}
/// What the emulation allocates meanwhile is not the library's.
struct AtWork {
  AtWork() : lock(mutex) { ++emulated::at_work; }
  ~AtWork() { --emulated::at_work; }
  std::lock_guard<std::mutex> lock;
};
}  // namespace

/// A stream that was created, on the device that was current then.
struct CUstream_st {
  int device;
};

namespace emulated {
bool of_current_device(cudaStream_t stream) {
  return stream == nullptr || stream->device == current;
}
template <class Sum, int depth>
void sum_products(const Sum (&a)[16][depth], const Sum (&b)[depth][8], Sum (&sums)[16][8]) {
  for (int row = 0; row < 16; ++row) {
    Sum own[8] = {};
    for (int k = 0; k < depth; ++k) {
      for (int column = 0; column < 8; ++column) own[column] += a[row][k] * b[k][column];
    }
    std::copy_n(own, 8, sums[row]);
  }
}
template void sum_products(const double (&)[16][8], const double (&)[8][8], double (&)[16][8]);
template void sum_products(const double (&)[16][16], const double (&)[16][8], double (&)[16][8]);
template void sum_products(const int (&)[16][32], const int (&)[32][8], int (&)[16][8]);
}  // namespace emulated

extern "C" {
cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (*memory == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*memory, 0xff, bytes);
  const AtWork work;
  devices()[*memory] = current;
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  {
    const AtWork work;
    devices().erase(memory);
  }
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* target, const void* source, std::size_t bytes, cudaMemcpyKind) {
  std::memmove(target, source, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t) {
  emulated::enqueue([=] { std::memset(memory, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemset2DAsync(void* memory, std::size_t stride, int value, std::size_t width,
                              std::size_t height, cudaStream_t) {
  emulated::enqueue([=] {
    for (std::size_t row = 0; row < height; ++row)
      std::memset(static_cast<char*>(memory) + row * stride, value, width);
  });
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  emulated::enqueue([=] { std::memmove(target, source, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* target, std::size_t target_stride, const void* source,
                              std::size_t source_stride, std::size_t width, std::size_t height,
                              cudaMemcpyKind, cudaStream_t) {
  emulated::enqueue([=] {
    for (std::size_t row = 0; row < height; ++row)
      std::memmove(static_cast<char*>(target) + row * target_stride,
                   static_cast<const char*>(source) + row * source_stride, width);
  });
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = *total = std::size_t{1} << 30;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device > 1) return cudaErrorInvalidDevice;
  current = device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 2;
  return cudaSuccess;
}
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  if (emulated::captured() != nullptr) return cudaErrorStreamCaptureUnsupported;
  *device = stream == nullptr ? current : stream->device;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory) {
  *attributes = {};
  const AtWork work;
  const auto found = devices().find(memory);
  const bool known = found != devices().end();
  attributes->type = known ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  attributes->device = known ? found->second : -1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount            ? 8
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? emulated::shared_limit()
                                                                  : 9;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->sharedSizeBytes =
      4096;  // static shared memory is not counted here: as much as kernels have at most
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute attribute, int value) {
  return attribute == cudaFuncAttributeMaxDynamicSharedMemorySize &&
                 value > emulated::shared_limit()
             ? cudaErrorInvalidValue
             : cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaDeviceReset() { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  const AtWork work;
  *stream = new CUstream_st{current};
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status =
      emulated::captured() != nullptr ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  emulated::captured() = new emulated::Graph;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  *graph = reinterpret_cast<cudaGraph_t>(std::exchange(emulated::captured(), nullptr));
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* replay, cudaGraph_t graph, unsigned long long) {
  *replay = reinterpret_cast<cudaGraphExec_t>(
      new emulated::Graph(*reinterpret_cast<emulated::Graph*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t replay, cudaStream_t) {
  for (const auto& work : *reinterpret_cast<emulated::Graph*>(replay)) work();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<emulated::Graph*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t replay) {
  delete reinterpret_cast<emulated::Graph*>(replay);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  if (emulated::launch_fails != nullptr && emulated::launch_fails()) return cudaErrorLaunchFailure;
  return std::exchange(last, cudaSuccess);
}
const char* cudaGetErrorName(cudaError_t) { return "cudaError"; }
const char* cudaGetErrorString(cudaError_t) { return "emulated"; }
float __log2f(float x) noexcept { return std::log2(x); }  // the C library has declared it
}
