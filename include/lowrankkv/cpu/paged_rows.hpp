// SPDX-License-Identifier: Apache-2.0
/// @file cpu/paged_rows.hpp  Rows of one list (full-rank rows, or coefficients) of every (sequence,
/// KV head), in pages.
///
/// Rows are packed without holes. A page holds the keys of its rows, then their values, in the
/// quantizer's layout. A sequence writes only to pages of its own: a page that a fork shares is
/// copied first. Rows change only within an Operation, which can be undone.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "lowrankkv/concepts/quantizer.hpp"
#include "lowrankkv/core/descriptors.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/cpu/page_pool.hpp"
#include "lowrankkv/cpu/page_undo.hpp"
#include "lowrankkv/cpu/simd/stored_tiles.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief How rows of one KV head lie in a page.
template <class Quantizer>
struct RowLayout {
  using Layout = typename Impl<Quantizer, Cpu>::Layout;
  int key_rank = 0;
  int value_rank = 0;
  Layout key, value;
  int rows_per_page = 0;

  int rank(Part part) const { return part == Part::key ? key_rank : value_rank; }
  const Layout& of(Part part) const { return part == Part::key ? key : value; }
  std::int64_t row_bits() const {
    return Impl<Quantizer, Cpu>::row_bits(key) + Impl<Quantizer, Cpu>::row_bits(value);
  }
  /// @brief Bytes that `rows` rows fill, scales included.
  std::size_t bytes(std::int64_t rows) const {
    return static_cast<std::size_t>((rows * row_bits() + 7) / 8);
  }
  /// @brief Byte of a page at which its values begin.
  std::size_t key_block_bytes() const {
    return Impl<Quantizer, Cpu>::block_bytes(key, rows_per_page);
  }
  /// @brief Bytes of a page of `rows` rows.
  std::size_t page_bytes(int rows) const {
    return Impl<Quantizer, Cpu>::block_bytes(key, rows) +
           Impl<Quantizer, Cpu>::block_bytes(value, rows);
  }
};

/// @brief The layout of rows of these ranks under `quantizer`. `key_bits` and `value_bits` are the
/// basis's bits per channel, or empty. @throws CapacityError if a page cannot hold one row
template <class Quantizer>
RowLayout<Quantizer> make_row_layout(const Quantizer& quantizer, int key_rank, int value_rank,
                                     std::span<const std::uint8_t> key_bits,
                                     std::span<const std::uint8_t> value_bits,
                                     std::size_t page_bytes) {
  RowLayout<Quantizer> layout{key_rank, value_rank,
                              layout_of<Cpu>(quantizer, Part::key, key_rank, key_bits),
                              layout_of<Cpu>(quantizer, Part::value, value_rank, value_bits), 0};
  const int together = rows_together<Cpu>(quantizer);
  if (layout.page_bytes(together) > page_bytes) {
    if (together > 1)
      ::lowrankkv::detail::fail<CapacityError>("page_bytes: a group of ", together, " rows needs ",
                                               layout.page_bytes(together), ", a page has ",
                                               page_bytes);
    ::lowrankkv::detail::fail<CapacityError>("page_bytes: a row needs ", layout.page_bytes(1),
                                             ", a page has ", page_bytes);
  }
  int rows = 1, limit = 1 << 20;  // bisect for the most rows that fit; rows may need 0 bytes
  while (rows < limit) {
    const int middle = rows + (limit - rows + 1) / 2;
    if (layout.page_bytes(middle) <= page_bytes) {
      rows = middle;
    } else {
      limit = middle - 1;
    }
  }
  layout.rows_per_page = rows - rows % together;
  return layout;
}

/// @brief The rows of one list of every (slot, KV head) of a layer.
template <class Quantizer>
class PagedRows {
  using Codec = Impl<Quantizer, Cpu>;

