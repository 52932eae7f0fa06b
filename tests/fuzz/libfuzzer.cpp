// SPDX-License-Identifier: Apache-2.0
// A target for libFuzzer, which has the main function.
#include "fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::accepts(std::as_bytes(std::span(data, size)));
  return 0;
}
