// SPDX-License-Identifier: Apache-2.0
// Evaluation sets: prompts of token ids, and the answers that are expected.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace llama {

class JsonValue;

/// One sample of an evaluation set.
struct Sample {
  std::string task;
  std::vector<std::int32_t> prompt;
  std::vector<std::int32_t> answer;
};
/// Reads PREFIX.json and PREFIX.bin; the first `per_task` samples of each of `tasks` (all if
/// empty).
std::vector<Sample> load_samples(const std::string& prefix, const std::vector<std::string>& tasks,
                                 int per_task);
/// The same of files that were read before: `rows` of PREFIX.json, `raw` the bytes of PREFIX.bin.
std::vector<Sample> read_samples(const std::string& prefix, const JsonValue& rows,
                                 const std::string& raw, const std::vector<std::string>& tasks,
                                 int per_task);

}  // namespace llama
