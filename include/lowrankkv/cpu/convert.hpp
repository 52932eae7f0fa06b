// SPDX-License-Identifier: Apache-2.0
/// @file cpu/convert.hpp  Conversion of f32 arrays to and from the stored types, and of rows of
/// strided views.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "lowrankkv/core/scalar.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cpu/simd/kernels.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief dst[i] = src[i] for `count` values of `type`, contiguous.
inline void to_f32(DType type, const void* src, std::int64_t count, float* dst) {
  if (type == DType::f32) {
    if (count > 0) std::memcpy(dst, src, static_cast<std::size_t>(count) * 4);
    return;
  }
  if (count >= simd::kPieceRows) {
    simd::kernels().to_f32[static_cast<std::size_t>(simd::stored_as(type))](
        static_cast<const std::byte*>(src), count, dst);
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint16_t bits = 0;  // a copy: rows of a page may begin at an odd address
    std::memcpy(&bits, static_cast<const std::byte*>(src) + 2 * i, 2);
    dst[i] = type == DType::bf16 ? to_float(BFloat16{bits}) : to_float(Half{bits});
  }
}

/// @brief dst[i] = src[i] rounded to nearest even, finite values saturating, for `count` values,
/// contiguous.
inline void from_f32(DType type, const float* src, std::int64_t count, void* dst) {
  if (type == DType::f32) {
    if (count > 0) std::memcpy(dst, src, static_cast<std::size_t>(count) * 4);
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint16_t bits = type == DType::f16 ? to_half(src[i]).bits : to_bfloat16(src[i]).bits;
    std::memcpy(static_cast<std::byte*>(dst) + 2 * i, &bits, 2);
  }
}

/// @brief Reads one row of a view as f32 [head_dim], for any type and strides.
template <class Tag>
inline void load_row(const RowsView<Tag>& view, std::int64_t token, int head, float* dst) {
  const std::int64_t offset = view.place(token) + head * view.head_stride;
  const std::size_t size = size_of(view.dtype);
  const char* base = static_cast<const char*>(view.data) + offset * static_cast<std::int64_t>(size);
  if (view.element_stride == 1) {
    to_f32(view.dtype, base, view.head_dim, dst);
    return;
  }
  for (int channel = 0; channel < view.head_dim; ++channel) {
    to_f32(view.dtype, base + channel * view.element_stride * static_cast<std::int64_t>(size), 1,
           dst + channel);
  }
}

/// @brief Writes a row [head_dim], rounded to the view's type.
template <class Mutable>
inline void store_row(const TargetRowsView<Mutable>& view, std::int64_t token, int head,
                      const float* row) {
  const std::int64_t offset = view.place(token) + head * view.head_stride;
  from_f32(view.dtype, row, view.head_dim,
           static_cast<char*>(view.data) + offset * static_cast<std::int64_t>(size_of(view.dtype)));
}

/// @brief Raises ShapeError if page tables contain negative page numbers, or sequences shorter than
/// the rows asked for.
inline void check_tables(const char* name, const RowPages& pages, std::int64_t rows) {
  for (std::int64_t row = 0; pages.used() && row < rows; ++row) {
    std::int64_t table = 0;
    const std::int64_t token = pages.token_of(row, table);
    if (token < 0)
      ::lowrankkv::detail::fail<ShapeError>(
          name, ": the last ", pages.rows_each, " tokens of a sequence of ",
          token + pages.rows_each - (pages.first + row) % pages.rows_each, ", by its page table");
    const std::int32_t page = pages.tables.indices[table + token / pages.page_tokens];
    if (page < 0)
      ::lowrankkv::detail::fail<ShapeError>(name, ": token ", token, " is in page ", page,
                                            ", by its page table");
  }
}

/// @brief Raises ValueError if the view holds NaN, Inf or a value beyond `limit`. `scratch` holds
/// one row.
template <class Tag>
inline void check_finite(const char* name, const RowsView<Tag>& view, float limit, float* scratch) {
  for (std::int64_t token = 0; token < view.num_tokens; ++token) {
    for (int head = 0; head < view.num_heads; ++head) {
      load_row(view, token, head, scratch);
      bool good = true;
      for (int channel = 0; channel < view.head_dim; ++channel)
        good = good && std::abs(scratch[channel]) <= limit;
      if (good) continue;
      for (int channel = 0; channel < view.head_dim; ++channel) {
        if (!(std::abs(scratch[channel]) <= limit)) {
          ::lowrankkv::detail::fail<ValueError>(name, ": token ", token, ", head ", head,
                                                ", channel ", channel, " is ", scratch[channel],
                                                ", largest storable value ", limit);
        }
      }
    }
  }
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
