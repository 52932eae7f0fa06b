// SPDX-License-Identifier: Apache-2.0
// What an error in a stored key or value costs the model's loss, from gradients.
#pragma once

#include <cstdint>
#include <string>

#include "evaluate.hpp"

namespace llama {

/// Replaces the coding statistics of a calibration by rows and gradients of `max_tokens` tokens of
/// a text, in windows of `window` tokens spread evenly over it. Labels are drawn from the model's
/// own distribution, the same for every run. Costs a backward pass a window: about four times a
/// forward pass.
void use_loss_metric(const Engine& engine, const std::string& text, std::int64_t max_tokens,
                     int window, Calibration& calibration);

}  // namespace llama
