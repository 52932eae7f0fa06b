// SPDX-License-Identifier: Apache-2.0
/// @file cuda/runtime/device_memory.hpp  CUDA error checks, and owning device arrays. For host
/// compilers too.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <utility>
#include <vector>

#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief The CUDA runtime reported an error.
class DeviceError : public Error {
 public:
  using Error::Error;
};

namespace cuda {

/// @brief Checks a status of the CUDA runtime.
/// @throws DeviceError with `what` and the runtime's error name and text, unless `status` is
/// success
inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    ::lowrankkv::detail::fail<DeviceError>(what, ": ", cudaGetErrorName(status), ", ",
                                           cudaGetErrorString(status));
}

/// @brief An allocator of device memory that an engine provides.
///
/// A cache calls it
/// - when it is made, with its pool and workspace, and when its prompt buffers grow (prefill,
///   ingest);
/// - in save, load, certify, remove and pages_to_remove, if their scratch memory must grow;
/// - once, when rows are first removed from a layer's scored lists (HeavyHitters): in truncate or
///   remove, or in the first flush after load() brought more rows than the policy keeps.
///
/// append, attend, attend_partial and accumulate never call it. maintain calls it in that last case
/// only.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  /// @brief Allocates memory of the current device, aligned to 256 bytes. @return null if there is
  /// none left
  virtual void* allocate(std::size_t bytes) = 0;
  /// @brief Frees `memory`. Work enqueued earlier may still use it: like cudaFree(), wait for that
  /// work first.
  virtual void release(void* memory, std::size_t bytes) noexcept = 0;
};

namespace detail {
inline std::atomic<DeviceMemory*>& device_memory() {
  static std::atomic<DeviceMemory*> current{nullptr};
  return current;
}
}  // namespace detail

/// @brief Sets the allocator of all later device memory.
/// @param memory  must outlive everything that is allocated from it; null: cudaMalloc(), the
/// default
/// @return the allocator used before
inline DeviceMemory* exchange_device_memory(DeviceMemory* memory) {
  return detail::device_memory().exchange(memory);
}

/// @brief An owned array in device memory, zero-initialised. Construction and destruction
/// synchronise: never use them on the decode path.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(std::size_t size) : size_(size) {
    if (size == 0) return;
    from_ = detail::device_memory().load();
    if (from_ == nullptr) {
      check(cudaMalloc(reinterpret_cast<void**>(&data_), size * sizeof(T)), "cudaMalloc");
    } else {
      data_ = static_cast<T*>(from_->allocate(bytes()));
      if (data_ == nullptr)
        ::lowrankkv::detail::fail<CapacityError>("device memory: ", bytes(),
                                                 " bytes asked for, null given");
    }
    // cudaMemset is asynchronous, and the next user of the array may be a stream that does not
    // synchronise with the default stream.
    cudaError_t status = cudaMemset(data_, 0, size * sizeof(T));
    if (status == cudaSuccess) status = cudaStreamSynchronize(cudaStreamLegacy);
    if (status != cudaSuccess) free();  // the destructor will not run
    check(status, "cudaMemset");
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    if (values.empty()) return;
    check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
          "cudaMemcpy");
    check(cudaStreamSynchronize(cudaStreamLegacy), "cudaMemcpy");
  }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        from_(other.from_) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(from_, other.from_);
    return *this;
  }
  ~DeviceArray() { free(); }
  T* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::size_t bytes() const { return size_ * sizeof(T); }

 private:
  void free() noexcept {
    if (data_ == nullptr) return;
    if (from_ == nullptr)
      cudaFree(data_);
    else
      from_->release(data_, bytes());
    data_ = nullptr;
  }
  T* data_ = nullptr;
  std::size_t size_ = 0;
  DeviceMemory* from_ = nullptr;  ///< null: cudaMalloc()
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
