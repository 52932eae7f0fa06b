// SPDX-License-Identifier: Apache-2.0
// Tokens a second of prompts and of decode steps, every method against FullKV in the same run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "evaluate.hpp"

namespace llama {

struct SpeedOptions {
  int decode_tokens = 64;  ///< steps of one token behind the prompt
  int rounds = 5;          ///< repeats of prompt and decode steps
};

/// Times a prompt and single-token decode steps behind it, logits of each step included. In every
/// round all contenders are timed one after the other, beginning with another one each time, so
/// that what slows the machine down for a while slows all of them. Before the first round each runs
/// a few tokens untimed. Fills the rows' speed and bytes.
/// @throws std::runtime_error if there is no prompt, no step or no round, or if the model has fewer
/// positions than prompt and steps
void measure_speed(const Engine& engine, std::vector<Contender>& contenders,
                   const std::vector<std::int32_t>& prompt, const SpeedOptions& options);

/// measure_speed at several lengths of the prompt; one row a method, ratio and length.
/// @param names    methods; FullKV is timed with them in any case
/// @param context  tokens at which methods that think in bytes meet their ratio: options.context,
/// or, where that is 0, the length of the prompt
/// @param tokens   of which prompts are the beginning
/// @throws std::runtime_error if a length is more than tokens.size(), and as measure_speed
std::vector<Row> measure_speed_at(const Engine& engine, std::vector<std::string> names,
                                  const std::vector<double>& ratios, const MethodOptions& method,
                                  const Calibration& calibration,
                                  const std::vector<std::int64_t>& lengths,
                                  const std::vector<std::int32_t>& tokens,
                                  const SpeedOptions& options);

/// `count` ids: BOS, if the model has one, and ids drawn evenly from the vocabulary, the same for
/// the same seed; fewer are the beginning of more. What a method costs hardly depends on what the
/// text says.
std::vector<std::int32_t> drawn_tokens(const Config& config, std::int64_t count,
                                       std::uint64_t seed);

/// The value in the middle, or the mean of the two there. Throws std::runtime_error if there is
/// none.
double median(std::vector<double> values);

}  // namespace llama
