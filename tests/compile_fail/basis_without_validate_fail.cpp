// SPDX-License-Identifier: Apache-2.0
// expected-error: missing 'static void validate(const Basis&
#include "lowrankkv/presets.hpp"

namespace lowrankkv {
struct Mine {};

template <>
struct Impl<Mine, Cpu> {
  static std::vector<float> working_basis(const Mine&, const HeadBasis&, int, Part) { return {}; }
  static void to_metric(const Mine&, const HeadBasis&, int, Part, float*, int) {}
  static HeadBasis with_working_bases(const Mine&, const HeadBasis&, int, std::vector<float>,
                                      std::vector<float>) {
    return {};
  }
};

std::size_t instantiate() { return sizeof(CompressedKVCache<Cpu, Mine>); }
}  // namespace lowrankkv
