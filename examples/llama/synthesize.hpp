// SPDX-License-Identifier: Apache-2.0
// Fresh samples of the eight retrieval tasks, in the format of the evaluation sets: constants are
// tuned on these, never on those.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "evaluate.hpp"
#include "program_folder.hpp"

namespace llama {

/// s1: a number in noise; s2: in text; s3: a phrase in text; mk1: one of four keys in text; mk2:
/// one key of a list of pairs; mv: four values of one key in text; mq: four keys in text, all asked
/// for; vt: a chain of two assignments in noise.
const std::vector<std::string>& synthetic_tasks();

struct SynthesisOptions {
  std::vector<std::string> tasks{};  ///< all if empty
  std::int64_t length =
      4096;  ///< BOS, prompt and answer have at most this many tokens and at least 93 % of it
  int samples = 25;  ///< of each task
  std::uint64_t seed = 1;
};

/// A sample as the models see it (the prompt begins with BOS if they have one) and as text.
struct SyntheticSample {
  Sample sample;
  std::string prompt_text;
  std::string answer_text;
  std::vector<double> depths;  ///< where each needle lies, a fraction of the places in the haystack
};

/// Samples, task after task. They depend on seed, task, index and length (and on text, words and
/// tokenizer) alone, on every platform: a larger set begins with the smaller one. Haystacks are
/// slices of `text`, whose separators of documents become newlines. Throws std::runtime_error if a
/// task is unknown, or does not fit into `length`, or the text is too short.
std::vector<SyntheticSample> synthesize(const Tokenizer& tokenizer, const Config& config,
                                        const std::string& text,
                                        const std::vector<std::string>& words,
                                        const SynthesisOptions& options);

/// words.txt in the folder of a program, where the build puts it. Throws std::runtime_error, which
/// names the option that takes another file, if there is none.
std::string words_beside(const std::filesystem::path& program);

/// The words of a file, each once, of which keys and phrases are made.
std::vector<std::string> read_words(const std::string& path);

/// Writes PREFIX.json and PREFIX.bin, which load_samples reads.
void write_samples(const std::string& prefix, const std::vector<SyntheticSample>& samples,
                   std::int64_t length);

}  // namespace llama
