// SPDX-License-Identifier: Apache-2.0
// The example engine on the model in examples/data.
#pragma once

#include <string>

#include "evaluate.hpp"

namespace llama {

inline const std::string kData = LOWRANKKV_EXAMPLE_DATA;

/// The engine on `nano`, with two threads: made once a program.
inline const Engine& nano() {
  static const Engine engine(kData + "/nano", 2);
  return engine;
}

}  // namespace llama
