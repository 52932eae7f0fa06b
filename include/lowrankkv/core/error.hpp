// SPDX-License-Identifier: Apache-2.0
/// @file core/error.hpp  Typed errors. Their text names both values, for example `head_dim: basis
/// 128, key 64`.
///
/// Every public function checks its arguments before it changes anything: after an error the cache
/// is as it was before the call.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Base of every error that the library raises.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};
/// @brief Extents or strides do not match (head_dim, number of heads, number of tokens, rank).
class ShapeError : public Error {
 public:
  using Error::Error;
};
/// @brief A value cannot be used: NaN or Inf, too large for the stored type, a basis that is not
/// orthonormal.
class ValueError : public Error {
 public:
  using Error::Error;
};
/// @brief A fixed capacity would be exceeded: tokens, sequences, pages, tail.
class CapacityError : public Error {
 public:
  using Error::Error;
};
/// @brief An unknown sequence, or one that exists already.
class SequenceError : public Error {
 public:
  using Error::Error;
};
/// @brief The call does not fit the state of the sequence (for example an unfinished prefill).
class StateError : public Error {
 public:
  using Error::Error;
};
/// @brief A file or buffer is truncated, inconsistent or of another kind.
class FormatError : public Error {
 public:
  using Error::Error;
};

/// @brief Handler that is called instead of throwing where exceptions are off. It must not return;
/// if it does, the program aborts.
using ErrorHandler = void (*)(const char* message);

/// @brief The replaceable error handler; the default prints the message. Used only where exceptions
/// are off.
inline ErrorHandler& error_handler() {
  static ErrorHandler handler = [](const char* message) {
    std::fprintf(stderr, "lowrankkv: %s\n", message);
  };
  return handler;
}

namespace detail {

/// Concatenates its arguments as a stream would print them.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

/// Raises `E` with the concatenation of `parts` as its message.
template <class E, class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
#if defined(LOWRANKKV_NO_EXCEPTIONS)
  error_handler()(text(parts...).c_str());
  std::abort();
#else
  throw E(text(parts...));
#endif
}

/// Bytes as a message can show them: those that cannot be printed, and backslashes, as \xNN.
inline std::string printable(std::string_view bytes) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string shown;
  for (const char byte : bytes) {
    const auto value = static_cast<unsigned char>(byte);
    if (value >= 0x20 && value < 0x7f && byte != '\\') {
      shown += byte;
    } else {
      shown += {'\\', 'x', kDigits[value >> 4], kDigits[value & 15]};
    }
  }
  return shown;
}

/// Raises ShapeError `what: left_name left, right_name right` unless the two are equal.
template <class Left, class Right>
void check_equal(const char* what, const char* left_name, Left left, const char* right_name,
                 Right right) {
  if (left != static_cast<Left>(right)) {
    fail<ShapeError>(what, ": ", left_name, " ", left, ", ", right_name, " ", right);
  }
}

}  // namespace detail
LOWRANKKV_NAMESPACE_END
