// SPDX-License-Identifier: Apache-2.0
/// @file cuda/runtime/page_pool.cuh  A pool of device pages of one size, which the layers of a
/// model share. The pool or the caller owns the memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "lowrankkv/core/page_allocator.hpp"
#include "lowrankkv/cuda/runtime/device_memory.hpp"
#include "lowrankkv/cuda/runtime/forms.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief A pool of pages. The host keeps the list of free pages. Not thread-safe: layers use it
/// one after the other, and enqueue their work on one stream or on streams that synchronise with
/// each other.
class PagePool {
 public:
  /// @brief A pool that owns its memory. Allocates.
  /// @param page_bytes  a multiple of kPageAlignment
  /// @param source  an engine's own block manager, which hands out the pages; null: none
  /// @throws CapacityError, ShapeError for sizes out of range or not aligned
  PagePool(std::size_t page_bytes, std::int64_t num_pages,
           std::shared_ptr<PageSource> source = nullptr)
      : allocator_(checked(page_bytes, num_pages), std::move(source)),
        page_bytes_(page_bytes),
        owned_(page_bytes * static_cast<std::size_t>(num_pages)),
        memory_(owned_.data()) {}
  /// @brief A pool in the caller's device memory.
  /// @param memory  page_bytes x num_pages bytes, aligned to kPageAlignment; must outlive the pool
  /// @param source  an engine's own block manager, which hands out the pages; null: none
  /// @throws CapacityError, ShapeError for sizes out of range, null or unaligned memory
  PagePool(std::uint8_t* memory, std::size_t page_bytes, std::int64_t num_pages,
           std::shared_ptr<PageSource> source = nullptr)
      : allocator_(checked(page_bytes, num_pages), std::move(source)),
        page_bytes_(page_bytes),
        memory_(memory) {
    if (memory == nullptr && num_pages > 0)
      ::lowrankkv::detail::fail<ShapeError>("page pool: null memory for ", num_pages, " pages");
    const std::size_t offset = reinterpret_cast<std::uintptr_t>(memory) % kPageAlignment;
    if (offset != 0)
      ::lowrankkv::detail::fail<ShapeError>("page pool: memory is ", offset,
                                            " bytes off a multiple of ", kPageAlignment);
  }

  std::size_t page_bytes() const { return page_bytes_; }
  PageAllocator& allocator() { return allocator_; }
  const PageAllocator& allocator() const { return allocator_; }
  std::uint8_t* memory() const { return memory_; }
  /// @brief Temporary device memory of a call, shared by the layers of the pool. Grows if it is too
  /// small, which allocates and synchronises.
  std::uint8_t* scratch(std::size_t bytes) {
    if (scratch_.size() < bytes) {
      scratch_ = {};
      scratch_ = DeviceArray<std::uint8_t>(bytes);
    }
    return scratch_.data();
  }
  std::size_t scratch_bytes() const { return scratch_.bytes(); }
  /// @brief Bytes that no sequence owns: free pages and the scratch memory of calls.
  std::size_t idle_bytes() const {
    return static_cast<std::size_t>(allocator_.num_free()) * page_bytes_ + scratch_bytes();
  }

 private:
  static std::int64_t checked(std::size_t page_bytes, std::int64_t num_pages) {
    constexpr std::int64_t limit = (std::int64_t{1} << 31) - 1;
    const bool fits = num_pages >= 0 && num_pages <= limit && page_bytes > 0 &&
                      page_bytes <= static_cast<std::size_t>(limit);
    if (!fits)
      ::lowrankkv::detail::fail<CapacityError>("page pool: ", num_pages, " pages of ", page_bytes,
                                               " bytes, each at most ", limit);
    if (page_bytes % kPageAlignment != 0)
      ::lowrankkv::detail::fail<ShapeError>("page pool: page_bytes ", page_bytes,
                                            ", a multiple of ", kPageAlignment, " expected");
    return num_pages;
  }
  PageAllocator allocator_;
  std::size_t page_bytes_;
  DeviceArray<std::uint8_t> owned_, scratch_;
  std::uint8_t* memory_;
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