 public:
  PagedRows() = default;
  PagedRows(RowList list, std::vector<RowLayout<Quantizer>> layouts, PagePool* pool,
            PageUndo* changes, DescriptorTable* table)
      : list_(list), layouts_(std::move(layouts)), pool_(pool), changes_(changes), table_(table) {
    for (const RowLayout<Quantizer>& rows : layouts_)
      block_bytes_.push_back(
          {rows.key_block_bytes(), Codec::block_bytes(rows.value, rows.rows_per_page)});
  }

  const RowLayout<Quantizer>& layout(int head) const {
    return layouts_[static_cast<std::size_t>(head)];
  }
  std::int32_t size(int slot, int head) const {
    const HeadRows& rows = table_->rows(slot, head);
    return list_ == RowList::full ? rows.num_full : rows.num_compressed;
  }
  std::int32_t num_pages(int slot, int head) const { return pages_for(head, size(slot, head)); }
  std::int32_t pages_for(int head, std::int64_t rows) const {
    const std::int64_t per_page = layout(head).rows_per_page;
    return static_cast<std::int32_t>((rows + per_page - 1) / per_page);
  }

  /// @brief Adds the pages that extend() by `count` rows takes from the pool: new pages, and a copy
  /// of a shared last page.
  void demand_extend(int slot, int head, std::int64_t count, PageDemand& demand) const {
    if (count == 0) return;
    check_room(slot, head, count);
    const std::int32_t rows = size(slot, head);
    demand.add_new(pages_for(head, rows + count) - pages_for(head, rows));
    if (rows % layout(head).rows_per_page != 0)
      demand.add_write(pool_->allocator(), last_page(slot, head));
  }
  /// @brief Adds the pages that extend() by `count` rows takes if, in addition, any existing row
  /// from `first` on may be rewritten.
  void demand_rewrite(int slot, int head, std::int64_t count, PageDemand& demand,
                      std::int32_t first = 0) const {
    check_room(slot, head, count);
    const std::int32_t rows = size(slot, head);
    demand.add_new(pages_for(head, rows + count) - pages_for(head, rows));
    if (!pool_->allocator().shares_any()) return;
    const auto pages = table_->pages(list_, slot, head);
    for (std::int32_t page = first / layout(head).rows_per_page; page < num_pages(slot, head);
         ++page)
      demand.add_write(pool_->allocator(), pages[static_cast<std::size_t>(page)]);
  }

  /// @brief Extends the list by `count` rows, which overwrite() fills. @throws CapacityError if
  /// the page table is too short for them
  void extend(int slot, int head, std::int32_t count) {
    if (count == 0) return;
    check_room(slot, head, count);
    const std::int32_t rows = size(slot, head);
    const std::int32_t have = num_pages(slot, head);
    auto pages = table_->pages(list_, slot, head);
    if (rows % layout(head).rows_per_page != 0) make_writable(slot, head, rows - 1, 1);
    for (std::int32_t page = have; page < pages_for(head, rows + count); ++page) {
      changes_->take_into(pages[static_cast<std::size_t>(page)]);
    }
    set_size(slot, head, rows + count);
  }
  /// @brief Makes the pages of rows [first, first + count) the sequence's own.
  void make_writable(int slot, int head, std::int32_t first, std::int32_t count) {
    auto pages = table_->pages(list_, slot, head);
    for_each_page(head, first, count, [&](std::int32_t page, int, int, std::int32_t) {
      changes_->make_writable(pages[static_cast<std::size_t>(page)]);
    });
  }

  /// @brief Writes rows [first, first + count), which extend() has added or whose pages
  /// make_writable() has prepared. Different heads can be written in parallel.
  void overwrite(int slot, int head, std::int32_t first, std::int32_t count, const float* keys,
                 int key_stride, const float* values, int value_stride) {
    auto pages = table_->pages(list_, slot, head);
    for_each_page(
        head, first, count, [&](std::int32_t page, int row, int length, std::int32_t done) {
          std::byte* block = pool_->page(pages[static_cast<std::size_t>(page)]);
          const RowLayout<Quantizer>& rows = layout(head);
          Codec::encode(rows.key, Part::key, rows.rows_per_page, block, row, length,
                        keys + static_cast<std::ptrdiff_t>(done) * key_stride, key_stride);
          Codec::encode(rows.value, Part::value, rows.rows_per_page, block + rows.key_block_bytes(),
                        row, length, values + static_cast<std::ptrdiff_t>(done) * value_stride,
                        value_stride);
        });
  }

