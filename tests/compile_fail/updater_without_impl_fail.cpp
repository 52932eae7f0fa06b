// SPDX-License-Identifier: Apache-2.0
// expected-error: this Updater has no Impl<Updater, Backend>
#include "lowrankkv/presets.hpp"

namespace lowrankkv {
struct Mine {};

std::size_t instantiate() { return sizeof(CompressedKVCache<Cpu, PerHead, Mine>); }
}  // namespace lowrankkv
