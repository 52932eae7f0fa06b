// SPDX-License-Identifier: Apache-2.0
/// @file core/row_pages.hpp  Rows in an engine's own pages, located by FlashInfer's CSR tables or
/// vLLM's block tables.
#pragma once

#include <cstdint>

#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief The page tables of a batch of sequences, in the backend's memory. On the device, kernels
/// read them when they run: a replayed graph sees their current contents.
struct PageTables {
  const std::int32_t* indices = nullptr;  ///< page numbers
  /// [sequences + 1]: the pages of sequence i are indices[indptr[i]] to indices[indptr[i + 1] - 1].
  /// Null: they begin at indices[i * table_stride].
  const std::int32_t* indptr = nullptr;
  /// [sequences]: tokens in the last page of each sequence. Not read if `lengths` is given.
  const std::int32_t* last_page_len = nullptr;
  const std::int32_t* lengths = nullptr;  ///< [sequences]: tokens of each sequence
  std::int64_t table_stride = 0;          ///< entries from one sequence's table to the next

  /// @brief FlashInfer's form: compressed sparse rows, and the tokens in each last page.
  static PageTables csr(const std::int32_t* indices, const std::int32_t* indptr,
                        const std::int32_t* last_page_len) {
    return {indices, indptr, last_page_len, nullptr, 0};
  }
  /// @brief vLLM's form: block_table [sequences, table_stride], and the lengths in tokens.
  static PageTables dense(const std::int32_t* block_table, std::int64_t table_stride,
                          const std::int32_t* lengths) {
    return {block_table, nullptr, nullptr, lengths, table_stride};
  }
};

/// @brief Where the rows of a view are, if they are in pages.
struct RowPages {
  PageTables tables;
  std::int64_t page_stride = 0;  ///< elements from one page to the next
  std::int64_t first = 0;        ///< number of the view's row 0
  std::int32_t page_tokens = 0;  ///< tokens of a page; 0: rows are not in pages
  /// 0: row r is token first + r of the first sequence. Otherwise rows are the last rows_each
  /// tokens of each sequence, one sequence after the other.
  std::int32_t rows_each = 0;

  LOWRANKKV_HOST_DEVICE bool used() const { return page_tokens != 0; }
  /// @brief Returns the token of a row within its sequence; `table` receives the entry in
  /// tables.indices at which the sequence's pages begin. The token is negative if the sequence has
  /// fewer than rows_each tokens.
  LOWRANKKV_HOST_DEVICE std::int64_t token_of(std::int64_t row, std::int64_t& table) const {
    std::int64_t token = first + row;
    table = 0;
    if (rows_each == 0) return token;
    const std::int64_t sequence = token / rows_each;
    table = tables.indptr != nullptr ? tables.indptr[sequence] : sequence * tables.table_stride;
    const std::int64_t length =
        tables.lengths != nullptr
            ? tables.lengths[sequence]
            : std::int64_t{tables.indptr[sequence + 1] - tables.indptr[sequence] - 1} *
                      page_tokens +
                  tables.last_page_len[sequence];
    return length - rows_each + token % rows_each;
  }
  /// @brief Elements from the start of page 0 to a row.
  LOWRANKKV_HOST_DEVICE std::int64_t place(std::int64_t row, std::int64_t token_stride) const {
    std::int64_t table = 0;
    // 32-bit unsigned: kernels run this division.
    const auto token = static_cast<std::uint32_t>(token_of(row, table)),
               tokens = static_cast<std::uint32_t>(page_tokens), page = token / tokens;
    return tables.indices[table + page] * page_stride +
           static_cast<std::int64_t>(token - page * tokens) * token_stride;
  }
};

namespace detail {

/// Raises ShapeError for faults that show without reading the tables.
inline void check_pages(const char* name, const RowPages& pages, std::int64_t rows) {
  if (!pages.used()) return;
  if (pages.page_tokens < 0)
    fail<ShapeError>(name, ": pages of ", pages.page_tokens, " tokens, at least 1 expected");
  if (pages.first < 0 || pages.rows_each < 0)
    fail<ShapeError>(name, ": pages from token ", pages.first, " on, ", pages.rows_each,
                     " a sequence; at least 0 expected");
  if (rows == 0) return;
  const PageTables& tables = pages.tables;
  if (tables.indices == nullptr) fail<ShapeError>(name, ": null page table with num_tokens ", rows);
  if (pages.rows_each == 0) return;
  if (tables.lengths == nullptr && (tables.indptr == nullptr || tables.last_page_len == nullptr))
    fail<ShapeError>(
        name, ": page tables of a batch without lengths, and without indptr and last_page_len");
}
/// Raises ShapeError unless, in the page tables, the m rows of each of `sequences` sequences belong
/// to a single sequence.
inline void check_rows_each(const char* name, const RowPages& pages, std::int64_t sequences,
                            std::int64_t m) {
  const bool apart = pages.rows_each == 0 ? sequences == 1
                     : sequences == 1     ? pages.first % pages.rows_each + m <= pages.rows_each
                                      : pages.first % pages.rows_each == 0 && m == pages.rows_each;
  if (pages.used() && !apart)
    fail<ShapeError>(name, ": ", m, " tokens for each of ", sequences, " sequences, pages say ",
                     pages.rows_each);
}

}  // namespace detail
LOWRANKKV_NAMESPACE_END
