// SPDX-License-Identifier: Apache-2.0
/// @file core/row_pages.hpp  Rows in an engine's own pages: which page a token is in, as
/// FlashInfer's CSR tables or vLLM's block tables say.
#pragma once

#include <cstdint>

#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief The page tables of a batch of sequences; in the backend's memory, on the device read when
/// a kernel runs, so that a replayed graph sees what they say then.
struct PageTables {
  const std::int32_t* indices = nullptr;  ///< numbers of pages
  const std::int32_t* indptr =
      nullptr;  ///< [sequences + 1]: the pages of sequence i are indices[indptr[i]] to
                ///< indices[indptr[i + 1] - 1]; null: they begin at i table_stride
  const std::int32_t* last_page_len =
      nullptr;  ///< [sequences]: tokens in the last of them; unless there are lengths
  const std::int32_t* lengths = nullptr;  ///< [sequences]: tokens
  std::int64_t table_stride = 0;          ///< entries from a sequence's table to the next

  /// @brief FlashInfer's: compressed sparse rows, and what the last page of each holds.
  static PageTables csr(const std::int32_t* indices, const std::int32_t* indptr,
                        const std::int32_t* last_page_len) {
    return {indices, indptr, last_page_len, nullptr, 0};
  }
  /// @brief vLLM's: block_table [sequences, table_stride] and the sequences' lengths in tokens.
  static PageTables dense(const std::int32_t* block_table, std::int64_t table_stride,
                          const std::int32_t* lengths) {
    return {block_table, nullptr, nullptr, lengths, table_stride};
  }
};

/// @brief Where the rows of a view are, if they are in pages.
struct RowPages {
  PageTables tables;
  std::int64_t page_stride = 0;  ///< elements from a page to the next
  std::int64_t first = 0;        ///< what row 0 of the view is
  std::int32_t page_tokens = 0;  ///< tokens of a page; 0: rows are not in pages
  std::int32_t rows_each = 0;  ///< 0: row r is token first + r of the first sequence; else rows are
                               ///< the last rows_each tokens of every sequence, one after the other

  LOWRANKKV_HOST_DEVICE bool used() const { return page_tokens != 0; }
  /// @brief Entry in tables.indices of a row's page, and its place there. Negative if its sequence
  /// has fewer tokens than rows_each.
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
  /// @brief Elements from the first page's begin to a row.
  LOWRANKKV_HOST_DEVICE std::int64_t place(std::int64_t row, std::int64_t token_stride) const {
    std::int64_t table = 0;
    const auto token = static_cast<std::uint32_t>(token_of(row, table)),
               tokens = static_cast<std::uint32_t>(page_tokens),
               page = token / tokens;  // 32 bits: kernels divide
    return tables.indices[table + page] * page_stride +
           static_cast<std::int64_t>(token - page * tokens) * token_stride;
  }
};

namespace detail {

/// Raises what can be told without reading tables.
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
/// Raises unless the m rows of each of `sequences` sequences are those of one sequence in the page
/// tables.
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
