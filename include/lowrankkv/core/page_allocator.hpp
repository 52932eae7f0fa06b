// SPDX-License-Identifier: Apache-2.0
/// @file core/page_allocator.hpp  Free pages of a pool, and the number of sequences that share each
/// page in use.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Size of a page pool.
struct PoolSize {
  std::size_t page_bytes = 0;
  std::int64_t num_pages = 0;
};

/// @brief An engine's own block manager, which tracks and hands out the free pages of a pool.
/// Called on the host, never while a step runs, and by one thread at a time. It must not call the
/// pool.
class PageSource {
 public:
  virtual ~PageSource() = default;
  /// @brief Lower bound of the pages that take() can hand out now.
  virtual std::int64_t num_free() const = 0;
  /// @brief Hands out a page in [0, num_pages) of the pool that is not in use. Called only while
  /// num_free() is at least 1.
  virtual std::int32_t take() = 0;
  /// @brief Returns a page. The library enqueues no more reads of it, but reads enqueued earlier
  /// may still be in flight.
  virtual void release(std::int32_t page) noexcept = 0;
};

/// @brief Bookkeeping of a page pool. Knows page numbers but not their memory, so every backend can
/// use it.
///
/// Several threads may call it at a time: a page number is handed to one of them. What is said of a
/// page in use (references, shared) holds as long as only one thread shares and releases that page,
/// as the layer that owns it does. HeldPages, whose promise is about all callers, is for one thread
/// while no other calls.
class PageAllocator {
 public:
  /// @param num_pages  pages in the pool, numbered from 0
  /// @param source     hands out the pages; null: the allocator does, lowest numbers first
  explicit PageAllocator(std::int64_t num_pages, std::shared_ptr<PageSource> source = nullptr)
      : references_(static_cast<std::size_t>(num_pages), 0), source_(std::move(source)) {
    if (source_ != nullptr) return;
    free_.reserve(static_cast<std::size_t>(num_pages));
    for (std::int64_t page = num_pages; page-- > 0;)
      free_.push_back(static_cast<std::int32_t>(page));
  }

  std::int64_t num_pages() const { return static_cast<std::int64_t>(references_.size()); }
  std::int64_t num_free() const {
    const std::lock_guard lock(mutex_);
    return free_pages();
  }

  /// @brief Raises CapacityError unless `count` pages are free.
  void require(std::int64_t count) const {
    const std::lock_guard lock(mutex_);
    require_locked(count);
  }
  /// @brief Takes a free page. The caller has called require(). @throws StateError if the engine's
  /// source returns a page outside the pool, or one in use; CapacityError if another thread has
  /// taken the last one since
  std::int32_t take() {
    const std::lock_guard lock(mutex_);
    require_locked(1);
    if (free_.empty()) take_from_source();
    const std::int32_t page = free_.back();
    free_.pop_back();
    references_[static_cast<std::size_t>(page)] = 1;
    return page;
  }
  /// @brief One more sequence reads this page.
  void share(std::int32_t page) {
    const std::lock_guard lock(mutex_);
    if (++references_[static_cast<std::size_t>(page)] == 2) ++shared_;
  }
  /// @brief One sequence fewer reads this page. The last release frees it.
  void release(std::int32_t page) noexcept {
    const std::lock_guard lock(mutex_);
    const std::int32_t left = --references_[static_cast<std::size_t>(page)];
    if (left == 1) --shared_;
    if (left != 0) return;
    if (source_ != nullptr && static_cast<std::int64_t>(free_.size()) >= held_) {
      source_->release(page);
      return;
    }
    free_.push_back(page);  // within its capacity
    if (source_ != nullptr) references_[static_cast<std::size_t>(page)] = kHeld;
  }
  /// @brief Sequences that read this page.
  int references(std::int32_t page) const { return references_[static_cast<std::size_t>(page)]; }
  /// @brief True when a write would be seen by another sequence.
  bool shared(std::int32_t page) const { return references(page) > 1; }
  /// @brief Whether any page is shared. If none is, no write takes a page.
  bool shares_any() const {
    const std::lock_guard lock(mutex_);
    return shared_ > 0;
  }

 private:
  friend class HeldPages;
  // The mutex is locked in these.
  std::int64_t free_pages() const {
    return static_cast<std::int64_t>(free_.size()) + (source_ != nullptr ? source_->num_free() : 0);
  }
  void require_locked(std::int64_t count) const {
    if (count > free_pages())
      detail::fail<CapacityError>("page pool: ", count, " pages needed, ", free_pages(), " free");
  }
  void take_from_source() {
    const std::int32_t page = source_->take();
    if (page < 0 || page >= num_pages() || references(page) != 0) {
      detail::fail<StateError>(
          "page source: gave page ", page,
          page < 0 || page >= num_pages() ? ", pages 0 to " : ", which is taken; of pages 0 to ",
          num_pages() - 1);
    }
    free_.push_back(page);
    references_[static_cast<std::size_t>(page)] = kHeld;
  }
  mutable std::mutex mutex_;                 ///< of all that is below
  static constexpr std::int32_t kHeld = -1;  ///< in place of the references of a held page
  std::vector<std::int32_t> references_;
  std::vector<std::int32_t> free_;  ///< with a source: pages that HeldPages has taken from it
  std::int64_t shared_ = 0;         ///< pages of several sequences
  std::int64_t held_ = 0;           ///< as many free pages as take() must hand out without failing
  struct Holder {
    std::thread::id thread;
    std::int64_t count;
  };
  std::vector<Holder> holders_;  ///< whose the held pages are: an entry a thread
  std::shared_ptr<PageSource> source_;
};

