// SPDX-License-Identifier: Apache-2.0
/// @file cuda/runtime/device.cuh  Strided views of rows in f32, f16 or bf16 in device memory, and
/// the conversion of their elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "lowrankkv/core/scalar.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cuda/runtime/device_memory.hpp"

LOWRANKKV_NAMESPACE_BEGIN

namespace cuda {

/// @brief A strided view of rows [token, head, channel] in device memory, passed to kernels by
/// value. Strides count elements.
struct DeviceRows {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t token_stride = 0, head_stride = 0, element_stride = 1;

  /// @brief Offset of a token's rows from `data`, in elements.
  __device__ std::int64_t place(std::int64_t token) const { return token * token_stride; }
  /// @brief One element as f32.
  __device__ float at(std::int64_t token, int head, int channel) const {
    return element(token * token_stride + head * head_stride + channel * element_stride);
  }
  /// @brief The element at offset `index` from `data`, as f32.
  __device__ float element(std::int64_t index) const {
    if (dtype == DType::f32) return static_cast<const float*>(data)[index];
    if (dtype == DType::f16) return __half2float(static_cast<const __half*>(data)[index]);
    return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
  }
  /// @brief Loads channels first, first + step, ... of a row as f32, with all loads in flight at
  /// once. Channels from `channels` on become zero.
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
    std::uint16_t words[count];  // zero bits are 0 in f16 and in bf16
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
  /// @brief The view that starts at a token.
  DeviceRows from(std::int64_t token) const {
    DeviceRows rest = *this;
    rest.data = static_cast<const std::uint8_t*>(data) +
                token * token_stride * static_cast<std::int64_t>(size_of(dtype));
    return rest;
  }
};

/// @brief Incoming keys or values, which may lie in an engine's pages.
struct PagedInput : DeviceRows {
  RowPages pages;

  /// @brief Offset of a token's rows from `data`, in elements.
  __device__ std::int64_t place(std::int64_t token) const {
    return pages.used() ? pages.place(token, token_stride) : token * token_stride;
  }
  /// @brief One element as f32.
  __device__ float at(std::int64_t token, int head, int channel) const {
    return element(place(token) + head * head_stride + channel * element_stride);
  }
};

/// @brief Converts a view whose pointer is to device memory and whose rows are not in pages.
template <class View>
DeviceRows device_rows(const View& view) {
  return {view.data, view.dtype, view.token_stride, view.head_stride, view.element_stride};
}
/// @brief Calls use(keys, values) with PagedInput if either view is paged, else with DeviceRows.
/// Kernels are compiled for both, since pages cost registers and steps to find a row.
template <class Use>
void with_rows(const KeyView& key, const ValueView& value, Use&& use) {
  if (key.pages.used() || value.pages.used())
    use(PagedInput{device_rows(key), key.pages}, PagedInput{device_rows(value), value.pages});
  else
    use(device_rows(key), device_rows(value));
}

/// @brief The bits of a value rounded to f16 or bf16, to nearest even. Finite values saturate (for
/// f16, up to 3e38).
__device__ inline std::uint16_t to_bits(DType type, float value) {
  if (type == DType::f16)
    return __half_as_ushort(
        __float2half_rn(fabsf(value) <= 3e38F ? fminf(fmaxf(value, -65504.0F), 65504.0F) : value));
  const __nv_bfloat16 rounded = __float2bfloat16_rn(value);
  const std::uint16_t bits = __bfloat16_as_ushort(rounded);
  const bool overflowed = (bits & 0x7fffU) == 0x7f80U && fabsf(value) <= 3.40282347e38F;
  return overflowed ? static_cast<std::uint16_t>(bits - 1U) : bits;
}
/// @brief Packs to_bits() of two numbers into a word, the first in the low half. For f16,
/// infinities saturate too.
__device__ __forceinline__ std::uint32_t to_word(DType type, float first, float second) {
  if (type != DType::f16)
    return static_cast<std::uint32_t>(to_bits(type, first)) |
           static_cast<std::uint32_t>(to_bits(type, second)) << 16;
  const __half2 both =
      __hmin2_nan(__hmax2_nan(__floats2half2_rn(first, second), __float2half2_rn(-65504.0F)),
                  __float2half2_rn(65504.0F));
  return *reinterpret_cast<const std::uint32_t*>(&both);
}
/// @brief The value of f16 or bf16 bits.
__device__ inline float from_bits(DType type, std::uint16_t bits) {
  return type == DType::f16 ? __half2float(__ushort_as_half(bits))
                            : __bfloat162float(__ushort_as_bfloat16(bits));
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
