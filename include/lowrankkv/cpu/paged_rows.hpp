// SPDX-License-Identifier: Apache-2.0
/// @file cpu/paged_rows.hpp  One list of rows per (sequence, KV head) in pages: full-rank rows, or coefficients.
///
/// Rows are packed without holes; a page holds the keys of its rows, then their values, in the quantizer's layout.
/// Every write goes to a page of the sequence's own: a page that a fork shares is copied first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/concepts/quantizer.hpp"
#include "lowrankkv/core/descriptors.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/cpu/page_pool.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief How rows of one KV head lie in a page.
struct RowLayout {
  int key_rank = 0;
  int value_rank = 0;
  std::size_t key_row_bytes = 0;
  std::size_t value_row_bytes = 0;
  int rows_per_page = 0;

  std::size_t row_bytes() const { return key_row_bytes + value_row_bytes; }
};

/// @brief The layout of rows of these ranks under `quantizer`; raises CapacityError if a page holds none.
template <class Quantizer>
RowLayout make_row_layout(const Quantizer& quantizer, int key_rank, int value_rank, std::size_t page_bytes) {
  RowLayout layout;
  layout.key_rank = key_rank;
  layout.value_rank = value_rank;
  layout.key_row_bytes = Impl<Quantizer, Cpu>::row_bytes(quantizer, key_rank);
  layout.value_row_bytes = Impl<Quantizer, Cpu>::row_bytes(quantizer, value_rank);
  layout.rows_per_page = static_cast<int>(page_bytes / layout.row_bytes());
  if (layout.rows_per_page < 1) {
    ::lowrankkv::detail::fail<CapacityError>("page_bytes: a row needs ", layout.row_bytes(), ", a page has ", page_bytes);
  }
  return layout;
}

/// @brief The rows of one list of every (slot, KV head) of a layer.
template <class Quantizer>
class PagedRows {
  using Codec = Impl<Quantizer, Cpu>;

 public:
  PagedRows() = default;
  PagedRows(const Quantizer& quantizer, RowList list, std::vector<RowLayout> layouts, PagePool* pool, DescriptorTable* table)
      : quantizer_(quantizer), list_(list), layouts_(std::move(layouts)), pool_(pool), table_(table) {}

  const RowLayout& layout(int head) const { return layouts_[static_cast<std::size_t>(head)]; }
  std::int32_t size(int slot, int head) const {
    const HeadRows& rows = table_->rows(slot, head);
    return list_ == RowList::full ? rows.num_full : rows.num_compressed;
  }
  std::int32_t num_pages(int slot, int head) const { return pages_for(head, size(slot, head)); }
  std::int32_t pages_for(int head, std::int64_t rows) const {
    const std::int64_t per_page = layout(head).rows_per_page;
    return static_cast<std::int32_t>((rows + per_page - 1) / per_page);
  }

  /// @brief Adds what extend() by `count` rows takes from the pool: new pages, and a copy of a shared last page.
  void demand_extend(int slot, int head, std::int64_t count, PageDemand& demand) const {
    if (count == 0) return;
    const std::int32_t rows = size(slot, head);
    demand.add_new(pages_for(head, rows + count) - pages_for(head, rows));
    if (rows % layout(head).rows_per_page != 0) demand.add_write(pool_->allocator(), last_page(slot, head));
  }
  /// @brief Adds what extend() by `count` rows takes if any of the rows already there may be rewritten too.
  void demand_rewrite(int slot, int head, std::int64_t count, PageDemand& demand) const {
    const std::int32_t rows = size(slot, head);
    demand.add_new(pages_for(head, rows + count) - pages_for(head, rows));
    const auto pages = table_->pages(list_, slot, head);
    for (std::int32_t page = 0; page < num_pages(slot, head); ++page) demand.add_write(pool_->allocator(), pages[static_cast<std::size_t>(page)]);
  }

  /// @brief Makes room for `count` more rows and lists them; overwrite() fills them. The only write that takes pages
  /// besides overwrite() of shared rows, so that heads can be filled in parallel afterwards.
  void extend(int slot, int head, std::int32_t count) {
    if (count == 0) return;
    const std::int32_t rows = size(slot, head);
    const std::int32_t have = num_pages(slot, head);
    auto pages = table_->pages(list_, slot, head);
    if (rows % layout(head).rows_per_page != 0) {
      std::int32_t& last = pages[static_cast<std::size_t>(have - 1)];
      last = pool_->exclusive(last);
    }
    for (std::int32_t page = have; page < pages_for(head, rows + count); ++page) {
      pages[static_cast<std::size_t>(page)] = pool_->allocator().take();
    }
    set_size(slot, head, rows + count);
  }

