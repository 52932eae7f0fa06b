// SPDX-License-Identifier: Apache-2.0
// What the targets of the example engine's JSON files share.
#pragma once

#include <stdexcept>
#include <typeinfo>
#include <utility>

#include "fuzz.hpp"

namespace fuzz {

/// Calls `read` and then what it returns. @return false if `read` raised the engine's error, which
/// is std::runtime_error itself: errors derived from it are those of other libraries
template <class Read>
bool read_engine_file(Read&& read) {
  try {
    std::forward<Read>(read)();
  } catch (const std::runtime_error& error) {
    if (typeid(error) != typeid(std::runtime_error)) throw;
    require(*error.what() != '\0', "an error has a text");
    return false;
  }
  return true;
}

}  // namespace fuzz
