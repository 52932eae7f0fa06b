// SPDX-License-Identifier: Apache-2.0
// Codes of any number of bits, packed into bytes.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "lowrankkv/quantizer/bit_packing.hpp"

namespace bit_packing_tests {

using namespace lowrankkv;

namespace {

std::vector<std::byte> noise(std::mt19937_64& random, std::size_t bytes) {
  std::vector<std::byte> block(bytes);
  for (std::byte& byte : block) byte = static_cast<std::byte>(random());
  return block;
}

}  // namespace

TEST_CASE(
    "codes of every width come back, whatever the place and length, and neighbours keep theirs") {
  std::mt19937_64 random(1);
  for (int bits = 1; bits <= 8; ++bits) {
    for (const int length : {1, 2, 3, 7, 8, 9, 31, 64, 101}) {
      const std::size_t bytes = packed_bytes(length, bits);
      CHECK(bytes == static_cast<std::size_t>((length * bits + 7) / 8));
      std::vector<std::byte> line = noise(random, bytes);
      std::vector<unsigned> codes;
      for (int i = 0; i < length; ++i) codes.push_back(get_code(line.data(), i, bits));
      for (int trial = 0; trial < 3 * length; ++trial) {
        const auto at = static_cast<std::size_t>(random() % static_cast<unsigned>(length));
        codes[at] = static_cast<unsigned>(random()) & ((1U << bits) - 1U);
        put_code(line.data(), static_cast<std::int64_t>(at), bits, codes[at]);
      }
      for (int i = 0; i < length; ++i)
        REQUIRE(get_code(line.data(), i, bits) == codes[static_cast<std::size_t>(i)]);
    }
  }
}

}  // namespace bit_packing_tests
