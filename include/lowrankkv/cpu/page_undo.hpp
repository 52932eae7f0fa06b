// SPDX-License-Identifier: Apache-2.0
/// @file cpu/page_undo.hpp  The pages that one operation takes, writes and releases, so that it can
/// be undone.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lowrankkv/cpu/page_pool.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Access to a pool during one operation. begin() takes all pages that the operation may
/// need, before anything changes. undo() gives them back, and restores the contents and the sharing
/// of all other pages.
///
/// A page that existed before is copied aside before it is written. It is not returned to the pool
/// before commit(). Not thread-safe.
class PageUndo {
 public:
  PageUndo() = default;
  explicit PageUndo(PagePool* pool) : pool_(pool) {}

  /// @brief Takes `pages` pages. If it throws, none is taken.
  /// @throws CapacityError if fewer are free; whatever the engine's page source throws
  void begin(std::int64_t pages) {
    pool_->allocator().require(pages);
    struct Undo {
      PageUndo* taken;
      ~Undo() {
        if (taken != nullptr) taken->undo();
      }
    } guard{this};
    reserve_.reserve(static_cast<std::size_t>(pages));
    while (static_cast<std::int64_t>(reserve_.size()) < pages)
      reserve_.push_back(pool_->allocator().take());
    std::reverse(reserve_.begin(), reserve_.end());  // take() then returns them in the pool's order
    guard.taken = nullptr;
  }
  /// @brief One of the pages taken by begin(); when they are used up, one that was released since.
  /// @throws StateError if there is neither: begin() was told too few
  std::int32_t take() {
    std::vector<std::int32_t>& from = reserve_.empty() ? released_ : reserve_;
    if (from.empty()) {
      ::lowrankkv::detail::fail<StateError>("pages: ", fresh_.size(),
                                            " were taken for this call, it needs more: bounds() of "
                                            "the token policy promised fewer rows");
    }
    const std::int32_t page = from.back();
    if (&from == &reserve_)
      fresh_.insert(page);
    else
      back_up(page);
    from.pop_back();
    return page;
  }
  /// @brief Sets an entry of a page table to take().
  void take_into(std::int32_t& entry) {
    entries_.push_back({&entry, entry});
    entry = take();
  }
  /// @brief One sequence fewer reads `page`.
  void release(std::int32_t page) {
    if (pool_->allocator().shared(page)) {
      unshared_.push_back(page);
      pool_->allocator().release(page);
    } else if (fresh_.erase(page) != 0) {
      reserve_.push_back(page);  // has room: begin() reserved it
    } else {
      released_.push_back(page);
    }
  }
  /// @brief Call before the page of an entry of a page table is written. If other sequences share
  /// it, the entry gets a private copy.
  void make_writable(std::int32_t& entry) {
    const std::int32_t page = entry;
    if (!pool_->allocator().shared(page)) {
      if (fresh_.find(page) == fresh_.end()) back_up(page);
      return;
    }
    take_into(entry);
    std::memcpy(pool_->page(entry), pool_->page(page), pool_->page_bytes());
    release(page);
  }

  /// @brief Keeps all changes, and returns pages that are no longer used.
  void commit() noexcept {
    for (const std::int32_t page : released_) pool_->allocator().release(page);
    finish();
  }
  /// @brief Restores contents and sharing of all pages, and the page tables.
  void undo() noexcept {
    for (std::size_t i = entries_.size(); i-- > 0;) *entries_[i].entry = entries_[i].before;
    for (const Backup& backup : backups_)
      std::memcpy(pool_->page(backup.page), backup.bytes.get(), pool_->page_bytes());
    for (const std::int32_t page : unshared_) pool_->allocator().share(page);
    for (const std::int32_t page : fresh_) pool_->allocator().release(page);
    finish();
  }

 private:
  struct Backup {
    std::int32_t page;
    std::unique_ptr<std::byte[]> bytes;
  };
  struct Entry {
    std::int32_t* entry;
    std::int32_t before;
  };
  void back_up(std::int32_t page) {
    if (!backed_up_.insert(page).second) return;
    Backup backup{page, std::unique_ptr<std::byte[]>(new std::byte[pool_->page_bytes()])};
    std::memcpy(backup.bytes.get(), pool_->page(page), pool_->page_bytes());
    backups_.push_back(std::move(backup));
  }
  void finish() noexcept {
    for (const std::int32_t page : reserve_) pool_->allocator().release(page);
    reserve_.clear();
    fresh_.clear();
    released_.clear();
    unshared_.clear();
    backed_up_.clear();
    entries_.clear();
    backups_.clear();
  }

  PagePool* pool_ = nullptr;
  std::vector<std::int32_t> reserve_;           ///< taken from the pool, not used yet
  std::unordered_set<std::int32_t> fresh_;      ///< taken from the pool, in use
  std::vector<std::int32_t> released_;          ///< of the sequence, not in use any more
  std::vector<std::int32_t> unshared_;          ///< one reference was dropped
  std::unordered_set<std::int32_t> backed_up_;  ///< pages of backups_
  std::vector<Backup> backups_;
  std::vector<Entry> entries_;  ///< changed entries of page tables, in order
};

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
