// SPDX-License-Identifier: Apache-2.0
/// @file core/views.hpp  Views of the caller's tensors: pointers (host memory for Cpu, device
/// memory for Cuda) with named extents, and strides in elements.
///
/// Keys, values, queries and outputs have different view types: swapping two arguments does not
/// compile.
#pragma once

#include <cstdint>
#include <limits>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/row_pages.hpp"
#include "lowrankkv/core/scalar.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Read-only rows [num_tokens, num_heads, head_dim] of f32, f16 or bf16, any strides; in the
/// backend's memory.
template <class Tag>
struct RowsView {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t num_tokens = 0;
  int num_heads = 0;
  int head_dim = 0;
  std::int64_t token_stride = 0;    ///< elements from one token to the next
  std::int64_t head_stride = 0;     ///< elements from one head to the next
  std::int64_t element_stride = 1;  ///< elements from one channel to the next
  RowPages pages;  ///< location of rows in pages, if used (made by core/engine_pages.hpp)

  RowsView() = default;
  /// @brief Dense token-major rows: [num_tokens, num_heads, head_dim].
  RowsView(const float* rows, std::int64_t tokens, int heads, int dim)
      : RowsView(rows, DType::f32, tokens, heads, dim, std::int64_t{heads} * dim, dim) {}
  RowsView(const Half* rows, std::int64_t tokens, int heads, int dim)
      : RowsView(rows, DType::f16, tokens, heads, dim, std::int64_t{heads} * dim, dim) {}
  RowsView(const BFloat16* rows, std::int64_t tokens, int heads, int dim)
      : RowsView(rows, DType::bf16, tokens, heads, dim, std::int64_t{heads} * dim, dim) {}
  /// @brief Any layout; strides in elements, not bytes.
  RowsView(const void* rows, DType type, std::int64_t tokens, int heads, int dim,
           std::int64_t stride_of_token, std::int64_t stride_of_head,
           std::int64_t stride_of_element = 1)
      : data(rows),
        dtype(type),
        num_tokens(tokens),
        num_heads(heads),
        head_dim(dim),
        token_stride(stride_of_token),
        head_stride(stride_of_head),
        element_stride(stride_of_element) {}

  /// @brief The tokens [first, first + count) of this view.
  RowsView tokens(std::int64_t first, std::int64_t count) const {
    RowsView part = *this;
    if (pages.used())
      part.pages.first += first;
    else
      part.data = static_cast<const char*>(data) +
                  first * token_stride * static_cast<std::int64_t>(size_of(dtype));
    part.num_tokens = count;
    return part;
  }
  /// @brief Elements from `data` to a token's rows.
  std::int64_t place(std::int64_t token) const {
    return pages.used() ? pages.place(token, token_stride) : token * token_stride;
  }
};

/// @brief Writable f32 rows [num_tokens, num_heads, head_dim], any strides; in the backend's
/// memory.
template <class Tag>
struct MutableRowsView {
  float* data = nullptr;
  std::int64_t num_tokens = 0;
  int num_heads = 0;
  int head_dim = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

  MutableRowsView() = default;
  MutableRowsView(float* rows, std::int64_t tokens, int heads, int dim)
      : MutableRowsView(rows, tokens, heads, dim, std::int64_t{heads} * dim, dim) {}
  MutableRowsView(float* rows, std::int64_t tokens, int heads, int dim,
                  std::int64_t stride_of_token, std::int64_t stride_of_head)
      : data(rows),
        num_tokens(tokens),
        num_heads(heads),
        head_dim(dim),
        token_stride(stride_of_token),
        head_stride(stride_of_head) {}

  float* row(std::int64_t token, int head) const {
    return data + token * token_stride + head * head_stride;
  }
  MutableRowsView tokens(std::int64_t first, std::int64_t count) const {
    MutableRowsView part = *this;
    part.data = data + first * token_stride;
    part.num_tokens = count;
    return part;
  }
};

