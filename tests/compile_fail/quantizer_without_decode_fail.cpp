// SPDX-License-Identifier: Apache-2.0
// expected-error: missing 'static void decode(const Layout&
#include "lowrankkv/presets.hpp"

namespace lowrankkv {
struct Mine {};

template <>
struct Impl<Mine, Cpu> {
  using Layout = int;
  static Layout layout(const Mine&, int rank, std::span<const std::uint8_t>) { return rank; }
  static std::int64_t row_bits(int rank) { return rank; }
  static std::size_t block_bytes(int rank, int rows) {
    return static_cast<std::size_t>(rank * rows);
  }
  static void encode(int, Part, int, std::byte*, int, int, const float*, int) {}
  static void copy_row(int, Part, const std::byte*, int, int, std::byte*, int, int) {}
};

std::size_t instantiate() {
  return sizeof(CompressedKVCache<Cpu, PerHead, Static, SinkRecent, Mine>);
}
}  // namespace lowrankkv
