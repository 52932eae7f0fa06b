// SPDX-License-Identifier: Apache-2.0
/// @file cuda/decode/row_stage.cuh  Stages rows in shared memory, and writes them to an engine's
/// own tensor 16 bytes at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "lowrankkv/cuda/layer/token_range.cuh"
#include "lowrankkv/cuda/runtime/device.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Rows in shared memory, in the target's type. RowWriter writes them to the target.
struct RowStage {
  std::uint8_t* base;
  DType dtype;
  int channels;
  int stride;  ///< bytes from a row to the next: no two rows of a fragment hit one bank

  __device__ RowStage(std::uint8_t* memory, DType type, int row_channels)
      : base(memory),
        dtype(type),
        channels(row_channels),
        stride(static_cast<int>(bytes(type, row_channels))) {}
  static __host__ __device__ std::size_t bytes(DType type, int channels) {
    return static_cast<std::size_t>(channels) * (type == DType::f32 ? 4 : 2) + 16;
  }
  /// Stores two neighbouring channels of a row, the first even.
  /// @tparam type  equal to `dtype`
  template <DType type>
  __device__ void put_as(int row, int channel, float first, float second) const {
    std::uint8_t* at = base + row * stride;
    if constexpr (type == DType::f32)
      *reinterpret_cast<float2*>(at + 4 * channel) = {first, second};
    else
      *reinterpret_cast<std::uint32_t*>(at + 2 * channel) = to_word(type, first, second);
  }
  __device__ void put(int row, int channel, float first, float second) const {
    with_type([&](auto type) { put_as<decltype(type)::value>(row, channel, first, second); });
  }
  /// Calls f(std::integral_constant<DType, dtype>).
  template <class Function>
  __device__ void with_type(Function&& function) const {
    if (dtype == DType::f32)
      function(std::integral_constant<DType, DType::f32>{});
    else if (dtype == DType::f16)
      function(std::integral_constant<DType, DType::f16>{});
    else
      function(std::integral_constant<DType, DType::bf16>{});
  }
  /// put() of a word of two 16-bit numbers of a type.
  __device__ void put_word(int row, int channel, DType type, std::uint32_t word) const {
    if (dtype == type)
      *reinterpret_cast<std::uint32_t*>(base + row * stride + 2 * channel) = word;
    else
      put(row, channel, from_bits(type, static_cast<std::uint16_t>(word)),
          from_bits(type, static_cast<std::uint16_t>(word >> 16)));
  }
};

/// Writes rows of a stage to a target. A thread writes the same 16 bytes of every at_once-th row;
/// the constructor computes what that needs.
class RowWriter {
 public:
  /// @param first  row channel at which the stage's rows begin
  /// @param thread, threads  the number of this thread, and how many threads write
  __device__ RowWriter(const RowStage& stage, const DeviceTarget& target, int head, int first,
                       int thread, int threads)
      : size_(stage.dtype == DType::f32 ? 4 : 2), wide_(target.wide()) {
    const int per_row = stage.channels * size_ / 16;
    at_once_ = threads / per_row;
    row_ = thread < at_once_ * per_row ? thread / per_row : kNever;
    const int byte = thread % per_row * 16;
    from_ = stage.base + byte;
    stride_ = stage.stride;
    target_ = static_cast<std::uint8_t*>(target.data) +
              (head * target.head_stride + first) * size_ + byte;
  }
  /// Writes row i to places[i]; nothing, where that is kNowhere.
  template <int rows>
  __device__ void write(const std::int64_t* places) const {
#pragma unroll 1  // callers are short of registers
    for (int row = row_; row < rows; row += at_once_) {
      const std::int64_t place = places[row];
      if (place == kNowhere) continue;
      const uint4 words = *reinterpret_cast<const uint4*>(from_ + row * stride_);
      std::uint8_t* at = target_ + place * size_;
      if (wide_) {
        *reinterpret_cast<uint4*>(at) = words;
      } else {
        const std::uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (size_ == 2)
            reinterpret_cast<std::uint16_t*>(at)[i] =
                static_cast<std::uint16_t>(all[i / 2] >> (16 * (i % 2)));
          else if (i % 2 == 0)
            reinterpret_cast<std::uint32_t*>(at)[i / 2] = all[i / 2];
        }
      }
    }
  }

 private:
  static constexpr int kNever = 1 << 20;  // more than there are rows
  const std::uint8_t* from_;
  std::uint8_t* target_;
  int size_, at_once_, row_, stride_;
  bool wide_;
};

}  // namespace detail
}  // namespace cuda
LOWRANKKV_NAMESPACE_END