/// @brief Writable rows [num_tokens, num_heads, head_dim] of f32, f16 or bf16. Channels are
/// contiguous; other strides are free. In the backend's memory.
template <class Mutable>
struct TargetRowsView {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t num_tokens = 0;
  int num_heads = 0;
  int head_dim = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  RowPages pages;  ///< as in RowsView

  TargetRowsView() = default;
  TargetRowsView(const Mutable& rows)
      : data(rows.data),
        num_tokens(rows.num_tokens),
        num_heads(rows.num_heads),
        head_dim(rows.head_dim),
        token_stride(rows.token_stride),
        head_stride(rows.head_stride) {}
  /// @brief Dense token-major rows.
  TargetRowsView(float* rows, std::int64_t tokens, int heads, int dim)
      : TargetRowsView(rows, DType::f32, tokens, heads, dim, std::int64_t{heads} * dim, dim) {}
  TargetRowsView(Half* rows, std::int64_t tokens, int heads, int dim)
      : TargetRowsView(rows, DType::f16, tokens, heads, dim, std::int64_t{heads} * dim, dim) {}
  TargetRowsView(BFloat16* rows, std::int64_t tokens, int heads, int dim)
      : TargetRowsView(rows, DType::bf16, tokens, heads, dim, std::int64_t{heads} * dim, dim) {}
  /// @brief Any layout; strides in elements, not bytes.
  TargetRowsView(void* rows, DType type, std::int64_t tokens, int heads, int dim,
                 std::int64_t stride_of_token, std::int64_t stride_of_head)
      : data(rows),
        dtype(type),
        num_tokens(tokens),
        num_heads(heads),
        head_dim(dim),
        token_stride(stride_of_token),
        head_stride(stride_of_head) {}
  /// @brief Elements from `data` to a token's rows.
  std::int64_t place(std::int64_t token) const {
    return pages.used() ? pages.place(token, token_stride) : token * token_stride;
  }
};

using KeyView = RowsView<struct KeyTag>;            ///< [num_tokens, num_kv_heads, head_dim]
using ValueView = RowsView<struct ValueTag>;        ///< [num_tokens, num_kv_heads, head_dim]
using QueryView = RowsView<struct QueryTag>;        ///< [num_tokens, num_qo_heads, head_dim]
using OutputView = MutableRowsView<struct OutTag>;  ///< [num_tokens, num_qo_heads, head_dim], f32
/// [num_tokens, num_kv_heads, head_dim], f32
using MutableKeyView = MutableRowsView<struct MutableKeyTag>;
/// [num_tokens, num_kv_heads, head_dim], f32
using MutableValueView = MutableRowsView<struct MutableValueTag>;
using KeyTargetView = TargetRowsView<MutableKeyView>;      ///< [num_tokens, num_kv_heads, head_dim]
using ValueTargetView = TargetRowsView<MutableValueView>;  ///< [num_tokens, num_kv_heads, head_dim]

/// @brief The sequences of a decode step by their slots, read from device memory when the step
/// runs. A captured step then serves whatever sequences the engine has put there: those that come
/// and go, and, at places that are -1, none.
///
/// CompressedKVCache<Cuda>::slot() says which slot a sequence has. No slot but -1 stands twice.
struct SlotView {
  const std::int32_t* data = nullptr;  ///< device memory [count]
  int count = 0;                       ///< at most CacheConfig::max_sequences
};

/// @brief Log-sum-exp of the logits, natural logarithm, [num_tokens, num_qo_heads] f32. Null data:
/// not wanted.
struct LseView {
  float* data = nullptr;
  std::int64_t num_tokens = 0;
  int num_heads = 0;
  std::int64_t token_stride = 0;

  LseView() = default;
  LseView(float* values, std::int64_t tokens, int heads)
      : data(values), num_tokens(tokens), num_heads(heads), token_stride(heads) {}
  float& at(std::int64_t token, int head) const { return data[token * token_stride + head]; }
  LseView tokens(std::int64_t first, std::int64_t count) const {
    LseView part = *this;
    if (data != nullptr) part.data = data + first * token_stride;
    part.num_tokens = count;
    return part;
  }
};