  /// @brief Bytes of a page's block of keys, or of values.
  std::size_t block_bytes(Part part, int head) const {
    return block_bytes_[static_cast<std::size_t>(head)][part == Part::key ? 0 : 1];
  }
  /// @brief The block of keys, or of values, that holds a row.
  const std::byte* block_of(Part part, int slot, int head, std::int32_t row) const {
    const std::int32_t page = row / layout(head).rows_per_page;
    return pool_->page(table_->pages(list_, slot, head)[static_cast<std::size_t>(page)]) +
           (part == Part::key ? 0 : block_bytes(Part::key, head));
  }
  /// @brief Calls function(block, row in the block, rows there, rows done before) for the blocks of
  /// keys, or of values, of rows [first, first + count).
  template <class Function>
  void for_each_block(Part part, int slot, int head, std::int32_t first, std::int32_t count,
                      Function&& function) const {
    for_each_page(head, first, count, [&](std::int32_t, int row, int length, std::int32_t done) {
      function(block_of(part, slot, head, first + done), row, length, done);
    });
  }

  /// @brief Keys of rows [first, first + count), channel-major: tile [key_rank, stride].
  void load_keys(int slot, int head, std::int32_t first, std::int32_t count, float* tile,
                 int stride) const {
    const RowLayout<Quantizer>& rows = layout(head);
    for_each_block(Part::key, slot, head, first, count,
                   [&](const std::byte* block, int row, int length, std::int32_t done) {
                     Codec::decode(rows.key, Part::key, rows.rows_per_page, block, row, length,
                                   tile + done, stride);
                   });
  }
  /// @brief Values of rows [first, first + count), row-major: tile [count, stride].
  void load_values(int slot, int head, std::int32_t first, std::int32_t count, float* tile,
                   int stride) const {
    const RowLayout<Quantizer>& rows = layout(head);
    for_each_block(Part::value, slot, head, first, count,
                   [&](const std::byte* block, int row, int length, std::int32_t done) {
                     Codec::decode(rows.value, Part::value, rows.rows_per_page, block, row, length,
                                   tile + static_cast<std::ptrdiff_t>(done) * stride, stride);
                   });
  }

