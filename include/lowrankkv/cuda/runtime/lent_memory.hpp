// SPDX-License-Identifier: Apache-2.0
/// @file cuda/runtime/lent_memory.hpp  LentMemory: device memory that the caller lends to caches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Device memory that the caller lends. Layers can share it if their calls run one after the
/// other.
struct LentMemory {
  std::uint8_t* data = nullptr;  ///< 128-byte aligned
  std::size_t bytes = 0;
  /// Held while the memory is in use; null: the memory outlives its users.
  std::shared_ptr<const void> owner = nullptr;
  explicit operator bool() const { return data != nullptr; }
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
