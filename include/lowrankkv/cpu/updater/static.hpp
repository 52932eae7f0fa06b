// SPDX-License-Identifier: Apache-2.0
/// @file cpu/updater/static.hpp  Static on the CPU: nothing to observe, nothing to move.
#pragma once

#include "lowrankkv/concepts/updater.hpp"
#include "lowrankkv/updater/static.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<Static, Cpu> {
  static constexpr bool adapts = false;
  struct State {};
  static PromptSelection prompt_selection(const Static&) { return {}; }
  static void observe(const Static&, State&, MatrixView, MatrixView, Phase) {}
  static bool maybe_update(const Static&, State&, MatrixView, MutableMatrixView, Phase) {
    return false;
  }
  static std::size_t state_bytes(const State&) { return 0; }
};

static_assert(UpdaterFor<Static, Cpu>);

LOWRANKKV_NAMESPACE_END
