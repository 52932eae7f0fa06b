// SPDX-License-Identifier: Apache-2.0
// Samples that RULER's generator wrote (github.com/NVIDIA/RULER, Apache-2.0), and its scores.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace llama {

/// How the tasks of a name are scored.
struct RulerScoring {
  bool all = true;  ///< the share of references that the answer contains; else: whether it has one
  int tokens = 0;   ///< of an answer at most
};

/// A line of RULER's JSON Lines.
struct RulerSample {
  std::string task;
  std::string prompt;  ///< `input`, and behind it `answer_prefix` where there is one
  std::vector<std::string> references;  ///< `outputs`
  RulerScoring scoring;
};

/// As RULER has it: niah..., vt, cwe and fwe are scored by all references in 128, 30, 120 and 50
/// tokens, qa... by any of them in 32. Throws std::runtime_error for other names.
RulerScoring ruler_scoring(const std::string& task);

/// The samples of one file. Read are the fields `input`, `outputs` (texts, none of them empty) and
/// `answer_prefix`, which may be missing; older versions of RULER have it in `input`. Other fields
/// are none of a score's business. Empty lines are passed over. Throws std::runtime_error naming
/// file, line and field.
std::vector<RulerSample> read_ruler(const std::string& task, std::string_view lines,
                                    const std::string& file);

/// The samples under `path`: a folder as prepare.py's --save_dir, of folders called as their tasks,
/// with one file *.jsonl in each; or one file TASK/validation.jsonl or TASK.jsonl.
/// @param tasks  of these alone, in the order of the folder's names; empty: of all
/// @param per_task  the first so many of each
/// Throws std::runtime_error if a task has no file, or two, or its name is none of RULER's.
std::vector<RulerSample> load_ruler(const std::string& path, const std::vector<std::string>& tasks,
                                    int per_task);

/// RULER's string_match_all or string_match_part of one answer: capitals do not matter, nor do
/// white space around the answer and control characters in it, which count as newlines.
double string_match(std::string_view answer, const RulerSample& sample);

}  // namespace llama
