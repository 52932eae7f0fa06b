// SPDX-License-Identifier: Apache-2.0
/// @file core/engine_pages.hpp  An engine's paged K and V as views: what append(), ingest() and
/// reconstruct() take where they are, without copies.
#pragma once

#include <cstdint>

#include "lowrankkv/core/views.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Keys and values of one layer in an engine's pages, apart from each other or in one array,
/// in the backend's memory.
///
///     EnginePages pages = EnginePages::nhd(k, v, DType::f16, 16, num_kv_heads, head_dim);
///     cache.ingest(seq, pages.keys(table, 0, n), pages.values(table, 0, n)); // tokens that one
///     sequence's table says cache.append(seqs, pages.last_keys(tables, seqs.size(), 1),
///     pages.last_values(tables, seqs.size(), 1));  // the last token of every sequence
///     cache.reconstruct(seq, 0, pages.key_target(table, 0, n), pages.value_target(table, 0, n));
struct EnginePages {
  void* key_data = nullptr;      ///< written only through targets
  void* value_data = nullptr;    ///< both point at the first row of page 0
  DType dtype = DType::f16;      ///< of both
  std::int32_t page_tokens = 0;  ///< tokens of a page
  int num_heads = 0, head_dim = 0;
  std::int64_t page_stride = 0, token_stride = 0, head_stride = 0;  ///< in elements

  /// @brief Pages [page_tokens, num_heads, head_dim]. @param page_stride  elements from a page to
  /// the next; 0: they are dense. K and V in one array [pages, 2, ...]: values = keys + a page's
  /// elements, page_stride twice those
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
  /// @brief Pages [num_heads, page_tokens, head_dim]. @param page_stride  as nhd()
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

  /// @brief Tokens [first, first + count) of the sequence whose pages `table` lists.
  KeyView keys(const std::int32_t* table, std::int64_t first, std::int64_t count) const {
    return rows<KeyView>(key_data, count, {table}, first, 0);
  }
  ValueView values(const std::int32_t* table, std::int64_t first, std::int64_t count) const {
    return rows<ValueView>(value_data, count, {table}, first, 0);
  }
  /// @brief The last `m` tokens of each of `sequences` sequences: what append() takes once an
  /// engine has written them. The tables count them already.
  KeyView last_keys(const PageTables& tables, std::int64_t sequences, int m) const {
    return rows<KeyView>(key_data, sequences * m, tables, 0, m);
  }
  ValueView last_values(const PageTables& tables, std::int64_t sequences, int m) const {
    return rows<ValueView>(value_data, sequences * m, tables, 0, m);
  }
  /// @brief The same tokens to write to: numbers are rounded to dtype.
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
    view.pages = {tables, page_stride, first, page_tokens != 0 ? page_tokens : -1,
                  rows_each};  // refused with its name, where 0 would mean that there are none
    return view;
  }
};

LOWRANKKV_NAMESPACE_END
