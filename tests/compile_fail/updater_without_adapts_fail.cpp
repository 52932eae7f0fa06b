// SPDX-License-Identifier: Apache-2.0
// expected-error: missing 'static constexpr bool adapts'
#include "lowrankkv/presets.hpp"

namespace lowrankkv {
struct Mine {};

template <>
struct Impl<Mine, Cpu> {
  struct State {};
  static PromptSelection prompt_selection(const Mine&) { return {}; }
  template <class S>
  static void observe(const Mine&, S&, MatrixView, MatrixView, Phase) {}
  template <class S>
  static bool maybe_update(const Mine&, S&, MatrixView, MutableMatrixView, Phase) {
    return false;
  }
  template <class S>
  static std::size_t state_bytes(const S&) {
    return 0;
  }
};

std::size_t instantiate() { return sizeof(CompressedKVCache<Cpu, PerHead, Mine>); }
}  // namespace lowrankkv
