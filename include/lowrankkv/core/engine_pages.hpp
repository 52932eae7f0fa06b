// SPDX-License-Identifier: Apache-2.0
/// @file core/engine_pages.hpp  Views of an engine's paged K and V, which append(), ingest() and
/// reconstruct() access in place, without copies.
#pragma once

#include <cstdint>

#include "lowrankkv/core/views.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Keys and values of one layer in an engine's pages, in the backend's memory. K and V are
/// two arrays, or one.
///
///     EnginePages pages = EnginePages::nhd(k, v, DType::f16, 16, num_kv_heads, head_dim);
///     // Tokens [0, n) of the sequence whose page table is `table`:
///     cache.ingest(seq, pages.keys(table, 0, n), pages.values(table, 0, n));
///     // The last token of each sequence:
///     const std::int64_t count = seqs.size();
///     cache.append(seqs, pages.last_keys(tables, count, 1), pages.last_values(tables, count, 1));
///     cache.reconstruct(seq, 0, pages.key_target(table, 0, n), pages.value_target(table, 0, n));
struct EnginePages {
  void* key_data = nullptr;      ///< first row of page 0; written only through targets
  void* value_data = nullptr;    ///< first row of page 0; written only through targets
  DType dtype = DType::f16;      ///< of both
  std::int32_t page_tokens = 0;  ///< tokens of a page
  int num_heads = 0, head_dim = 0;
  std::int64_t page_stride = 0, token_stride = 0, head_stride = 0;  ///< in elements

  /// @brief Pages [page_tokens, num_heads, head_dim].
  /// @param page_stride  elements from one page to the next; 0: pages are dense. For K and V in one
  /// array [pages, 2, ...]: values = keys + the elements of one page, page_stride = twice that
  static EnginePages nhd(void* keys, void* values, DType dtype, int page_tokens, int num_heads,
                         int head_dim, std::int64_t page_stride = 0) {
    const std::int64_t row = std::int64_t{num_heads} * head_dim;
    return {keys,
            values,
            dtype,
            page_tokens,
            num_heads,
            head_dim,
            page_stride != 0 ? page_stride : page_tokens * row,
            row,
            head_dim};
  }
  /// @brief Pages [num_heads, page_tokens, head_dim]. @param page_stride  as in nhd()
  static EnginePages hnd(void* keys, void* values, DType dtype, int page_tokens, int num_heads,
                         int head_dim, std::int64_t page_stride = 0) {
    const std::int64_t head = std::int64_t{page_tokens} * head_dim;
    return {keys,
            values,
            dtype,
            page_tokens,
            num_heads,
            head_dim,
            page_stride != 0 ? page_stride : num_heads * head,
            head_dim,
            head};
  }

  /// @brief Tokens [first, first + count) of the sequence whose page table is `table`.
  KeyView keys(const std::int32_t* table, std::int64_t first, std::int64_t count) const {
    return rows<KeyView>(key_data, count, {table}, first, 0);
  }
  ValueView values(const std::int32_t* table, std::int64_t first, std::int64_t count) const {
    return rows<ValueView>(value_data, count, {table}, first, 0);
  }
  /// @brief The last `m` tokens of each of `sequences` sequences, for append() after the engine has
  /// written them. The tables already count these tokens.
  KeyView last_keys(const PageTables& tables, std::int64_t sequences, int m) const {
    return rows<KeyView>(key_data, sequences * m, tables, 0, m);
  }
  ValueView last_values(const PageTables& tables, std::int64_t sequences, int m) const {
    return rows<ValueView>(value_data, sequences * m, tables, 0, m);
  }
  /// @brief Tokens [first, first + count) as a target to write to. Values are rounded to dtype.
  KeyTargetView key_target(const std::int32_t* table, std::int64_t first,
                           std::int64_t count) const {
    return rows<KeyTargetView>(key_data, count, {table}, first, 0);
  }
  ValueTargetView value_target(const std::int32_t* table, std::int64_t first,
                               std::int64_t count) const {
    return rows<ValueTargetView>(value_data, count, {table}, first, 0);
  }

 private:
  template <class View>
  View rows(void* data, std::int64_t count, const PageTables& tables, std::int64_t first,
            int rows_each) const {
    View view(data, dtype, count, num_heads, head_dim, token_stride, head_stride);
    // page_tokens = 0 would mean "not in pages". -1 is refused with the argument's name.
    view.pages = {tables, page_stride, first, page_tokens != 0 ? page_tokens : -1, rows_each};
    return view;
  }
};

LOWRANKKV_NAMESPACE_END
