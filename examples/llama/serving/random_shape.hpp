// SPDX-License-Identifier: Apache-2.0
// Models of a public shape with random weights, and caches of random rows: what a step costs does
// not depend on what the numbers are.
#pragma once

#include <string>
#include <vector>

#include "kv_store.hpp"
#include "model.hpp"

namespace llama {

/// The names that shape_of() knows.
std::vector<std::string> shape_names();
/// The configuration of a public model. Throws std::runtime_error for a name that is unknown.
Config shape_of(const std::string& name);

/// Standard deviations of the channels of random rows [head_dim]: a spectrum that falls as those of
/// trained models do.
std::vector<float> random_spectrum(int head_dim);
/// A calibration to random rows of that spectrum, the same in every layer: so that methods choose
/// bases and codes. @param pre_rope  of keys before their rotary embedding too
Calibration random_calibration(const Config& config, bool pre_rope);

}  // namespace llama