/// @brief While it lives, the next `count` calls of take() cannot fail: an engine's source has
/// handed out their pages already. Pages that are left go back to it. A nested one of the same
/// thread shares the pages of the outer one; those of other threads hold pages of their own.
class HeldPages {
 public:
  /// @throws CapacityError if fewer are free; whatever the source throws, and then none is taken
  HeldPages(PageAllocator& allocator, std::int64_t count) : allocator_(allocator) {
    const std::lock_guard lock(allocator.mutex_);
    allocator.require_locked(count);
    if (allocator.source_ == nullptr) return;
    before_ = own_count();
    const std::int64_t needed = allocator.held_ - before_ + count;  // those of other threads, too
    struct Undo {
      HeldPages* pages;
      ~Undo() {
        if (pages != nullptr) pages->give_back();
      }
    } undo{this};
    allocator.free_.reserve(static_cast<std::size_t>(needed));
    while (static_cast<std::int64_t>(allocator.free_.size()) < needed) allocator.take_from_source();
    std::reverse(allocator.free_.begin(),
                 allocator.free_.end());  // take() keeps the source's order
    set_own_count((std::max)(before_, count));
    undo.pages = nullptr;
  }
  HeldPages(const HeldPages&) = delete;
  HeldPages& operator=(const HeldPages&) = delete;
  ~HeldPages() {
    const std::lock_guard lock(allocator_.mutex_);
    give_back();
  }

 private:
  // The mutex is locked in these.
  void give_back() noexcept {
    if (allocator_.source_ == nullptr) return;
    set_own_count(before_);
    while (static_cast<std::int64_t>(allocator_.free_.size()) > allocator_.held_) {
      const std::int32_t page = allocator_.free_.back();
      allocator_.free_.pop_back();
      allocator_.references_[static_cast<std::size_t>(page)] = 0;
      allocator_.source_->release(page);
    }
  }
  auto own_entry() const noexcept {
    const std::thread::id self = std::this_thread::get_id();
    return std::find_if(allocator_.holders_.begin(), allocator_.holders_.end(),
                        [self](const auto& holder) { return holder.thread == self; });
  }
  /// What this thread holds: by the objects around this one.
  std::int64_t own_count() const noexcept {
    const auto entry = own_entry();
    return entry == allocator_.holders_.end() ? 0 : entry->count;
  }
  /// Does not allocate, and does not throw, unless it is the thread's first.
  void set_own_count(std::int64_t count) {
    const auto entry = own_entry();
    const std::int64_t more = count - own_count();
    if (entry == allocator_.holders_.end()) {
      if (count != 0) allocator_.holders_.push_back({std::this_thread::get_id(), count});
    } else if (count != 0) {
      entry->count = count;
    } else {
      *entry = allocator_.holders_.back();
      allocator_.holders_.pop_back();
    }
    allocator_.held_ += more;
  }
  PageAllocator& allocator_;
  std::int64_t before_ = 0;
};

/// @brief Pages taken in advance for an operation. The destructor releases the pages that were not
/// used.
class TakenPages {
 public:
  explicit TakenPages(PageAllocator& allocator) : allocator_(allocator) {}
  TakenPages(const TakenPages&) = delete;
  TakenPages& operator=(const TakenPages&) = delete;
  ~TakenPages() {
    for (const std::int32_t page : pages_) allocator_.release(page);
  }
  void take() {
    if (pages_.size() == pages_.capacity()) pages_.reserve(2 * pages_.size() + 8);
    pages_.push_back(allocator_.take());
  }
  /// @brief Passes one of the pages to the caller, who now owns it.
  std::int32_t next() {
    const std::int32_t page = pages_.back();
    pages_.pop_back();
    return page;
  }

 private:
  PageAllocator& allocator_;
  std::vector<std::int32_t> pages_;
};

/// @brief Counts the pages that a batch of operations will take, before any operation runs: new
/// pages, and copies of shared pages. If all sharers of a page write, the last one keeps the
/// original.
class PageDemand {
 public:
  void add_new(std::int64_t pages) { new_pages_ += pages; }
  /// @brief One more sequence will write `page`.
  void add_write(const PageAllocator& allocator, std::int32_t page) {
    if (!allocator.shared(page)) return;
    int& writers = writers_[page];
    if (++writers < allocator.references(page)) ++copies_;
  }
  std::int64_t total() const { return new_pages_ + copies_; }

 private:
  std::int64_t new_pages_ = 0;
  std::int64_t copies_ = 0;
  std::unordered_map<std::int32_t, int> writers_;
};

LOWRANKKV_NAMESPACE_END
