// SPDX-License-Identifier: Apache-2.0
/// @file cuda/runtime/device.cuh  Errors of the CUDA runtime, device memory that frees itself,
/// elements of the three types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/scalar.hpp"
#include "lowrankkv/core/views.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief The CUDA runtime reported an error.
class DeviceError : public Error {
 public:
  using Error::Error;
};

namespace cuda {

/// @brief Raises DeviceError with `what` and the runtime's words unless `status` is success.
inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    ::lowrankkv::detail::fail<DeviceError>(what, ": ", cudaGetErrorName(status), ", ",
                                           cudaGetErrorString(status));
}

/// @brief Where device memory comes from: an engine's own allocator. Asked when caches are made,
/// when buffers of prompts grow, to save and load, and by certify(); never by append(), attend()
/// and maintain().
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  /// @brief Memory of the current device, aligned to 256 bytes; null if there is none.
  virtual void* allocate(std::size_t bytes) = 0;
  /// @brief Takes it back. Work enqueued before may still use it: as cudaFree(), wait for it.
  virtual void release(void* memory, std::size_t bytes) noexcept = 0;
};

namespace detail {
inline std::atomic<DeviceMemory*>& device_memory() {
  static std::atomic<DeviceMemory*> current{nullptr};
  return current;
}
}  // namespace detail

/// @brief From now on device memory comes from `memory`, which must outlive what is made with it;
/// null: from cudaMalloc(), as at first. Returns what it came from before.
inline DeviceMemory* exchange_device_memory(DeviceMemory* memory) {
  return detail::device_memory().exchange(memory);
}

/// @brief An array in device memory, zero at first; freed with its owner. Making and freeing it
/// synchronises: never on the decode path.
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
    // Clearing is asynchronous, and streams that do not wait for the default one may be next to use
    // the array.
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

/// @brief Rows [token, head, channel] in device memory as kernels see them.
struct DeviceRows {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t token_stride = 0, head_stride = 0, element_stride = 1;

  /// @brief Elements from `data` to a token's rows.
  __device__ std::int64_t place(std::int64_t token) const { return token * token_stride; }
  /// @brief One element as f32.
  __device__ float at(std::int64_t token, int head, int channel) const {
    return element(token * token_stride + head * head_stride + channel * element_stride);
  }
  /// @brief The element so many further on than the first.
  __device__ float element(std::int64_t index) const {
    if (dtype == DType::f32) return static_cast<const float*>(data)[index];
    if (dtype == DType::f16) return __half2float(static_cast<const __half*>(data)[index]);
    return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
  }
  /// @brief Channels first, first + step, ... of a row as f32, all on their way at once; zeros from
  /// `channels` on.
  template <int count>
  __device__ void gather(std::int64_t token, int head, int first, int step, int channels,
                         float (&values)[count]) const {
    const std::int64_t row = token * token_stride + head * head_stride;
    if (dtype == DType::f32) {
#pragma unroll
      for (int i = 0; i < count; ++i)
        values[i] = first + i * step < channels
                        ? static_cast<const float*>(data)[row + (first + i * step) * element_stride]
                        : 0.0F;
      return;
    }
    std::uint16_t words[count];  // zeros of either type
#pragma unroll
    for (int i = 0; i < count; ++i)
      words[i] =
          first + i * step < channels
              ? static_cast<const std::uint16_t*>(data)[row + (first + i * step) * element_stride]
              : std::uint16_t{0};
#pragma unroll
    for (int i = 0; i < count; ++i)
      values[i] = dtype == DType::f16 ? __half2float(__ushort_as_half(words[i]))
                                      : __uint_as_float(static_cast<std::uint32_t>(words[i]) << 16);
  }
  /// @brief The rows from a token on.
  DeviceRows from(std::int64_t token) const {
    DeviceRows rest = *this;
    rest.data = static_cast<const std::uint8_t*>(data) +
                token * token_stride * static_cast<std::int64_t>(size_of(dtype));
    return rest;
  }
};

/// @brief Rows that may be in an engine's pages: keys or values that come in.
struct PagedInput : DeviceRows {
  RowPages pages;

  /// @brief Elements from `data` to a token's rows.
  __device__ std::int64_t place(std::int64_t token) const {
    return pages.used() ? pages.place(token, token_stride) : token * token_stride;
  }
  /// @brief One element as f32.
  __device__ float at(std::int64_t token, int head, int channel) const {
    return element(place(token) + head * head_stride + channel * element_stride);
  }
};

/// @brief A view (whose pointer is to device memory) as kernels see it; its rows are in no pages.
template <class View>
DeviceRows device_rows(const View& view) {
  return {view.data, view.dtype, view.token_stride, view.head_stride, view.element_stride};
}
/// @brief Calls use(keys, values) with what kernels see of them, which are compiled for each: pages
/// cost registers and steps to find a row.
template <class Use>
void with_rows(const KeyView& key, const ValueView& value, Use&& use) {
  if (key.pages.used() || value.pages.used())
    use(PagedInput{device_rows(key), key.pages}, PagedInput{device_rows(value), value.pages});
  else
    use(device_rows(key), device_rows(value));
}

/// @brief The bits of a value rounded to f16 or bf16, to nearest even; finite values saturate.
__device__ inline std::uint16_t to_bits(DType type, float value) {
  if (type == DType::f16)
    return __half_as_ushort(
        __float2half_rn(fabsf(value) <= 3e38F ? fminf(fmaxf(value, -65504.0F), 65504.0F) : value));
  const __nv_bfloat16 rounded = __float2bfloat16_rn(value);
  const std::uint16_t bits = __bfloat16_as_ushort(rounded);
  const bool overflowed = (bits & 0x7fffU) == 0x7f80U && fabsf(value) <= 3.40282347e38F;
  return overflowed ? static_cast<std::uint16_t>(bits - 1U) : bits;
}
/// @brief Two numbers as neighbours of a word: to_bits() of each, the first in the low half; of f16
/// infinite ones become the largest.
__device__ __forceinline__ std::uint32_t to_word(DType type, float first, float second) {
  if (type != DType::f16)
    return static_cast<std::uint32_t>(to_bits(type, first)) |
           static_cast<std::uint32_t>(to_bits(type, second)) << 16;
  const __half2 both =
      __hmin2_nan(__hmax2_nan(__floats2half2_rn(first, second), __float2half2_rn(-65504.0F)),
                  __float2half2_rn(65504.0F));
  return *reinterpret_cast<const std::uint32_t*>(&both);
}
/// @brief What f16 or bf16 bits stand for.
__device__ inline float from_bits(DType type, std::uint16_t bits) {
  return type == DType::f16 ? __half2float(__ushort_as_half(bits))
                            : __bfloat162float(__ushort_as_bfloat16(bits));
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
