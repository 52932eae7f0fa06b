// SPDX-License-Identifier: Apache-2.0
// An engine's block manager: hands out pages in an order of its own, some of which others have.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "lowrankkv/core/page_allocator.hpp"

namespace support {

struct Blocks : lowrankkv::PageSource {
  explicit Blocks(std::vector<std::int32_t> pages) : left(std::move(pages)) {}
  std::int64_t num_free() const override { return static_cast<std::int64_t>(left.size()); }
  std::int32_t take() override {
    const std::int32_t page = left.back();
    left.pop_back();
    return page;
  }
  void release(std::int32_t page) noexcept override { left.push_back(page); }

  std::vector<std::int32_t> left;  ///< the last goes first
};

}  // namespace support
