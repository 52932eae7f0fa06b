// SPDX-License-Identifier: Apache-2.0
// What an error in a stored key or value costs the model's loss, from gradients.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint.hpp"
#include "evaluate.hpp"

namespace llama {

/// Replaces the coding statistics of a calibration by rows and gradients of `max_tokens` tokens of
/// a text, in windows of `window` tokens spread evenly over it. Labels are drawn from the model's
/// own distribution, the same for every run. Costs a backward pass a window: about four times a
/// forward pass.
void use_loss_metric(const Engine& engine, const std::string& text, std::int64_t max_tokens,
                     int window, Calibration& calibration);
/// The same of windows spread over `ids`, with a checkpoint as calibrate() has it, of which
/// `calibration` came.
/// @param sinks  gather the first rows of each window, apart from the others
void use_loss_metric(const Engine& engine, const std::vector<std::int32_t>& ids,
                     std::int64_t max_tokens, int window, bool sinks, Calibration& calibration,
                     Checkpoint* checkpoint);

}  // namespace llama