  /// @brief Lists where the keys of rows [first, first + count) are, for kernels that read them in
  /// place. @return no pieces, if the codec's keys cannot be read in place
  /// @param pieces  room for kBlockRows
  simd::KeyBlock key_block(int slot, int head, std::int32_t first, std::int32_t count,
                           simd::KeyPiece* pieces) const {
    const RowLayout<Quantizer>& rows = layout(head);
    const std::optional<simd::Stored> type = in_place(rows.key);
    if (!type || rows.key_rank == 0) return {};
    const auto size = static_cast<std::ptrdiff_t>(simd::bytes_of(*type));
    const auto pages = table_->pages(list_, slot, head);
    const auto place = [&](std::int32_t row) {
      return pool_->page(pages[static_cast<std::size_t>(row / rows.rows_per_page)]) +
             row % rows.rows_per_page * size;
    };
    const std::int32_t ahead = simd::rows_ahead(size * rows.key_rank);
    const std::int32_t end = this->size(slot, head);
    simd::KeyBlock block{*type, rows.key_rank, size * rows.rows_per_page, pieces, 0};
    for (std::int32_t row = first; row < first + count; ++block.num_pieces) {
      const std::int32_t in_page = row % rows.rows_per_page;
      simd::KeyPiece& piece = pieces[block.num_pieces];
      piece.first = place(row);
      piece.next = row + ahead < end ? place(row + ahead) : piece.first;
      piece.count =
          (std::min)({simd::kPieceRows, rows.rows_per_page - in_page, first + count - row});
      piece.column = row - first;
      // A channel has rows_per_page numbers of the block.
      const int beyond = in_page + simd::kPieceRows - rows.rows_per_page;
      piece.whole_channels =
          beyond <= 0 ? block.channels
                      : block.channels - (beyond + rows.rows_per_page - 1) / rows.rows_per_page;
      row += piece.count;
    }
    return block;
  }
  /// @brief Lists where the values of rows [first, first + count) are, for kernels that read
  /// `width` numbers of each in place. Rows that end less than `width` numbers before the end of
  /// their block are copied; where there is no room for more copies the list ends. @return no rows,
  /// if the codec's values cannot be read in place
  /// @param runs    room for kBlockRows
  /// @param copies  [room, width] f32
  simd::ValueBlock value_block(int slot, int head, std::int32_t first, std::int32_t count,
                               int width, simd::ValueRun* runs, float* copies, int room) const {
    const RowLayout<Quantizer>& rows = layout(head);
    const std::optional<simd::Stored> type = in_place(rows.value);
    if (!type || rows.value_rank == 0) return {};
    const std::ptrdiff_t row_bytes =
        static_cast<std::ptrdiff_t>(simd::bytes_of(*type)) * rows.value_rank;
    const auto pages = table_->pages(list_, slot, head);
    const auto place = [&](std::int32_t row) {
      return pool_->page(pages[static_cast<std::size_t>(row / rows.rows_per_page)]) +
             rows.key_block_bytes() + row % rows.rows_per_page * row_bytes;
    };
    const std::int32_t ahead = simd::rows_ahead(row_bytes), end = size(slot, head);
    // Rows of a page from here on have less than `width` numbers before the end of the block.
    const std::int32_t short_from = rows.rows_per_page - (width - 1) / rows.value_rank;
    simd::ValueBlock block{*type, width, row_bytes, runs, 0, 0};
    for (int copied = 0; block.count < count; ++block.num_runs) {
      const std::int32_t row = first + block.count;
      const std::int32_t in_page = row % rows.rows_per_page;
      simd::ValueRun& run = runs[block.num_runs];
      run.first = place(row);
      run.next = row + ahead < end ? place(row + ahead) : run.first;
      run.count = (std::min)(short_from - in_page, count - block.count);
      if (in_page >= short_from) {
        if (copied == room) break;
        float* copy = copies + static_cast<std::ptrdiff_t>(copied++) * width;
        std::memset(copy, 0, 4 * static_cast<std::size_t>(width));
        std::memcpy(copy, run.first, static_cast<std::size_t>(row_bytes));
        run.first = reinterpret_cast<const std::byte*>(copy);
        run.count = 1;
      }
      block.count += run.count;
    }
    return block;
  }

  /// @brief Stable compaction: keeps the rows whose `keep` is true, and copies their codes as they
  /// are. The caller has checked demand_rewrite().
  void retain(int slot, int head, const std::vector<bool>& keep) {
    auto pages = table_->pages(list_, slot, head);
    const RowLayout<Quantizer>& rows = layout(head);
    std::int32_t kept = 0;
    for (std::int32_t row = 0; row < size(slot, head); ++row) {
      if (!keep[static_cast<std::size_t>(row)]) continue;
      if (kept != row) {
        std::int32_t& number = pages[static_cast<std::size_t>(kept / rows.rows_per_page)];
        changes_->make_writable(number);
        const std::byte* from =
            pool_->page(pages[static_cast<std::size_t>(row / rows.rows_per_page)]);
        std::byte* to = pool_->page(number);
        transfer(rows, from, from + rows.key_block_bytes(), rows.rows_per_page,
                 row % rows.rows_per_page, to, to + rows.key_block_bytes(), rows.rows_per_page,
                 kept % rows.rows_per_page);
      }
      ++kept;
    }
    for (std::int32_t page = pages_for(head, kept); page < num_pages(slot, head); ++page)
      changes_->release(pages[static_cast<std::size_t>(page)]);
    set_size(slot, head, kept);
  }

