// SPDX-License-Identifier: Apache-2.0
// What a fuzz target is: a reader of files that are not trusted, and what must hold of whatever it
// accepts. Two programs are made of a target: with libfuzzer.cpp one that looks for inputs, with
// replay.cpp one that reads the inputs of tests/fuzz/corpus.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fuzz {

using Bytes = std::vector<std::byte>;
using Input = std::span<const std::byte>;

/// An input that begins a corpus.
struct Seed {
  std::string name;  ///< of its file
  Bytes bytes;
};

/// Defined by each target. Reads an input and tries what it gave.
/// @return whether it was accepted: false after a documented error. Other exceptions, and
/// broken(), end the program
bool accepts(Input input);
/// Defined by each target. The inputs that its corpus begins with; all of them are accepted.
std::vector<Seed> seeds();

/// Ends the program: `what` does not hold of an input.
[[noreturn]] inline void broken(const std::string& what) {
  std::fprintf(stderr, "fuzz: %s\n", what.c_str());
  std::abort();
}
/// Ends the program unless `holds`.
inline void require(bool holds, const char* what) {
  if (!holds) broken(what);
}

inline std::string_view text_of(Input input) {
  return {reinterpret_cast<const char*>(input.data()), input.size()};
}
inline Bytes bytes_of(std::string_view text) {
  const auto all = std::as_bytes(std::span(text));
  return {all.begin(), all.end()};
}

/// The parts of an input that stands for two files: what is before its first NUL, and behind it.
struct TwoParts {
  std::string_view first, second;
};
inline TwoParts two_parts(Input input) {
  const std::string_view text = text_of(input);
  const std::size_t end = std::min(text.find('\0'), text.size());
  return {text.substr(0, end), text.substr(std::min(end + 1, text.size()))};
}

}  // namespace fuzz