/// @brief Attention scores by position: [num_sequences, num_kv_heads, num_positions] f32, summed
/// over a call's queries and the heads of a group. Null data: not wanted.
struct ScoreView {
  float* data = nullptr;
  std::int64_t num_sequences = 0;
  int num_heads = 0;
  /// At least the tokens of the longest sequence. Entries past a sequence's end are 0.
  std::int64_t num_positions = 0;

  ScoreView() = default;
  ScoreView(float* values, std::int64_t sequences, int heads, std::int64_t positions)
      : data(values), num_sequences(sequences), num_heads(heads), num_positions(positions) {}
  float* row(std::int64_t sequence, int head) const {
    return data + (sequence * num_heads + head) * num_positions;
  }
};

/// @brief Upper bounds on what compression changed in one attention output
/// (diagnostics/certificate.hpp).
struct Certificate {
  float logit = 0.0F;    ///< largest error of a logit, natural-log units
  float softmax = 0.0F;  ///< sum of the absolute errors of the weights, at most 2
  float output = 0.0F;   ///< norm of the output's error, in the unit of the values
};

/// @brief Bounds that always hold. As a limit: no limit.
inline constexpr Certificate kUnboundedCertificate{std::numeric_limits<float>::infinity(), 2.0F,
                                                   std::numeric_limits<float>::infinity()};

/// @brief Certificates of the queries of a call: [num_tokens, num_qo_heads].
struct CertificateView {
  Certificate* data = nullptr;
  std::int64_t num_tokens = 0;
  int num_heads = 0;

  CertificateView() = default;
  CertificateView(Certificate* values, std::int64_t tokens, int heads)
      : data(values), num_tokens(tokens), num_heads(heads) {}
  Certificate& at(std::int64_t token, int head) const { return data[token * num_heads + head]; }
};

/// @brief A row-major f32 matrix that the view does not own; input of updaters and bases.
struct MatrixView {
  const float* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;
  MatrixView() = default;
  MatrixView(const float* values, std::int64_t num_rows, std::int64_t num_cols)
      : MatrixView(values, num_rows, num_cols, num_cols) {}
  MatrixView(const float* values, std::int64_t num_rows, std::int64_t num_cols, std::int64_t stride)
      : data(values), rows(num_rows), cols(num_cols), row_stride(stride) {}
  const float* row(std::int64_t index) const { return data + index * row_stride; }
};

/// @brief A writable row-major f32 matrix that the view does not own.
struct MutableMatrixView {
  float* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;
  MutableMatrixView() = default;
  MutableMatrixView(float* values, std::int64_t num_rows, std::int64_t num_cols)
      : data(values), rows(num_rows), cols(num_cols), row_stride(num_cols) {}
  float* row(std::int64_t index) const { return data + index * row_stride; }
  operator MatrixView() const { return {data, rows, cols, row_stride}; }
};

namespace detail {

/// Checks a view against the cache's shape and `tokens` tokens. `name` is the argument's name in
/// messages.
template <class View>
void check_rows(const char* name, const View& view, std::int64_t tokens, int heads, int head_dim) {
  check_equal("head_dim", "cache", head_dim, name, view.head_dim);
  check_equal("num_heads", "cache", heads, name, view.num_heads);
  check_equal("num_tokens", "expected", tokens, name, view.num_tokens);
  if (tokens < 0) fail<ShapeError>("num_tokens: at least 0, ", name, " ", tokens);
  if (view.data == nullptr && tokens > 0)
    fail<ShapeError>(name, ": null pointer with num_tokens ", tokens);
  if constexpr (requires { view.pages; }) check_pages(name, view.pages, tokens);
}

/// Checks keys and values of m tokens for each of `sequences` sequences.
inline void check_keys_and_values(const KeyView& key, const ValueView& value,
                                  std::int64_t sequences, std::int64_t m, int heads, int head_dim) {
  check_rows("key", key, sequences * m, heads, head_dim);
  check_rows("value", value, sequences * m, heads, head_dim);
  check_rows_each("key", key.pages, sequences, m);
  check_rows_each("value", value.pages, sequences, m);
}

}  // namespace detail
LOWRANKKV_NAMESPACE_END