  /// @brief Copies all rows of a list, as codes, to one block of exactly that many rows.
  void copy_out(int slot, int head, std::byte* block) const {
    const RowLayout<Quantizer>& rows = layout(head);
    const std::int32_t count = size(slot, head);
    const auto pages = table_->pages(list_, slot, head);
    std::byte* values = block + Codec::block_bytes(rows.key, count);
    for (std::int32_t row = 0; row < count; ++row) {
      const std::byte* page =
          pool_->page(pages[static_cast<std::size_t>(row / rows.rows_per_page)]);
      transfer(rows, page, page + rows.key_block_bytes(), rows.rows_per_page,
               row % rows.rows_per_page, block, values, count, row);
    }
  }
  /// @brief Fills all rows of a list, which extend() has added, from such a block.
  void copy_in(int slot, int head, const std::byte* block) {
    const RowLayout<Quantizer>& rows = layout(head);
    const std::int32_t count = size(slot, head);
    const auto pages = table_->pages(list_, slot, head);
    const std::byte* values = block + Codec::block_bytes(rows.key, count);
    for (std::int32_t row = 0; row < count; ++row) {
      std::byte* page = pool_->page(pages[static_cast<std::size_t>(row / rows.rows_per_page)]);
      transfer(rows, block, values, count, row, page, page + rows.key_block_bytes(),
               rows.rows_per_page, row % rows.rows_per_page);
    }
  }

  /// @brief Drops the rows from row number `rows` on, and frees their pages. Cannot be undone.
  void truncate(int slot, int head, std::int32_t rows) noexcept {
    auto pages = table_->pages(list_, slot, head);
    for (std::int32_t page = pages_for(head, rows); page < num_pages(slot, head); ++page) {
      pool_->allocator().release(pages[static_cast<std::size_t>(page)]);
    }
    set_size(slot, head, rows);
  }
  /// @brief Shares all rows of `source` with `target`, which must be empty.
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
  static std::optional<simd::Stored> in_place([[maybe_unused]] const typename Codec::Layout& of) {
    if constexpr (requires { Codec::in_place(of); })
      return Codec::in_place(of);
    else
      return std::nullopt;
  }
  /// Copies one row between blocks of keys and values that may hold different numbers of rows.
  static void transfer(const RowLayout<Quantizer>& rows, const std::byte* from_keys,
                       const std::byte* from_values, int from_rows, int from, std::byte* to_keys,
                       std::byte* to_values, int to_rows, int to) {
    Codec::copy_row(rows.key, Part::key, from_keys, from_rows, from, to_keys, to_rows, to);
    Codec::copy_row(rows.value, Part::value, from_values, from_rows, from, to_values, to_rows, to);
  }
  /// Raises CapacityError if the page table is too short. It is sized for max_tokens and the token
  /// policy's bounds; a list that is truncated and filled again can exceed these.
  void check_room(int slot, int head, std::int64_t count) const {
    const std::int32_t pages = pages_for(head, size(slot, head) + count);
    if (pages > table_->max_pages(list_))
      ::lowrankkv::detail::fail<CapacityError>("page table: room for ", table_->max_pages(list_),
                                               " pages, rows of KV head ", head, " may need ",
                                               pages);
  }
  void set_size(int slot, int head, std::int32_t rows) {
    HeadRows& counts = table_->rows(slot, head);
    (list_ == RowList::full ? counts.num_full : counts.num_compressed) = rows;
  }
  std::int32_t last_page(int slot, int head) const {
    return table_->pages(list_, slot, head)[static_cast<std::size_t>(num_pages(slot, head) - 1)];
  }
  /// Calls function(page index, row in the page, rows there, rows done before) for the pages of
  /// rows [first, first + count).
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

  RowList list_ = RowList::full;
  std::vector<RowLayout<Quantizer>> layouts_;
  std::vector<std::array<std::size_t, 2>> block_bytes_;  // of keys, of values
  PagePool* pool_ = nullptr;
  PageUndo* changes_ = nullptr;
  DescriptorTable* table_ = nullptr;
};

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
