// SPDX-License-Identifier: Apache-2.0
// expected-error: missing 'static void decode(const Quantizer&
#include "lowrankkv/compressed_kv_cache.hpp"

namespace lowrankkv {
struct Mine {};

template <>
struct Impl<Mine, Cpu> {
  static std::size_t row_bytes(const Mine&, int rank) { return static_cast<std::size_t>(rank); }
  static void encode(const Mine&, Part, BlockShape, std::byte*, int, int, const float*, int) {}
};

std::size_t instantiate() { return sizeof(CompressedKVCache<Cpu, PerHead, Static, SinkRecent, Mine>); }
}  // namespace lowrankkv
