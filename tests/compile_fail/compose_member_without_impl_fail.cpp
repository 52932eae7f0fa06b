// SPDX-License-Identifier: Apache-2.0
// expected-error: this TokenPolicy has no Impl<TokenPolicy, Backend>
#include "lowrankkv/presets.hpp"

namespace lowrankkv {
struct Mine {};

std::size_t instantiate() {
  return sizeof(CompressedKVCache<Cpu, PerHead, Static, Compose<SinkRecent, Mine>>);
}
}  // namespace lowrankkv
