// SPDX-License-Identifier: Apache-2.0
// expected-error: is missing 'static RowBounds bounds(const TokenPolicy&, const RowBatch&)'
#include "lowrankkv/presets.hpp"

namespace lowrankkv {
struct Mine {};
template <>
struct Impl<Mine, Cpu> {
  static constexpr bool compresses = true;
  static constexpr Evidence evidence = Evidence::none;
  static int recent(const Mine&) { return 0; }
  static void classify(const Mine&, const RowBatch&, std::span<RowFate>) {}
};

std::size_t instantiate() {
  return sizeof(CompressedKVCache<Cpu, PerHead, Static, Compose<SinkRecent, Mine>>);
}
}  // namespace lowrankkv
