// SPDX-License-Identifier: Apache-2.0
// expected-error: this Quantizer has no Impl<Quantizer, Backend>
#include "lowrankkv/presets.hpp"

namespace lowrankkv {
struct Mine {};

std::size_t instantiate() {
  return sizeof(CompressedKVCache<Cpu, PerHead, Static, SinkRecent, Mine>);
}
}  // namespace lowrankkv
