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
/// What gradients are gathered of.
struct GradientOptions {
  std::int64_t max_tokens = 40960;
  int window = 1024;     ///< tokens of a window; windows are spread evenly over the text
  bool sinks = false;    ///< gather the first rows of each window too, apart from the others
  bool combine = false;  ///< with the coding statistics that are there: CodingStatistics::combine()
  /// Rotated keys are seen at positions of [0, positions): windows are taken as if they began at
  /// first_position(). Attention depends on distances alone, so that a window's keys and their
  /// gradients there are those of position 0, rotated further. At most `window`: all begin at 0.
  std::int64_t positions = 0;
};

/// The position at which the `index`-th window is taken to begin: 0 for the first, all of them
/// spread evenly over [0, span].
std::int64_t first_position(std::int64_t index, std::int64_t span);

/// The same of a text's tokens, with a checkpoint as calibrate() has it, of which `calibration`
/// came.
void use_loss_metric(const Engine& engine, const std::vector<std::int32_t>& ids,
                     const GradientOptions& options, Calibration& calibration,
                     Checkpoint* checkpoint);

}  // namespace llama
