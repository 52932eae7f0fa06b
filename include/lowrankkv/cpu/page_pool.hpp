// SPDX-License-Identifier: Apache-2.0
/// @file cpu/page_pool.hpp  Pages of one size in host memory, shared by the layers of a model. The
/// memory is owned, or lent by the caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "lowrankkv/core/page_allocator.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief A pool of pages. Layers may use it from several threads at a time: each reads and writes
/// pages that it has taken.
class PagePool {
 public:
  /// @brief Owns its memory. The operating system commits each page of it at the first write.
  PagePool(std::size_t page_bytes, std::int64_t num_pages,
           std::shared_ptr<PageSource> source = nullptr)
      : allocator_(checked(page_bytes, num_pages), std::move(source)),
        page_bytes_(page_bytes),
        owned_(new std::byte[page_bytes * static_cast<std::size_t>(num_pages)]),
        memory_(owned_.get()) {}
  /// @brief Uses the caller's memory of page_bytes x num_pages bytes, which must outlive the pool.
  /// If `source` is given, the engine's own block manager hands out the pages.
  PagePool(std::byte* memory, std::size_t page_bytes, std::int64_t num_pages,
           std::shared_ptr<PageSource> source = nullptr)
      : allocator_(checked(page_bytes, num_pages), std::move(source)),
        page_bytes_(page_bytes),
        memory_(memory) {
    if (memory == nullptr && num_pages > 0)
      ::lowrankkv::detail::fail<ShapeError>("page pool: null memory for ", num_pages, " pages");
  }

  std::size_t page_bytes() const { return page_bytes_; }
  /// @brief Bytes of the free pages.
  std::size_t idle_bytes() const {
    return static_cast<std::size_t>(allocator_.num_free()) * page_bytes_;
  }
  PageAllocator& allocator() { return allocator_; }
  const PageAllocator& allocator() const { return allocator_; }
  std::byte* page(std::int32_t number) {
    return memory_ + page_bytes_ * static_cast<std::size_t>(number);
  }
  const std::byte* page(std::int32_t number) const {
    return memory_ + page_bytes_ * static_cast<std::size_t>(number);
  }

 private:
  static std::int64_t checked(std::size_t page_bytes, std::int64_t num_pages) {
    constexpr std::int64_t limit = (std::int64_t{1} << 31) - 1;
    const bool fits = num_pages >= 0 && num_pages <= limit && page_bytes > 0 &&
                      page_bytes <= static_cast<std::size_t>(limit);
    if (!fits)
      ::lowrankkv::detail::fail<CapacityError>("page pool: ", num_pages, " pages of ", page_bytes,
                                               " bytes, each at most ", limit);
    return num_pages;
  }
  PageAllocator allocator_;
  std::size_t page_bytes_;
  std::unique_ptr<std::byte[]> owned_;
  std::byte* memory_;
};

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