  /// @brief Writes rows [first, first + count) anew; bytes per row do not change.
  void overwrite(int slot, int head, std::int32_t first, std::int32_t count, const float* keys, int key_stride,
                 const float* values, int value_stride) {
    auto pages = table_->pages(list_, slot, head);
    for_each_page(head, first, count, [&](std::int32_t page, int row, int length, std::int32_t done) {
      std::int32_t& number = pages[static_cast<std::size_t>(page)];
      number = pool_->exclusive(number);
      std::byte* block = pool_->page(number);
      Codec::encode(quantizer_, Part::key, shape(head, Part::key), block, row, length,
                    keys + static_cast<std::ptrdiff_t>(done) * key_stride, key_stride);
      Codec::encode(quantizer_, Part::value, shape(head, Part::value), block + key_block_bytes(head), row, length,
                    values + static_cast<std::ptrdiff_t>(done) * value_stride, value_stride);
    });
  }

  /// @brief Keys of rows [first, first + count), channel-major: tile [key_rank, stride].
  void load_keys(int slot, int head, std::int32_t first, std::int32_t count, float* tile, int stride) const {
    auto pages = table_->pages(list_, slot, head);
    for_each_page(head, first, count, [&](std::int32_t page, int row, int length, std::int32_t done) {
      Codec::decode(quantizer_, Part::key, shape(head, Part::key), pool_->page(pages[static_cast<std::size_t>(page)]), row,
                    length, tile + done, stride);
    });
  }
  /// @brief Values of rows [first, first + count), row-major: tile [count, stride].
  void load_values(int slot, int head, std::int32_t first, std::int32_t count, float* tile, int stride) const {
    auto pages = table_->pages(list_, slot, head);
    for_each_page(head, first, count, [&](std::int32_t page, int row, int length, std::int32_t done) {
      Codec::decode(quantizer_, Part::value, shape(head, Part::value),
                    pool_->page(pages[static_cast<std::size_t>(page)]) + key_block_bytes(head), row, length,
                    tile + static_cast<std::ptrdiff_t>(done) * stride, stride);
    });
  }

  /// @brief Drops the rows from `rows` on and frees their pages.
  void truncate(int slot, int head, std::int32_t rows) {
    auto pages = table_->pages(list_, slot, head);
    for (std::int32_t page = pages_for(head, rows); page < num_pages(slot, head); ++page) {
      pool_->allocator().release(pages[static_cast<std::size_t>(page)]);
    }
    set_size(slot, head, rows);
  }
  /// @brief Lets `target` read all rows of `source`; target must be empty.
  void share(int source, int target, int head) {
    auto from = table_->pages(list_, source, head);
    auto to = table_->pages(list_, target, head);
    for (std::int32_t page = 0; page < num_pages(source, head); ++page) {
      to[static_cast<std::size_t>(page)] = from[static_cast<std::size_t>(page)];
      pool_->allocator().share(from[static_cast<std::size_t>(page)]);
    }
    set_size(target, head, size(source, head));
  }

 private:
  void set_size(int slot, int head, std::int32_t rows) {
    HeadRows& counts = table_->rows(slot, head);
    (list_ == RowList::full ? counts.num_full : counts.num_compressed) = rows;
  }
  BlockShape shape(int head, Part part) const {
    const RowLayout& rows = layout(head);
    return {rows.rows_per_page, part == Part::key ? rows.key_rank : rows.value_rank};
  }
  std::size_t key_block_bytes(int head) const {
    return layout(head).key_row_bytes * static_cast<std::size_t>(layout(head).rows_per_page);
  }
  std::int32_t last_page(int slot, int head) const {
    return table_->pages(list_, slot, head)[static_cast<std::size_t>(num_pages(slot, head) - 1)];
  }
  /// Calls f(page index, row in the page, rows there, rows done before) for the pages under [first, first + count).
  template <class Function>
  void for_each_page(int head, std::int32_t first, std::int32_t count, Function&& function) const {
    const int per_page = layout(head).rows_per_page;
    for (std::int32_t done = 0; done < count;) {
      const int row = (first + done) % per_page;
      const int length = (std::min)(per_page - row, count - done);
      function((first + done) / per_page, row, length, done);
      done += length;
    }
  }

  Quantizer quantizer_{};
  RowList list_ = RowList::full;
  std::vector<RowLayout> layouts_;
  PagePool* pool_ = nullptr;
  DescriptorTable* table_ = nullptr;
};

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
