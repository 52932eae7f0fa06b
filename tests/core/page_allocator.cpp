// SPDX-License-Identifier: Apache-2.0
// Page counts and references, of the library's own pool and of an engine's block manager.
#include <doctest/doctest.h>

#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "lowrankkv/core/page_allocator.hpp"
#include "support/blocks.hpp"

namespace page_allocator_tests {

using namespace lowrankkv;

TEST_CASE("the page allocator counts references and names both numbers when it runs out") {
  PageAllocator pages(3);
  const auto a = pages.take();
  pages.share(a);
  pages.share(a);
  CHECK(pages.shared(a));
  pages.release(a);
  CHECK(pages.shared(a));
  CHECK(pages.shares_any());
  pages.release(a);
  CHECK(!pages.shared(a));
  CHECK(!pages.shares_any());
  CHECK(pages.num_free() == 2);
  pages.release(a);
  CHECK(pages.num_free() == 3);
  CHECK_THROWS_WITH_AS(pages.require(4), "page pool: 4 pages needed, 3 free", CapacityError);
}

TEST_CASE("pages may come from an engine's own block manager, which is not believed") {
  const auto blocks = std::make_shared<support::Blocks>(std::vector<std::int32_t>{7, 2, 5});
  PageAllocator pages(8, blocks);
  CHECK(pages.num_pages() == 8);
  CHECK(pages.num_free() == 3);
  CHECK_THROWS_WITH_AS(pages.require(4), "page pool: 4 pages needed, 3 free", CapacityError);
  CHECK(pages.take() == 5);
  pages.share(5);
  pages.release(5);
  CHECK(blocks->left.size() == 2);
  pages.release(5);
  CHECK(blocks->left == std::vector<std::int32_t>{7, 2, 5});
  CHECK(pages.take() == 5);
  blocks->left.push_back(5);
  CHECK_THROWS_WITH_AS(pages.take(), "page source: gave page 5, which is taken; of pages 0 to 7",
                       StateError);
  blocks->left.push_back(8);
  CHECK_THROWS_WITH_AS(pages.take(), "page source: gave page 8, pages 0 to 7", StateError);
  blocks->left.clear();
  CHECK_THROWS_WITH_AS(pages.take(), "page pool: 1 pages needed, 0 free", CapacityError);
}

TEST_CASE("pages held by two threads are apart, and all go back") {
  const auto blocks =
      std::make_shared<support::Blocks>(std::vector<std::int32_t>{0, 1, 2, 3, 4, 5});
  PageAllocator pages(8, blocks);
  std::optional<HeldPages> own(std::in_place, pages, 3);
  CHECK(blocks->left.size() == 3);
  std::promise<void> other_holds, own_gone;
  std::thread other([&] {
    const HeldPages outer(pages, 2);
    const HeldPages inner(pages, 1);  // shares the pages of the outer one
    other_holds.set_value();
    own_gone.get_future().wait();
  });
  other_holds.get_future().wait();
  CHECK(blocks->left.size() == 1);
  own.reset();
  CHECK(blocks->left.size() == 4);  // those of the other thread are still held
  own_gone.set_value();
  other.join();
  CHECK(blocks->left.size() == 6);
  pages.release(pages.take());
  CHECK(blocks->left.size() == 6);
}

}  // namespace page_allocator_tests
