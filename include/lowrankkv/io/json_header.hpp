// SPDX-License-Identifier: Apache-2.0
/// @file io/json_header.hpp  A strict parser for the subset of JSON in safetensors headers:
/// objects, strings, integer lists.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace io::detail {

/// Reads a header from left to right. Unexpected input raises FormatError with its byte offset.
class HeaderParser {
 public:
  HeaderParser(const char* text, std::size_t size) : text_(text), size_(size) {}

  [[noreturn]] void fail(const std::string& found) const {
    ::lowrankkv::detail::fail<FormatError>("safetensors header: ", found, " at byte ", at_, " of ",
                                           size_);
  }

  /// Parses an object: calls member(key) at each value, which member must parse. Refuses duplicate
  /// keys.
  template <class Member>
  void object(Member&& member) {
    expect('{');
    std::set<std::string> seen;
    if (accept('}')) return;
    do {
      const std::string key = string();
      if (!seen.insert(key).second) fail("the key '" + key + "' a second time");
      expect(':');
      member(key);
    } while (accept(','));
    expect('}');
  }

  std::vector<std::int64_t> integers() {
    std::vector<std::int64_t> values;
    expect('[');
    if (accept(']')) return values;
    do {
      values.push_back(integer());
    } while (accept(','));
    expect(']');
    return values;
  }

  std::string string() {
    expect('"');
    std::string value;
    while (at_ < size_ && text_[at_] != '"') {
      const unsigned char c = static_cast<unsigned char>(text_[at_]);
      if (c < 0x20) fail("a control character in a string");
      if (c != '\\') {
        value += text_[at_++];
        continue;
      }
      ++at_;
      escape(value);
    }
    if (at_ >= size_) fail("the end of the header in a string");
    ++at_;
    return value;
  }

  /// Raises FormatError if anything but padding follows.
  void end() {
    space();
    if (at_ != size_) fail("something after the end");
  }

 private:
  void space() {
    while (at_ < size_ &&
           (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\r' || text_[at_] == '\t'))
      ++at_;
  }
  bool accept(char wanted) {
    space();
    if (at_ >= size_ || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }
  void expect(char wanted) {
    if (!accept(wanted)) fail(std::string("no '") + wanted + "'");
  }
  std::int64_t integer() {
    space();
    const std::size_t start = at_;
    std::int64_t value = 0;
    for (; at_ < size_ && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      const int digit = text_[at_] - '0';
      if (value > ((std::numeric_limits<std::int64_t>::max)() - digit) / 10)
        fail("a number beyond 63 bits");
      value = value * 10 + digit;
    }
    if (at_ == start) fail("no non-negative integer");
    return value;
  }
  void escape(std::string& value) {
    if (at_ >= size_) fail("the end of the header in an escape");
    const char c = text_[at_++];
    switch (c) {
      case '"':
      case '\\':
      case '/':
        value += c;
        return;
      case 'b':
        value += '\b';
        return;
      case 'f':
        value += '\f';
        return;
      case 'n':
        value += '\n';
        return;
      case 'r':
        value += '\r';
        return;
      case 't':
        value += '\t';
        return;
      case 'u':
        break;
      default:
        fail("an unknown escape");
    }
    unsigned code = 0;
    for (int digit = 0; digit < 4; ++digit, ++at_) {
      const char h = at_ < size_ ? text_[at_] : '\0';
      const int part = h >= '0' && h <= '9'   ? h - '0'
                       : h >= 'a' && h <= 'f' ? h - 'a' + 10
                       : h >= 'A' && h <= 'F' ? h - 'A' + 10
                                              : -1;
      if (part < 0) fail("a bad \\u escape");
      code = code * 16 + static_cast<unsigned>(part);
    }
    if (code >= 0xd800 && code < 0xe000) fail("a surrogate escape, which names never need");
    if (code < 0x80) {
      value += static_cast<char>(code);
    } else if (code < 0x800) {
      value += static_cast<char>(0xc0 | (code >> 6));
      value += static_cast<char>(0x80 | (code & 0x3f));
    } else {
      value += static_cast<char>(0xe0 | (code >> 12));
      value += static_cast<char>(0x80 | ((code >> 6) & 0x3f));
      value += static_cast<char>(0x80 | (code & 0x3f));
    }
  }

  const char* text_;
  std::size_t size_;
  std::size_t at_ = 0;
};

/// `value` as a JSON string.
inline std::string quoted(const std::string& value) {
  std::string text = "\"";
  for (const char c : value) {
    if (c == '"' || c == '\\') {
      text += '\\';
      text += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x",
                    static_cast<unsigned>(static_cast<unsigned char>(c)));
      text += code;
    } else {
      text += c;
    }
  }
  return text + '"';
}

}  // namespace io::detail
LOWRANKKV_NAMESPACE_END
