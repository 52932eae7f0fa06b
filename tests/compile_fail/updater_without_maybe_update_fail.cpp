// SPDX-License-Identifier: Apache-2.0
// expected-error: missing 'static bool maybe_update(
#include "lowrankkv/presets.hpp"

namespace lowrankkv {
struct Mine {};

template <>
struct Impl<Mine, Cpu> {
  static constexpr bool adapts = true;
  struct State {};
  static PromptSelection prompt_selection(const Mine&) { return {}; }
  template <class S>
  static void observe(const Mine&, S&, MatrixView, MatrixView, Phase) {}
  template <class S>
  static std::size_t state_bytes(const S&) {
    return 0;
  }
};

std::size_t instantiate() { return sizeof(CompressedKVCache<Cpu, PerHead, Mine>); }
}  // namespace lowrankkv
