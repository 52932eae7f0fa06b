// SPDX-License-Identifier: Apache-2.0
// expected-error: this Basis has no Impl<Basis, Backend>
#include "lowrankkv/presets.hpp"

namespace lowrankkv {
struct Mine {};

std::size_t instantiate() { return sizeof(CompressedKVCache<Cpu, Mine>); }
}  // namespace lowrankkv
