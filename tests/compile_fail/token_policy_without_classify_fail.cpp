// SPDX-License-Identifier: Apache-2.0
// expected-error: missing 'static void classify(
#include "lowrankkv/compressed_kv_cache.hpp"

namespace lowrankkv {
struct Mine {};

template <>
struct Impl<Mine, Cpu> {
  static constexpr bool compresses = true;
  static int recent(const Mine&) { return 0; }
  static std::int64_t max_full_rows(const Mine&, std::int64_t) { return 0; }
};

std::size_t instantiate() { return sizeof(CompressedKVCache<Cpu, PerHead, Static, Mine>); }
}  // namespace lowrankkv
